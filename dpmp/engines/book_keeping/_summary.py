"""Shows how book-keeping will treat a loss: its rules, and the flops of norms."""

import collections
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dpmp import _plain_text
from dpmp._warnings import warn
from dpmp.engines.book_keeping import _choice
from dpmp.engines.book_keeping._engine import Program, make_engine
from dpmp.engines.book_keeping._norms import NormMethod
from dpmp.numerics import parse_arithmetic

# Gradients of fewer entries may be materialized without a warning.
_LARGE = 2**14

_ADVICE = {
    "parameters": "Use the parameters themselves where they meet data, not values that "
    "are computed from them. Keep penalties on parameters out of the loss: an "
    "optimizer can add them without looking at data.",
    "identity": "Move products with these parameters out of while loops and custom "
    "derivatives, or write the loops with jax.lax.scan.",
}


@dataclass(frozen=True)
class Row:
    """How book-keeping treats one parameter.

    A use is a place in the loss where data meets the parameter. Norm methods compute
    parts of the squared norm of the parameter's gradient.

    Attributes:
      path: the path in the tree of parameters, as `jax.tree_util.keystr` writes it.
      shape: the shape of the parameter.
      num_entries: the number of its entries.
      rules: the rules of its uses, in the order of the program. The tuple is empty for
        a parameter without influence on the loss.
      forms: the norm methods. "entries": the backward pass gives the gradient.
        "stored": the gradient is materialized once, and stored for the sum. "gram": by
        inner products of positions. "product": the gradient is materialized, for a few
        examples at a time. "parameters": the gradient is materialized and sent back to
        the parameters.
      flops: the multiplications for the norm of one example.
      share: the share of these in the flops of all norms.
    """

    path: str
    shape: tuple[int, ...]
    num_entries: int
    rules: tuple[str, ...]
    forms: tuple[str, ...]
    flops: float
    share: float


@dataclass(frozen=True)
class Summary:
    """How book-keeping treats each parameter; as a string, a table.

    Attributes:
      rows: one row for each parameter.
    """

    rows: tuple[Row, ...]

    @property
    def num_entries(self) -> int:
        """The number of entries of all parameters."""
        return sum(row.num_entries for row in self.rows)

    @property
    def flops(self) -> float:
        """The multiplications for all norms of one example."""
        return sum(row.flops for row in self.rows)

    def __str__(self) -> str:
        header = ("", "shape", "entries", "rules", "norm by", "flops", "share")
        total = ("total", "", f"{self.num_entries:,}", "", "", f"{self.flops:,.0f}", "")
        return _plain_text.table([header, *map(_cells, self.rows), total], "<<><<>>")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.path or "(itself)",
        str(row.shape),
        f"{row.num_entries:,}",
        _counted(row.rules),
        _counted(row.forms),
        f"{row.flops:,.0f}",
        f"{row.share:.1%}",
    )


def _counted(names: Sequence[str]) -> str:
    counts = collections.Counter(names).items()
    return ", ".join(f"{n} {name}" if n > 1 else name for name, n in counts) or "-"


def summarize(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    has_aux: bool = False,
    prng_argnum: int | None = None,
    arithmetic: str | None = None,
    **kwargs: Any,
) -> Summary:
    """Shows how `clipped_grad(fun, method="book_keeping")` treats each parameter.

    Nothing is computed. The loss is traced for one example, and the cheapest way to
    find the norm of each parameter's gradient is chosen. The columns of the table are
    explained at `Row`.

    >>> def loss(params, batch):
    ...     hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    ...     return jnp.mean((hidden @ params["out"]) ** 2)
    >>> params = {
    ...     "w": jax.ShapeDtypeStruct((256, 64), jnp.bfloat16),
    ...     "b": jax.ShapeDtypeStruct((64,), jnp.bfloat16),
    ...     "out": jax.ShapeDtypeStruct((64, 2), jnp.bfloat16),
    ... }
    >>> batch = {"x": jax.ShapeDtypeStruct((1000, 32, 256), jnp.bfloat16)}
    >>> print(summarize(loss, params, batch))
             shape      entries  rules  norm by    flops  share
    ['b']    (64,)           64  add    entries       64   0.0%
    ['out']  (64, 2)        128  dot    stored    12,288   3.4%
    ['w']    (256, 64)   16,384  dot    gram     344,064  96.5%
    total                16,576                  356,416

    Args:
      fun: the loss, as for `clipped_grad`.
      *args: the arguments of `fun`, as for `clipped_grad`. A `jax.ShapeDtypeStruct` may
        take the place of any array.
      argnums: as in `clipped_grad`.
      batch_argnums: as in `clipped_grad`.
      keep_batch_dim: as in `clipped_grad`.
      has_aux: as in `clipped_grad`.
      prng_argnum: as in `clipped_grad`.
      arithmetic: as in `clipped_grad`. "bounded" sums (also for None) need one more
        rule: if a parameter is used through arithmetic, the gradient is taken with
        respect to the parameter itself. The table then shows the rule "identity".
      **kwargs: keyword arguments that `fun` receives unchanged.

    Returns:
      The summary. If several parameters share the flops of a norm, these are divided
      among them in proportion to their entries.

    Raises:
      ValueError: before `fun` is traced, for invalid arguments and for arrays that do
        not fit them. Also for a loss that is not a float scalar.

    Warns:
      UserWarning: if more than half of the flops are due to parameters whose gradients
        must be materialized for lack of a better rule.
    """
    sums = parse_arithmetic(arithmetic, method="book_keeping")
    engine, batch_size = make_engine(
        fun,
        args,
        is_bounded=sums.needs_norm_bounds,
        argnums=argnums,
        batch_argnums=batch_argnums,
        prng_argnum=prng_argnum,
        keep_batch_dim=keep_batch_dim,
        has_aux=has_aux,
    )
    args = engine.signature.with_arrays(args)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]
    params = jax.tree_util.tree_leaves_with_path(engine.signature.params(args))
    paths = [jax.tree_util.keystr(path) for path, _ in params]
    found: list[tuple[Summary, str | None]] = []

    # The loss closes over the arguments that are neither parameters nor batched, as in
    # the engine. It could not close over a shape, so shapes become traced arrays.
    def trace(arrays: dict[int, jax.Array]) -> None:
        given = [arrays.get(i, x) for i, x in enumerate(leaves)]
        args, kwargs = treedef.unflatten(given)
        examples = engine.signature.examples(args, batch_size)
        args = [examples.get(i, arg) for i, arg in enumerate(args)]
        program = engine.analyse(args, kwargs)
        found.append((_summary(program, paths), _complaint(program, paths)))

    jax.eval_shape(trace, {i: x for i, x in enumerate(leaves) if is_array[i]})
    ((summary, complaint),) = found
    if complaint is not None:
        warn(complaint)
    return summary


def _summary(program: Program, paths: Sequence[str]) -> Summary:
    rows, total = [], _total(program.norm_methods)
    for i, (path, shape) in enumerate(zip(paths, program.shapes, strict=True)):
        used = [x for x in program.norm_methods if i in x.params]
        size = math.prod(shape)
        flops = sum(x.flops * size / max(_num_entries(x, program), 1) for x in used)
        rules = tuple(x.rule for x in program.plan.uses if i in x.view.leaves)
        forms, share = tuple(x.form for x in used), flops / max(total, 1)
        rows.append(Row(path, shape, size, rules, forms, flops, share))
    return Summary(tuple(rows))


def _complaint(program: Program, paths: Sequence[str]) -> str | None:
    """The warning about fallbacks that take more than half of the flops, or None."""
    kinds = [(x, _kind_of_fallback(x, program)) for x in program.norm_methods]
    fallbacks = [method for method, kind in kinds if kind]
    share = _total(fallbacks) / max(_total(program.norm_methods), 1)
    if share <= 0.5:
        return None
    params = dict.fromkeys(i for method in fallbacks for i in method.params)
    names = ", ".join(paths[i] or "(itself)" for i in params)
    reasons = [kind for _, kind in kinds if kind]
    # With "bounded" sums, arithmetic is a reason for identity taps too.
    reasons += ["parameters"] if program.is_bounded else []
    advice = " ".join(_ADVICE[reason] for reason in dict.fromkeys(reasons))
    return (
        f"Per-example gradients of {names} are materialized for lack of a better rule. "
        f"This takes {share:.0%} of the flops of all norms. {advice} If you cannot "
        'change the loss, compare the running time with that of method="per_example".'
    )


def _kind_of_fallback(method: NormMethod, program: Program) -> str | None:
    """The key of the advice for a norm method that is a fallback, or None."""
    uses = program.plan.uses
    with_arithmetic = _choice.used_through_arithmetic(uses, program.shapes)
    if method.form == "parameters" and not set(with_arithmetic).isdisjoint(
        method.params
    ):
        return "parameters"
    is_large = _num_entries(method, program) >= _LARGE
    is_identity = any(uses[i].rule == "identity" for i in method.uses)
    return "identity" if is_identity and is_large else None


def _num_entries(method: NormMethod, program: Program) -> int:
    """The number of entries of all parameters of a norm method."""
    return sum(math.prod(program.shapes[i]) for i in method.params)


def _total(methods: Sequence[NormMethod]) -> float:
    return sum(method.flops for method in methods)
