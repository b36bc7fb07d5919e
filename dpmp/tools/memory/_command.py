"""`python -m dpmp memory`: what a decoder transformer of some size would take."""

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import rich.console
import rich.table

from dpmp._typing import PyTree
from dpmp.precision import PRESETS, Policy
from dpmp.tools.memory._estimate import MemoryEstimate, compiled_memory, estimate_memory
from dpmp.tools.memory._overhead import (
    AccumulationOverhead,
    accumulation_overhead,
    measure_accumulation_share,
)

_OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adam-bf16-momentum": optax.adam(1e-3, mu_dtype=jnp.bfloat16),
    "sgd": optax.sgd(1e-3),
    "sgd-momentum": optax.sgd(1e-3, momentum=0.9),
}
_METHODS = {"none": None, "per_example": "per_example", "book_keeping": "book_keeping"}


def add_memory_command(commands: Any) -> None:
    """Adds the command to what `argparse` calls subparsers."""
    parser = commands.add_parser(
        "memory",
        help="estimate what memory private training of a transformer takes",
        description=(
            "Estimates what one training step of a decoder transformer takes, with "
            "either gradient engine and without privacy, and what clipped sums cost. "
            "Nothing is allocated."
        ),
    )
    sizes = {
        "layers": 4,
        "width": 256,
        "heads": 4,
        "vocabulary": 256,
        "length": 128,
        "batch-size": 64,
    }
    for name, default in sizes.items():
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
        help="only what depends on the number of parameters alone",
    )
    parser.add_argument(
        "--policy",
        choices=list(PRESETS),
        default="mixed_bfloat16",
    )
    parser.add_argument("--optimizer", choices=list(_OPTIMIZERS), default="adam")
    parser.add_argument(
        "--method", choices=list(_METHODS), help="default: all, side by side"
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="also compile the step here, and show what the compiler says",
    )

    parser.add_argument(
        "--measure",
        action="store_true",
        help="also time clipped sums next to plain gradients here",
    )

    def run(args: argparse.Namespace) -> int:
        _check(parser, args)
        return memory_command(args)

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
    if args.parameters and (args.compile or args.measure):
        parser.error("--compile and --measure need a model: leave out --parameters")


def memory_command(args: argparse.Namespace) -> int:
    """Prints the tables, and returns the exit status."""
    console = rich.console.Console()
    if args.parameters:
        console.print(_table_of_parameters(args))
        console.print(str(_overhead(args.parameters, args)), highlight=False)
        return 0
    params, batch = transformer_shapes(args)
    methods = list(_METHODS) if args.method is None else [args.method]
    estimates, compiled = {}, {}
    for name in methods:
        options = {
            "policy": args.policy,
            "optimizer": _OPTIMIZERS[args.optimizer],
            "method": _METHODS[name],
            "microbatch_size": args.microbatch_size,
            # As large as "bounded" sums, which refuse some microbatches.
            "arithmetic": "unproved_float32"
            if name == "book_keeping" and args.microbatch_size
            else None,
        }
        loss_fn = transformer_loss(args.heads)
        estimates[name] = estimate_memory(loss_fn, params, batch, **options)
        if args.compile:
            compiled[name] = compiled_memory(loss_fn, params, batch, **options).total
    console.print(_table(estimates, compiled))
    measured = _measure(params, batch, args) if args.measure else None
    console.print(str(_overhead(params, args, measured)), highlight=False)
    return 0


def _overhead(
    params: PyTree | int, args: argparse.Namespace, measured: float | None = None
) -> AccumulationOverhead:
    return accumulation_overhead(
        params,
        batch_size=args.batch_size,
        num_positions=args.batch_size * args.length,
        measured=measured,
    )


def _measure(params: PyTree, batch: PyTree, args: argparse.Namespace) -> float:
    """Of the method that was asked for, or of per-example gradients."""
    policy = Policy.from_name(args.policy)
    return measure_accumulation_share(
        policy.in_product_precision(transformer_loss(args.heads)),
        jax.eval_shape(policy.cast_to_compute, params),
        batch,
        microbatch_size=args.microbatch_size,
        method=_METHODS[args.method or "per_example"] or "per_example",
    )


def _table(
    estimates: dict[str, MemoryEstimate], compiled: dict[str, int]
) -> rich.table.Table:
    table = rich.table.Table(title="megabytes of a step, and bytes per parameter")
    table.add_column("")
    for name in estimates:
        table.add_column("no privacy" if name == "none" else name, justify="right")
    names = dict.fromkeys(x for e in estimates.values() for x in e.by_name)
    for name in names:
        cells = [_cell(e.by_name.get(name), e) for e in estimates.values()]
        table.add_row(name, *cells)
    table.add_section()
    table.add_row("total", *(_cell(e.total, e) for e in estimates.values()))
    if compiled:
        cells = [_cell(compiled[name], e) for name, e in estimates.items()]
        table.add_row("compiled here", *cells)
    return table


def _cell(num_bytes: int | None, estimate: MemoryEstimate) -> str:
    if num_bytes is None:
        return ""
    return f"{num_bytes / 1e6:,.1f}  {num_bytes / estimate.num_parameters:7.2f}"


def _table_of_parameters(args: argparse.Namespace) -> rich.table.Table:
    """What does not depend on the model."""
    one = jax.ShapeDtypeStruct((args.parameters,), jnp.float32)
    state = jax.eval_shape(_OPTIMIZERS[args.optimizer].init, one)
    width = Policy.from_name(args.policy).compute_dtype.itemsize
    stack = (args.microbatch_size or args.batch_size) * width
    rows = {
        "master parameters": 4 * args.parameters,
        "optimizer state": sum(
            math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state)
        ),
        "sum of gradients": 4 * args.parameters,
        "compute copy": width * args.parameters if width < 4 else 0,
        "per-example gradients, for that engine": stack * args.parameters,
    }
    table = rich.table.Table(title="what depends on the number of parameters alone")
    for name in ("", "MB", "B/parameter"):
        table.add_column(name, justify="right" if name else "left")
    for name, size in rows.items():
        table.add_row(name, f"{size / 1e6:,.1f}", f"{size / args.parameters:.2f}")
    return table


def transformer_shapes(args: argparse.Namespace) -> tuple[PyTree, PyTree]:
    """Parameters and batch of a decoder, as shapes; layers are stacked."""
    n, d, v = args.layers, args.width, args.vocabulary
    shapes = {
        "embed": (v, d),
        "position": (args.length, d),
        "layers": {
            "qkv": (n, d, 3 * d),
            "out": (n, d, d),
            "up": (n, d, 4 * d),
            "down": (n, 4 * d, d),
            "norms": (n, 2, d),
        },
        "head": (d, v),
    }
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    tokens = jax.ShapeDtypeStruct((args.batch_size, args.length), jnp.int32)
    return params, tokens


def transformer_loss(num_heads: int) -> Any:
    """Next-token loss of a decoder whose layers are a loop."""

    def loss_fn(params: PyTree, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens] + params["position"]

        def layer(x: jax.Array, p: PyTree) -> tuple[jax.Array, None]:
            x = x + _attend(_normalised(x, p["norms"][0]), p, num_heads)
            hidden = jax.nn.relu(_normalised(x, p["norms"][1]) @ p["up"])
            return x + hidden @ p["down"], None

        x, _ = jax.lax.scan(layer, x, params["layers"])
        logits = (x @ params["head"])[:, :-1].astype(jnp.float32)
        log_probs = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)
        return -jnp.mean(chosen)

    return loss_fn


def _attend(x: jax.Array, p: PyTree, num_heads: int) -> jax.Array:
    heads = (*x.shape[:2], num_heads, x.shape[2] // num_heads)
    q, k, v = (y.reshape(heads) for y in jnp.split(x @ p["qkv"], 3, axis=-1))
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
    causal = jnp.tri(x.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(causal, scores / heads[-1] ** 0.5, -1e9))
    mixed = jnp.einsum("bhts,bshd->bthd", weights.astype(x.dtype), v)
    return mixed.reshape(x.shape) @ p["out"]


def _normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * scale
