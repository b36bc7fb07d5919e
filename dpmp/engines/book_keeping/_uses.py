"""Uses of parameters: the places in a program where data meets a view of them.

The gradient of that view, for one example, has one of two forms. The form is known
before the gradient is computed:

    outer   G[k] = sum over positions t of  left[k, t] (x) right[k, t]
    dense   G itself

In the outer form, `left` comes from the activation that enters the use, and `right`
from the cotangent of its output (Goodfellow, 2015). Both are cached. The norm of G, and
the sum of many G, can be computed without an array of the size of G. The weighted sum
over a batch is one contraction over examples and positions, with a float32 result:

    sum over i of  c_i G_i  =  sum over i, t of  left_it (x) (c_i right_it)

If both factors are bfloat16, the product of c_i and a factor is rounded to bfloat16
again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp.engines.book_keeping import _linalg, _views
from dpmp.engines.book_keeping._views import View
from dpmp.numerics import at_least_float32, reduction

# The sums of several groups, side by side, have at most this many entries of an array.
_ENTRIES_OF_GROUPS = 2**29

# An array that holds all parts of left, and then right.
Factors = tuple[jax.Array, jax.Array]


class Sizes(NamedTuple):
    """The sizes of a sum of outer products: K groups, T positions, n and m."""

    groups: int
    positions: int
    left: int
    right: int


@dataclass(frozen=True)
class Outer:
    """A gradient that is a sum of outer products, in K independent groups.

    Attributes:
      activation: the shape and dtype of the cached activation.
      sizes: K, T, n and m.
      factors: a function of the activation and the cotangent of one example. It
        returns left, and right of the shape (K, T, m). Left is (K, T, n), or an array
        that holds its parts.
      to_view: maps (K, n, m) to the shape of the view, without arithmetic.
      axes: the axes of the view that make up K, n and m, in this order. None if K, n
        and m are not made up of whole axes.
      has_rows: whether `left` holds row numbers, (K, T). A row number stands for a
        vector of length n that is 1 at this row and 0 elsewhere.
      places: for each part of left, where `part` reads it: (P, ...) integers. None if
        left is (K, T, n).
      part: reads one part of left, (K, T, n / P), at one of the places. A loop over the
        places keeps the program small, and holds one part at a time in memory.
    """

    activation: jax.ShapeDtypeStruct
    sizes: Sizes
    factors: Callable[[jax.Array, jax.Array], Factors]
    to_view: Callable[[jax.Array], jax.Array]
    axes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None
    has_rows: bool = False
    places: np.ndarray | None = None
    part: Callable[[jax.Array, Any], jax.Array] = lambda left, _: left


@dataclass(frozen=True)
class Use:
    """One place where data meets a view.

    Attributes:
      rule: the name of the rule that gives the gradient, as tables show it.
      view: the view whose gradient is taken.
      cotangent: the shape and dtype of the cotangent of the output, which the backward
        pass returns. For dense uses, it returns the gradient instead.
      outer: the outer form of the gradient, or None if it is dense.
      is_shared: whether the iterations of a loop share the view. Then the backward pass
        does not materialize the gradient: each iteration would read and write it.
    """

    rule: str
    view: View
    cotangent: jax.ShapeDtypeStruct
    outer: Outer | None = None
    is_shared: bool = False


class Cached(NamedTuple):
    """The activation of a use (None if it is dense), and its cotangent."""

    activation: Any
    cotangent: jax.Array


def dense(use: Use) -> Use:
    """Returns the same use in dense form, for a gradient that is materialized."""
    aval = use.view.aval
    dtype = at_least_float32(aval.dtype, use.cotangent.dtype)
    cotangent = jax.ShapeDtypeStruct(aval.shape, dtype)
    return dataclasses.replace(use, cotangent=cotangent, outer=None)


def num_bytes(uses: Sequence[Use]) -> int:
    """The memory for the arrays that uses cache for one example."""
    arrays = [use.cotangent for use in uses]
    arrays += [use.outer.activation for use in uses if use.outer is not None]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def in_loop(use: Use, view: View, size: int, *, is_mapped: bool) -> Use:
    """Turns a use in the body of a loop into a use for all iterations.

    If each iteration has a view of its own (`is_mapped`), `view` has an axis for them.
    If they share one view, its gradient is the sum over the iterations.
    """
    cotangent, outer = use.cotangent, use.outer
    if outer is not None or is_mapped:
        cotangent = _stacked(cotangent, size)
    if outer is not None:
        outer = _outer_in_loop(outer, size, is_mapped=is_mapped)
    is_shared = use.is_shared or not is_mapped
    return Use(use.rule, view, cotangent, outer, is_shared)


def _stacked(x: jax.ShapeDtypeStruct, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size, *x.shape), x.dtype)


def _outer_in_loop(outer: Outer, size: int, *, is_mapped: bool) -> Outer:
    """Adds one group for each iteration, or positions if they share a view."""

    def join(x: jax.Array) -> jax.Array:
        if is_mapped:
            return jax.lax.collapse(x, 0, 2)
        return jax.lax.collapse(jnp.moveaxis(x, 0, 1), 1, 3)

    def factors(*args: jax.Array) -> Factors:
        left, right = jax.vmap(outer.factors)(*args)
        return join(left) if outer.places is None else left, join(right)

    def part(left: jax.Array, place: Any) -> jax.Array:
        return join(jax.vmap(outer.part, (0, None))(left, place))

    def to_view(grad: jax.Array) -> jax.Array:
        return jax.vmap(outer.to_view)(grad.reshape(size, -1, *grad.shape[1:]))

    stacked = _stacked(outer.activation, size)
    new = dataclasses.replace(outer, activation=stacked, factors=factors, part=part)
    sizes, axes = outer.sizes, outer.axes
    if not is_mapped:
        sizes = sizes._replace(positions=size * sizes.positions)
        return dataclasses.replace(new, sizes=sizes)
    sizes = sizes._replace(groups=size * sizes.groups)
    if axes is not None:
        groups, left, right = (tuple(i + 1 for i in part) for part in axes)
        axes = ((0, *groups), left, right)
    return dataclasses.replace(new, sizes=sizes, to_view=to_view, axes=axes)


def factors(use: Use, cached: Cached) -> Factors:
    """Returns left and right of one example; vectors have floats of 16 bits or more."""
    assert use.outer is not None
    left, right = use.outer.factors(*cached)
    return left if use.outer.has_rows else _as_floats(left), _as_floats(right)


def of_parts(
    outer: Outer, fn: Callable[[jax.Array], jax.Array], left: jax.Array
) -> jax.Array:
    """Stacks the results of a function of each part of left: (P, ...)."""
    if outer.places is None:
        return fn(left)[None]
    return jax.lax.map(lambda place: fn(outer.part(left, place)), outer.places)


def _as_floats(x: jax.Array) -> jax.Array:
    """Widens integers, which wrap around, and 8-bit floats, which lose bits on GPUs."""
    is_wide = _linalg.is_float(x.dtype) and x.dtype.itemsize >= 2
    return x if is_wide else x.astype(jnp.float32)


def product(use: Use, cached: Cached) -> jax.Array:
    """Materializes the gradient of a use of the outer form: (K, n, m)."""
    assert use.outer is not None
    left, right = factors(use, cached)
    groups, _, length, width = use.outer.sizes
    if not use.outer.has_rows:

        def multiply(part: jax.Array) -> jax.Array:
            return _linalg.contract(part, right, ((1,), (1,)), ((0,), (0,)))

        products = jnp.moveaxis(of_parts(use.outer, multiply, left), 0, 1)
        return _linalg.apart(products.reshape(groups, length, width))
    return _scatter(left[None], _linalg.widen(right)[None], length)


def gradient(use: Use, cached: Cached) -> jax.Array:
    """Returns the gradient of a use's view, for one example, in float32 or wider."""
    if use.outer is None:
        return _linalg.widen(cached.cotangent)
    return use.outer.to_view(product(use, cached))


def weighted_sum(
    uses: Sequence[Use],
    params: Sequence[int],
    roots: Mapping[int, Any],
    cached: Sequence[Cached],
    coefs: jax.Array,
    keep: jax.Array,
) -> dict[int, jax.Array]:
    """`PerExampleGrads.weighted_sum` of some parameters; zeros if they have no use."""
    views, totals = [], []
    for use, arrays in zip(uses, cached, strict=True):
        if not use.view.leaves.isdisjoint(params):
            views.append(use.view)
            totals.append(_sum_of_use(use, arrays, coefs, keep))
    sums = _views.pull_back(views, params, roots, totals)
    return dict(zip(params, sums, strict=True))


def _sum_of_use(
    use: Use, cached: Cached, coefs: jax.Array, keep: jax.Array
) -> jax.Array:
    """Sums the gradients of a use over the examples, in the shape of its view."""
    if use.outer is None:
        contributions = _select(keep, _scale(cached.cotangent, coefs))
        return _linalg.add_up(contributions, axis=0)
    left, right = jax.vmap(functools.partial(factors, use))(cached)
    groups, _, length, width = use.outer.sizes
    if use.outer.has_rows:
        weighted = _select(keep, _scale(right, coefs))
        return use.outer.to_view(_scatter(left, weighted, length))

    # The smaller factor is weighted, since the weighted factor is written to memory.
    if use.outer.places is None and left.size <= right.size:
        total = _linalg.apart(_weighted_product(left, right, coefs, keep))
        return use.outer.to_view(total)

    def multiply(part: jax.Array) -> jax.Array:
        return _linalg.apart(_weighted_product(right, part, coefs, keep))

    outer = dataclasses.replace(use.outer, part=jax.vmap(use.outer.part, (0, None)))
    totals = of_parts(outer, multiply, left).transpose(1, 0, 3, 2)  # (K, P, n / P, m)
    return use.outer.to_view(totals.reshape(groups, length, width))


@jax.jit  # a program has one copy for all arrays of one shape
def _weighted_product(
    first: jax.Array, second: jax.Array, coefs: jax.Array, keep: jax.Array
) -> jax.Array:
    """Contracts (B, K, T, n) with (B, K, T, m) to (K, n, m); the first is weighted."""
    dtype = first.dtype
    if not first.dtype == second.dtype == jnp.bfloat16:
        # Float16 cannot hold every coefficient.
        dtype = at_least_float32(first.dtype, second.dtype)
    left = _select(keep, _scale(first, coefs)).astype(dtype)
    right = _select(keep, second)
    if left.dtype != right.dtype:
        dtype = at_least_float32(left.dtype, right.dtype)
        left, right = left.astype(dtype), right.astype(dtype)
    if left.shape[1] == 1:
        # Two axes joined by a reshape would be slower: XLA would fold a transposition
        # into the product, and its CPU compiler would widen both bfloat16 operands.
        return _linalg.contract(left[:, 0], right[:, 0], ((0, 1), (0, 1)))[None]
    return _linalg.contract(left, right, ((0, 2), (0, 2)), ((1,), (1,)))


@jax.jit
def _scale(x: jax.Array, coefs: jax.Array) -> jax.Array:
    x = x.astype(at_least_float32(x.dtype))
    return coefs.astype(x.dtype).reshape(-1, *[1] * (x.ndim - 1)) * x


@jax.jit
def _select(keep: jax.Array, x: jax.Array) -> jax.Array:
    """Selects zero where `keep` is False; a product with zero could be NaN."""
    return jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))


def _scatter(rows: jax.Array, values: jax.Array, num_rows: int) -> jax.Array:
    """Adds values (B, K, T, m) to the rows (B, K, T) of zeros (K, num_rows, m)."""

    def add(rows: jax.Array, values: jax.Array) -> jax.Array:
        zeros = jnp.zeros((num_rows, values.shape[-1]), values.dtype)
        values = values.reshape(-1, values.shape[-1])
        return zeros.at[rows.ravel()].add(values, mode="promise_in_bounds")

    return jax.vmap(add, in_axes=(1, 1))(rows, values)


def over_groups(
    sum_group: Callable[[Any], list[jax.Array]], examples: Any, size: int, largest: int
) -> list[jax.Array]:
    """Sums each group of `size` examples, and adds the integers.

    Several groups are summed side by side, as many as memory allows for an array of
    `largest` entries. An accelerator then has products of many positions.
    """
    num_groups = len(jax.tree.leaves(examples)[0]) // size
    if num_groups == 1:
        return sum_group(examples)
    limit = _ENTRIES_OF_GROUPS // max(largest, 1)
    at_once = reduction.largest_divisor(num_groups, limit)
    examples = jax.tree.map(
        lambda x: x.reshape(-1, at_once, size, *x.shape[1:]), examples
    )

    def sum_groups(examples: Any) -> list[jax.Array]:
        return [x.sum(0, dtype=x.dtype) for x in jax.vmap(sum_group)(examples)]

    first = jax.tree.map(lambda x: x[0], examples)
    if at_once == num_groups:
        return sum_groups(first)

    # The order of integers does not matter. So there is one copy of the sum, where
    # `reduction.sum_examples` has one for each of its loops.
    def step(total: list[jax.Array], examples: Any) -> tuple[list[jax.Array], None]:
        return jax.tree.map(jnp.add, total, sum_groups(examples)), None

    zeros = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(sum_groups, first)]
    return jax.lax.scan(step, zeros, examples)[0]
