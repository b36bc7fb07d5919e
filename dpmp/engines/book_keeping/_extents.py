"""How much of what "bounded" sums keep depends on the extents of gradients."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp.engines import _signature
from dpmp.engines.book_keeping._engine import engine
from dpmp.numerics import _bounded


class Extents(NamedTuple):
    """Extents of per-example gradients, over their norms.

    Attributes:
      ratios: (B,), 1 for gradients without any cancellation.
      largest: the ratio above which a gradient is scaled down more than its norm asks
        for; it depends on the microbatch size, and on nothing private.
      share_cut: of the examples above it.
    """

    ratios: jax.Array
    largest: float
    share_cut: float


def measure_extents(
    fun: Callable[..., Any],
    *args: Any,
    microbatch_size: int,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
) -> Extents:
    """What `accumulator="bounded"` would cut, on public data.

    Bounds on rounding grow with the extent of a gradient, the sum of the sizes of the
    terms that it is a sum of. Examples whose extent is many times their norm, because
    their terms cancel, count for less.

    >>> def loss(w, x):
    ...     return jnp.mean((x @ w) ** 2)
    >>> x = jnp.array([[[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [-1.0, -2.0]]])
    >>> extents = measure_extents(loss, jnp.ones((2, 1)), x, microbatch_size=2)
    >>> print([round(float(x), 3) for x in extents.ratios], extents.share_cut)
    [1.002, 1.0] 0.0

    Args:
      fun: gives a scalar loss.
      *args: of `fun`, on public or synthetic data: the result is not private.
      microbatch_size: that "bounded" sums would have.
      argnums: as in `clipped_grad`.
      batch_argnums: as in `clipped_grad`.
      keep_batch_dim: as in `clipped_grad`.

    Returns:
      `Extents` of all parameters together.

    Raises:
      ValueError: for a microbatch size that is not a positive integer, and arguments
        that `clipped_grad` would not take.
    """
    microbatch_size = _validate.positive_integer(
        microbatch_size=microbatch_size, fix="Use 8, for example."
    )
    batch_argnums = _signature.as_argnums("batch_argnums", batch_argnums)
    grad_argnums = _signature.as_argnums("argnums", argnums)
    _signature.check_disjoint(grad_argnums, batch_argnums, None)
    _signature.check_num_args(args, (*grad_argnums, *batch_argnums))

    @_signature.of_one_example(batch_argnums, keep_batch_dim)
    def loss_fn(*args: Any) -> tuple[Any, None]:
        value = fun(*args)
        _signature.check_loss(value)
        return value, None

    run = engine(
        loss_fn,
        argnums=argnums,
        batch_argnums=batch_argnums,
        prng_argnum=None,
        spmd_axis_name=None,
        is_bounded=True,
    )
    roundings = []

    @jax.jit
    def ratios_of(*args: Any) -> jax.Array:
        grads: Any = run(*args)
        (group,) = grads.measure([range(len(jax.tree.leaves(grads.params)))])
        roundings.append(group.roundings)
        return jnp.sqrt(group.extent / group.squared_norm)

    sizes = _signature.batch_sizes(args, batch_argnums)
    parts = [
        ratios_of(*_part(args, batch_argnums, start, microbatch_size))
        for start in range(0, _signature.common_batch_size(sizes), microbatch_size)
    ]
    ratios = jnp.concatenate(parts)
    largest = _bounded.largest_extent(microbatch_size, roundings[0])
    return Extents(ratios, largest, float(jnp.mean(ratios > largest)))


def _part(
    args: Sequence[Any], batch_argnums: Sequence[int], start: int, size: int
) -> list[Any]:
    """The arguments with some of the examples."""
    return [
        jax.tree.map(lambda x: x[start : start + size], arg)
        if i in batch_argnums
        else arg
        for i, arg in enumerate(args)
    ]
