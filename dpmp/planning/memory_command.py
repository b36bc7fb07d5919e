"""The command `memory` of `python -m dpmp`: private training of a transformer."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpmp import _validate
from dpmp.planning import memory
from dpmp.planning._decoder import Decoder
from dpmp.precision import PRESETS

_OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adam-bf16-momentum": optax.adam(1e-3, mu_dtype=jnp.bfloat16),
    "sgd": optax.sgd(1e-3),
    "sgd-momentum": optax.sgd(1e-3, momentum=0.9),
}
_METHODS = ("per_example", "book_keeping")
_SIZES = {
    "--layers": (4, "the number of layers"),
    "--width": (256, "the width of the model"),
    "--heads": (4, "the number of attention heads"),
    "--vocabulary": (256, "the number of different tokens"),
    "--length": (128, "the number of tokens in an example"),
    "--batch-size": (64, "the number of examples in a batch"),
    "--microbatch-size": (None, "the number of examples at a time"),
}


def add_memory_command(commands: Any) -> None:
    """Adds the command to the subparsers of `argparse`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "memory",
        help="Counts the memory that private training of a transformer takes.",
        description=(
            "Counts the memory of one private training step of a decoder transformer, "
            "and the operations of clipped sums. Nothing is allocated. Activations are "
            "counted with --compile only."
        ),
    )
    for name, (default, text) in _SIZES.items():
        text += f" (default: {default or 'all'})"
        parser.add_argument(
            name, type=_positive, default=default, metavar="N", help=text
        )
    parser.add_argument("--policy", choices=list(PRESETS), default="mixed_bfloat16")
    parser.add_argument("--optimizer", choices=list(_OPTIMIZERS), default="adam")
    parser.add_argument("--method", choices=_METHODS, help="default: both")
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--parameters",
        type=_positive,
        metavar="N",
        help="count for one array of N parameters in place of a transformer",
    )
    model.add_argument(
        "--compile",
        action="store_true",
        help="also compile the step for this device, and show the compiler's figures",
    )
    model.add_argument(
        "--fit-in",
        type=float,
        metavar="GB",
        help="find the largest microbatch with which the compiled step fits into GB "
        "gigabytes",
    )
    parser.set_defaults(command=_run)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be an integer of at least 1")
    return int(text)


def _run(args: argparse.Namespace) -> int:
    for paragraph in _report(args):
        sys.stdout.write(f"{paragraph}\n")
    return 0


def _report(args: argparse.Namespace) -> Iterator[str]:
    """The estimate of each method, or the microbatch that fits; then operations."""
    batch = jax.ShapeDtypeStruct((args.batch_size, args.length), jnp.int32)
    _validate.require(
        args.width % args.heads == 0,
        "the number of heads must divide the width. Use a divisor of the width.",
        heads=args.heads,
        width=args.width,
    )
    decoder = Decoder(
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        vocabulary=args.vocabulary,
        hidden=4 * args.width,
        kv_heads=args.heads,
        head_width=args.width // args.heads,
        positions=args.length,
        is_gated=False,
        is_tied=False,
    )
    params, loss_fn = decoder.shapes(jnp.float32), decoder.loss_fn
    if args.parameters:
        params = jax.ShapeDtypeStruct((args.parameters,), jnp.float32)
    for method in [args.method] if args.method else _METHODS:
        options: dict[str, Any] = {
            "policy": args.policy,
            "optimizer": _OPTIMIZERS[args.optimizer],
            "method": method,
        }
        if method == "book_keeping" and (args.microbatch_size or args.fit_in):
            # Takes the memory of "bounded" sums, which refuse some microbatch sizes.
            options["arithmetic"] = "unproved_float32"
        if args.fit_in is not None:
            found = memory.largest_microbatch(
                loss_fn, params, batch, num_bytes=1e9 * args.fit_in, **options
            )
            answer = "No microbatch fits"
            if found is not None:
                answer = f"A step with microbatches of {found[0]} ({found[1]}) fits"
            yield f"{method}: {answer} into {args.fit_in:g} GB."
            continue
        options["microbatch_size"] = args.microbatch_size
        yield f"{method}:\n{memory.estimate_memory(params, batch, **options)}"
        if args.compile:
            compiled = memory.compiled_memory(loss_fn, params, batch, **options)
            yield f"Compiled for this device: {compiled}."
        yield ""
    sizes = {"batch_size": args.batch_size, "num_positions": batch.size}
    overhead = memory.accumulation_overhead(params, **sizes)
    yield (
        f"For {args.batch_size} examples of {args.length} tokens (--batch-size, "
        f"--length), policy {args.policy} and optimizer {args.optimizer}: {overhead}"
    )
