"""Norms of per-example gradients, from the cached activations and cotangents.

The gradient of a parameter is the sum over its uses. Its squared norm is computed in
one of three ways:

1. If the uses read different entries of the parameter, their squared norms add up.
2. If they read the same entries, inner products of positions give the squared norm
   (ghost norms: Goodfellow, 2015; Li et al., 2021). This is done if it takes less time
   than materializing the gradient G:

    <G_a, G_b> = sum over positions t, s of <left_at, left_bs> <right_at, right_bs>

3. Otherwise the gradient is materialized, for a few examples at a time. If a parameter
   has several uses, or is used through arithmetic (the loss computes with it before it
   meets data), the gradients of the uses are then sent back to the parameter.

Each squared norm comes with the square of A, the sum of |left| |right| over positions.
This sum of magnitudes is at least the norm, and rounding errors are relative to it
(`numerics/_bounded.py`).
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp._typing import PyTree
from dpmp.engines.book_keeping import _linalg, _uses, _views
from dpmp.engines.book_keeping._uses import Cached, Outer, Sizes, Use
from dpmp.numerics import FLOOR, Roundings, at_least_float32

# Norms are computed in chunks whose temporary arrays have about this many entries.
_CHUNK_ENTRIES = 2**23

# Writing an entry and reading it again takes as long as this many multiplications.
FLOPS_PER_ENTRY = 16


class Squares(NamedTuple):
    """The squared norm of a parameter's gradient, or of some of its entries, in parts.

    Both attributes are arrays of summands: (P,) for one example and (B, P) for a batch.
    P may differ between the two. The entries of `magnitudes` add up to the square of A,
    the sum of magnitudes. They may be too large by the allowance for underflow.
    """

    norm: jax.Array
    magnitudes: jax.Array


@dataclass(frozen=True)
class NormMethod:
    """One way to compute squared norms, or parts of them.

    Attributes:
      form: how the squared norm is computed; `_summary.Row` explains the words.
      uses: the numbers of the uses.
      params: the parameters to whose squared norms it adds a part.
      measure: a function of the values of all roots, and of the arrays that the uses
        cache for one example. It returns `Squares` for each of `params`.
      roundings: the counts of roundings in these numbers, and in the sum of gradients
        over a batch.
      num_products: the number of products that the squared norm is a sum of.
      flops: multiplications for one example.
      size: float32 entries of temporary memory for one example.
    """

    form: str
    uses: list[int]
    params: list[int]
    measure: Callable[[Mapping[int, Any], Sequence[Cached]], list[Squares]]
    roundings: Roundings
    num_products: int
    flops: float
    size: float

    @property
    def cancels(self) -> bool:
        """Whether the gradient is not in memory when it is summed over examples."""
        return self.form not in ("entries", "stored")


def by_entries(number: int, use: Use, param: int) -> NormMethod:
    """The norm method of a use whose gradient is stored, or is a cotangent itself."""
    size = math.prod(use.cotangent.shape)
    roundings = _linalg.num_roundings(size) + 1

    def measure(_: Any, cached: Sequence[Cached]) -> list[Squares]:
        squares = _linalg.row_sums(_square(cached[0].cotangent))
        return [Squares(squares, squares)]

    return NormMethod(
        "entries",
        [number],
        [param],
        measure,
        Roundings(total=roundings, magnitude=roundings),
        size,
        # A gradient without a rule is materialized by the backward pass.
        size * (1 + FLOPS_PER_ENTRY if use.rule == "identity" else 1),
        0,
    )


def by_product(number: int, use: Use, param: int) -> NormMethod:
    """The norm method of a use of the outer form, whose gradient is materialized."""
    outer = _outer(use)
    groups, positions, left, right = outer.sizes
    size = groups * left * right

    def measure(_: Any, cached: Sequence[Cached]) -> list[Squares]:
        squares = _square(_uses.product(use, cached[0]))
        magnitudes = _magnitudes(use, cached[0])
        return [Squares(_linalg.row_sums(squares), jnp.square(magnitudes))]

    roundings = Roundings(
        product=positions + 1,
        total=_linalg.num_roundings(size) + 1,
        magnitude=_roundings_of_magnitudes(outer.sizes),
        positions=positions,
    )
    products = size * positions * _slowdown(use)
    products = groups * positions * right if outer.has_rows else products
    flops = size * FLOPS_PER_ENTRY + products
    return NormMethod(
        "product", [number], [param], measure, roundings, size, flops, size
    )


def by_gram(uses: Mapping[int, Use], swapped: Sequence[bool], param: int) -> NormMethod:
    """The norm method of uses that have the entries of one parameter in common.

    `swapped` tells, for each use, whether its left side is the right side of the first.
    """

    def measure(_: Any, cached: Sequence[Cached]) -> list[Squares]:
        sides = list(map(_sides, uses.values(), cached, swapped))
        squares, magnitudes = [], 0.0
        for a, b in itertools.combinations_with_replacement(sides, 2):
            grams = [_gram(x, y) for x, y in zip(a, b, strict=True)]
            squares.append((1 if a is b else 2) * _linalg.row_sums(_times(*grams)))
            if a is b:
                sizes = map(_root, map(_diagonal, grams), a)
                magnitudes += jnp.sum(_times(*sizes), axis=1)
        return [Squares(_linalg.joined(squares), jnp.square(magnitudes))]

    outers = [_outer(use) for use in uses.values()]
    groups, _, left, right = outers[0].sizes
    positions = sum(x.sizes.positions for x in outers)
    longest = max(x.sizes.positions for x in outers)
    # Row numbers are compared, which takes no multiplication and rounds nothing.
    of_rows = sum(x.sizes.positions for x in outers if x.has_rows)
    multiplied = right if all(x.has_rows for x in outers) else left + right
    roundings = Roundings(
        inner=multiplied + _linalg.num_roundings(groups * longest**2) + len(uses) ** 2,
        magnitude=_roundings_of_magnitudes(Sizes(groups, positions, multiplied, 0)),
        positions=positions,
    )
    squares = groups * positions**2
    flops = squares * (right + FLOPS_PER_ENTRY)
    flops += groups * (positions - of_rows) ** 2 * left
    return NormMethod(
        "gram", list(uses), [param], measure, roundings, squares, flops, 2 * squares
    )


def by_parameters(
    uses: Mapping[int, Use], shapes: Mapping[int, tuple[int, ...]]
) -> NormMethod:
    """The norm method of any uses: it sends their gradients back to the parameters.

    `shapes` has the shapes of the parameters, by their numbers. The sums of magnitudes
    hold only if all uses belong to one parameter, and each of their views consists of
    entries of this parameter.
    """
    views, params = [use.view for use in uses.values()], list(shapes)

    def measure(roots: Mapping[int, Any], cached: Sequence[Cached]) -> Any:
        grads = list(map(_uses.gradient, uses.values(), cached))
        of_params = _views.pull_back(views, params, roots, grads)
        total = jnp.zeros((), at_least_float32(*(grad.dtype for grad in grads)))
        for use, values, grad in zip(uses.values(), cached, grads, strict=True):
            if use.outer is None:
                parts = _linalg.row_sums(_square(grad))
            else:
                parts = jnp.square(_magnitudes(use, values))
            total += jnp.sqrt(_linalg.add_up(parts)).astype(total.dtype)
        return [
            Squares(_linalg.row_sums(_square(x)), jnp.square(total)[None])
            for x in of_params
        ]

    size = sum(map(math.prod, shapes.values()))
    positions, roundings, flops, temporary = 0, 0, float(size), size
    for use in uses.values():
        num_entries = math.prod(use.view.aval.shape)
        temporary += num_entries
        if use.outer is None:
            positions += 1
            roundings = max(roundings, _linalg.num_roundings(num_entries))
            flops += num_entries
        else:
            positions += use.outer.sizes.positions
            roundings = max(roundings, _roundings_of_magnitudes(use.outer.sizes))
            per_entry = use.outer.sizes.positions * _slowdown(use)
            flops += num_entries * (per_entry + FLOPS_PER_ENTRY)
    return NormMethod(
        "parameters",
        list(uses),
        params,
        measure,
        Roundings(
            # An entry of one use may be added to an entry of any other use.
            product=positions + len(uses),
            total=_linalg.num_roundings(size) + 1,
            magnitude=2 * (roundings + len(uses)),
            positions=max(positions, 1),
        ),
        size,
        flops,
        temporary,
    )


def _outer(use: Use) -> Outer:
    assert use.outer is not None
    return use.outer


def _slowdown(use: Use) -> float:
    """How much longer products take: bfloat16 factors are transposed for them."""
    return 2 if use.cotangent.dtype == jnp.bfloat16 else 1


def measure(
    method: NormMethod, roots: Mapping[int, Any], cached: Sequence[Cached]
) -> list[Squares]:
    """Applies a norm method to all examples: `Squares`, (B, P), for each parameter."""
    of_uses = [cached[i] for i in method.uses]
    chunk = max(1, int(_CHUNK_ENTRIES / max(method.size, 1)))
    return in_chunks(functools.partial(method.measure, roots), of_uses, chunk)


def in_chunks(fn: Callable[[Any], Any], examples: PyTree, chunk: int) -> PyTree:
    """Maps a function over examples, at most `chunk` of them at a time."""
    if chunk >= len(jax.tree.leaves(examples)[0]):
        return jax.vmap(fn)(examples)
    return jax.lax.map(fn, examples, batch_size=chunk)


def _square(x: jax.Array) -> jax.Array:
    return jnp.square(_linalg.widen(x))


class _Side(NamedTuple):
    """A side of outer products: vectors (K, T, n), or row numbers (K, T).

    If `outer` has parts, `values` holds the parts of its left side instead.
    """

    values: jax.Array
    num_entries: int  # n
    outer: Outer | None = None

    @property
    def has_rows(self) -> bool:
        return self.outer is not None and self.outer.has_rows

    def sum_over_parts(self, fn: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Sums a function of the parts, one after the other."""
        if (outer := self.outer) is None or outer.places is None:
            return fn(self.values)

        def of_part(place: Any) -> jax.Array:
            return fn(outer.part(self.values, place))

        shape = jax.eval_shape(of_part, outer.places[0])
        zeros = jnp.zeros(shape.shape, shape.dtype)
        return jax.lax.scan(
            lambda total, place: (total + of_part(place), None), zeros, outer.places
        )[0]


def _sides(use: Use, cached: Cached, is_swapped: bool = False) -> tuple[_Side, _Side]:
    outer, (left, right) = _outer(use), _uses.factors(use, cached)
    first = _Side(left, outer.sizes.left, outer)
    second = _Side(right, outer.sizes.right)
    return (second, first) if is_swapped else (first, second)


def _gram(a: _Side, b: _Side) -> jax.Array:
    """The inner products of all pairs of positions: (K, T_a, T_b)."""
    if a.has_rows and b.has_rows:
        rows, others = a.values, b.values
        return (rows[:, :, None] == others[:, None, :]).astype(jnp.float32)
    if b.has_rows:
        return jnp.swapaxes(_gram(b, a), 1, 2)
    if a.has_rows:
        rows = jnp.take_along_axis(b.values, a.values[:, None, :], axis=2)
        return _linalg.widen(jnp.swapaxes(rows, 1, 2))

    def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
        return _linalg.contract(x, y, ((2,), (2,)), ((0,), (0,)))

    if a is not b:  # neither has parts, or the outer products would have no axes
        return multiply(a.values, b.values)
    return a.sum_over_parts(lambda x: multiply(x, x))


def _root(squares: Any, side: _Side) -> jax.Array:
    """A root, a little too large, to cover squares that were flushed to zero."""
    if side.has_rows:
        return jnp.ones(side.values.shape, jnp.float32)
    return _root_of(squares, FLOOR * side.num_entries)


@jax.jit  # a program has one copy for all arrays of one shape
def _diagonal(grams: jax.Array) -> jax.Array:
    """The diagonals of matrices (K, T, T), by selection: a gather compiles slowly."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, grams.shape, i) for i in (1, 2))
    return jnp.sum(jnp.where(row == column, grams, 0), axis=2)


@jax.jit
def _root_of(squares: jax.Array, floor: float) -> jax.Array:
    return jnp.sqrt(jnp.maximum(squares, 0) + floor)


def _magnitudes(use: Use, cached: Cached) -> jax.Array:
    """The sum of magnitudes, |left| |right| over positions: (K,)."""
    sizes = (
        _root(side.sum_over_parts(lambda x: jnp.sum(_square(x), axis=-1)), side)
        for side in _sides(use, cached)
    )
    return jnp.sum(_times(*sizes), axis=1)


@jax.jit
def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = at_least_float32(a.dtype, b.dtype)
    return a.astype(dtype) * b.astype(dtype)


def _roundings_of_magnitudes(sizes: Sizes) -> int:
    return sizes.left + sizes.right + 2 * sizes.positions + sizes.groups
