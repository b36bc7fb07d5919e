"""The command `audit`: attacks the ways to train that dpmp makes claims for."""

import argparse
import sys
from typing import Any

from dpmp import _validate, strategies
from dpmp.mechanism import DPSGD
from dpmp.tools import checks
from dpmp.tools.audit._batches import batches
from dpmp.tools.audit._canaries import canaries

_NUM_EXAMPLES, _BATCH_SIZE, _STEPS, _DELTA = 2**16, 2**12, 64, 1e-6

WAYS: dict[str, dict[str, Any]] = {
    "Poisson sampling": {},
    "random allocation": {"sampling": "random_allocation"},
    "correlated noise": {"strategy": strategies.banded_toeplitz(4, iterations=_STEPS)},
    "correlated noise without memory": {
        "strategy": strategies.banded_inverse(
            4, iterations=_STEPS, steps_per_epoch=_NUM_EXAMPLES // _BATCH_SIZE
        )
    },
}


def add_audit_command(commands: Any) -> None:
    """Adds the command to the subparsers of `argparse`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "audit",
        help="Attacks dpmp on this machine, and compares with the claimed epsilon.",
        description="Trains on canaries with Poisson sampling, with random allocation "
        "and with correlated noise, and computes a lower bound on epsilon from what an "
        "attacker finds. This takes a few minutes. The exit status is 1 if a bound is "
        "above the claim. To audit a run of your own, see the guide.",
        epilog="python -m dpmp audit --epsilon 1 8",
    )
    text = "the claims to audit; default: 1 and 8"
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1, 8], help=text)
    text = "the number of canaries for each of them"
    parser.add_argument("--canaries", type=int, default=2**19, help=text)
    checks.add_json_option(parser)
    parser.set_defaults(command=_audit)


def mechanism_of(way: str, epsilon: float) -> DPSGD:
    """What is audited: a run of one of the `WAYS`, for a claim."""
    return DPSGD(
        num_examples=_NUM_EXAMPLES,
        expected_batch_size=_BATCH_SIZE,
        iterations=_STEPS,
        l2_clip_norm=1.0,
        num_parameters=_NUM_EXAMPLES,
        **WAYS[way],
    ).calibrate(epsilon=epsilon, delta=_DELTA)


def _audit(args: argparse.Namespace) -> int:
    for epsilon in args.epsilon:
        _validate.positive(epsilon=epsilon, fix="Use 1 or 8, for example.")
    found: list[dict[str, Any]] = []
    for name in WAYS:
        for epsilon in args.epsilon:
            mechanism = mechanism_of(name, epsilon)
            audits = canaries(mechanism, num_canaries=args.canaries), batches(mechanism)
            for audit in audits:
                title = f"{name}, epsilon {epsilon:g}"
                sys.stdout.write(f"{title}. {audit}\n")
                found.append(checks.as_result(audit, title))
    if args.json is not None:
        checks.write(args.json, found)
    return 0 if all(x["passed"] for x in found) else 1
