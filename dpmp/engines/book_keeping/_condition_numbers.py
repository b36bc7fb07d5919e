"""Measures how often cancellation makes "bounded" sums clip more than necessary."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp.engines.book_keeping._engine import make_engine
from dpmp.numerics import group_size, largest_condition_number


class ConditionNumbers(NamedTuple):
    """The condition numbers of per-example gradients, as sums over positions.

    Attributes:
      ratios: the sum of magnitudes over the norm of the sum, (B,). It is 1 for a
        gradient whose summands do not cancel at all.
      largest: the ratio above which a gradient is scaled down more than its norm
        requires. It depends on the microbatch size, and on nothing private.
      share_cut: the share of the examples whose ratio is above `largest`.
    """

    ratios: jax.Array
    largest: float
    share_cut: float


def measure_condition_numbers(
    fun: Callable[..., Any],
    *args: Any,
    microbatch_size: int,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    prng_argnum: int | None = None,
) -> ConditionNumbers:
    """Measures, on public data, how often "bounded" sums clip more than necessary.

    A per-example gradient is a sum of outer products, one for each position. The sum of
    the magnitudes (norms) of these products over the norm of the gradient is the
    condition number of this sum: at least 1, and large if the products cancel. The
    upper bounds on rounding errors grow with it. So a gradient with a large condition
    number is scaled down more than its norm requires.

    >>> def loss(w, x):
    ...     return jnp.mean((x @ w) ** 2)
    >>> x = jnp.array([[[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [-1.0, -2.0]]])
    >>> found = measure_condition_numbers(loss, jnp.ones((2, 1)), x, microbatch_size=2)
    >>> print([round(float(x), 3) for x in found.ratios], found.share_cut)
    [1.002, 1.0] 0.0

    Args:
      fun: returns a scalar loss.
      *args: the arguments of `fun`, on public or synthetic data: the result is not
        private.
      microbatch_size: the microbatch size of the "bounded" sums.
      argnums: as in `clipped_grad`.
      batch_argnums: as in `clipped_grad`.
      keep_batch_dim: as in `clipped_grad`.
      prng_argnum: as in `clipped_grad`.

    Returns:
      The `ConditionNumbers` of the gradient of all parameters together.

    Raises:
      ValueError: for a microbatch size that is not a positive integer, and for
        arguments that `clipped_grad` would refuse.
    """
    microbatch_size = _validate.positive_integer(
        microbatch_size=microbatch_size, fix="Use 8, for example."
    )
    engine, batch_size = make_engine(
        fun,
        args,
        argnums=argnums,
        batch_argnums=batch_argnums,
        prng_argnum=prng_argnum,
        keep_batch_dim=keep_batch_dim,
    )
    args = engine.signature.with_arrays(args)
    examples = engine.signature.examples(args, batch_size)
    roundings = []

    @jax.jit
    def ratios_of(*args: Any) -> jax.Array:
        grads = engine(*args)
        (group,) = grads.measure([range(len(jax.tree.leaves(grads.params)))])
        roundings.append(group.roundings)
        return jnp.sqrt(group.magnitudes / group.squared_norm)

    def part(start: int) -> list[Any]:
        some = jax.tree.map(lambda x: x[start : start + microbatch_size], examples)
        return [some.get(i, arg) for i, arg in enumerate(args)]

    starts = range(0, batch_size, microbatch_size)
    ratios = jnp.concatenate([ratios_of(*part(start)) for start in starts])
    size = group_size(microbatch_size, roundings[0].positions)
    largest = largest_condition_number(size, roundings[0])
    return ConditionNumbers(ratios, largest, float(jnp.mean(ratios > largest)))
