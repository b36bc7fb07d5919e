"""`python -m dpmp memory`: what private training of a transformer takes."""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
import rich.console

from dpmp.precision import PRESETS
from dpmp.tools.memory._account import estimate_memory
from dpmp.tools.memory._compiled import compiled_memory
from dpmp.tools.memory._overhead import accumulation_overhead
from dpmp.tools.memory._transformer import transformer_loss, transformer_shapes

_OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adam-bf16-momentum": optax.adam(1e-3, mu_dtype=jnp.bfloat16),
    "sgd": optax.sgd(1e-3),
    "sgd-momentum": optax.sgd(1e-3, momentum=0.9),
}
_METHODS = ("per_example", "book_keeping")
_SIZES = {
    "layers": 4,
    "width": 256,
    "heads": 4,
    "vocabulary": 256,
    "length": 128,
    "batch-size": 64,
}


def add_memory_command(commands: Any) -> None:
    """Adds the command to the subparsers of `argparse`."""
    parser = commands.add_parser(
        "memory",
        help="count the memory that private training of a transformer takes",
        description=(
            "Counts the memory of one private training step of a decoder transformer, "
            "and the operations of clipped sums. Nothing is allocated. Activations are "
            "counted with --compile only."
        ),
    )
    for name, default in _SIZES.items():
        parser.add_argument(
            f"--{name}", type=_positive, default=default, help=f"default: {default}"
        )
    parser.add_argument(
        "--microbatch-size", type=_positive, help="default: all examples at once"
    )
    parser.add_argument(
        "--parameters",
        type=_positive,
        metavar="N",
        help="count for one array of N parameters in place of a transformer",
    )
    parser.add_argument("--policy", choices=list(PRESETS), default="mixed_bfloat16")
    parser.add_argument("--optimizer", choices=list(_OPTIMIZERS), default="adam")
    parser.add_argument("--method", choices=_METHODS, help="default: both")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="also compile the step for this device, and show the compiler's figures",
    )

    def run(args: argparse.Namespace) -> int:
        _check(parser, args)
        return _run(args)

    parser.set_defaults(command=run)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be an integer of at least 1")
    return int(text)


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.width % args.heads:
        parser.error(f"--heads {args.heads} must divide --width {args.width}")
    if args.microbatch_size and args.batch_size % args.microbatch_size:
        parser.error(
            f"--microbatch-size {args.microbatch_size} must divide "
            f"--batch-size {args.batch_size}"
        )
    if args.parameters and args.compile:
        parser.error("--compile needs a transformer: leave out --parameters")


def _run(args: argparse.Namespace) -> int:
    """Prints accounts and operations, and returns the exit status."""
    batch = jax.ShapeDtypeStruct((args.batch_size, args.length), jnp.int32)
    params = transformer_shapes(
        layers=args.layers,
        width=args.width,
        vocabulary=args.vocabulary,
        length=args.length,
    )
    if args.parameters:
        params = jax.ShapeDtypeStruct((args.parameters,), jnp.float32)
    text = []
    for method in [args.method] if args.method else _METHODS:
        options = {
            "policy": args.policy,
            "optimizer": _OPTIMIZERS[args.optimizer],
            "method": method,
            "microbatch_size": args.microbatch_size,
        }
        if method == "book_keeping" and args.microbatch_size:
            # As large as "bounded" sums, which refuse some microbatches.
            options["arithmetic"] = "unproved_float32"
        text += [f"{method}:", str(estimate_memory(params, batch, **options))]
        if args.compile:
            loss_fn = transformer_loss(args.heads)
            compiled = compiled_memory(loss_fn, params, batch, **options)
            text.append(f"Compiled for this device: {compiled}.")
        text.append("")
    num_positions = args.batch_size * args.length
    overhead = accumulation_overhead(
        params, batch_size=args.batch_size, num_positions=num_positions
    )
    console = rich.console.Console(soft_wrap=True, highlight=False)
    console.print("\n".join([*text, str(overhead)]))
    return 0
