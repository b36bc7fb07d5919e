"""Measures the norms of clipped gradients, and the change of sums by one example.

Norms and distances are computed in exact arithmetic.
"""

import functools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpmp.tools.selfcheck._subjects import Number, Result, Rows, Sizes, Sums, compare

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def measure_contributions(sums: Sums, sizes: Sizes) -> list[Result]:
    """The largest and the smallest norm of a gradient that has to be clipped."""
    make = functools.cache(sums.make)
    squares = {}
    for name, l2_clip_norm, leaves in _examples(sizes):
        if l2_clip_norm >= sums.smallest_clip_norm:
            sum_fn, bound = make(l2_clip_norm, None)
            contribution = sum_fn([x[None] for x in leaves], np.zeros(1, bool))
            squares[name] = squared_norm(contribution) / bound**2
    title = "norm of a clipped gradient, over the clip norm"
    lowest = sums.smallest_norm
    return [
        _result(f"Largest {title}", sums, squares, at_most=1.0),
        _result(f"Smallest {title}", sums, squares, at_least=lowest),
    ]


def _result(
    measurement: str, sums: Sums, squares: dict[str, Number], **limit: float
) -> Result:
    """Compares the root of the worst of some squares to its one limit."""
    pick = max if "at_most" in limit else min
    name = pick(squares, key=squares.__getitem__)
    value = squares[name]
    return compare(measurement, sums, value, worst_case=name, is_squared=True, **limit)


def _examples(sizes: Sizes) -> Iterator[tuple[str, float, list[np.ndarray]]]:
    """Names, clip norms, and the leaves of gradients with norms well above these."""
    for dtype in _DTYPES:
        for name, entries in _entries(sizes.num_entries, dtype).items():
            x = entries.astype(dtype)
            yield f"{name}, {x.dtype.name}", 0.003, [x]
    for name, decades in (("equal leaves", 0), ("leaves of many sizes", 3)):
        leaves = list(_mixed_leaves(min(99, sizes.num_leaves), decades))
        yield f"{len(leaves)} {name}, mixed", 0.003, leaves
    # A running sum of these squares in bfloat16 stays at the first of them.
    leaves = [np.full(1, 1 / 16 if i else 1) for i in range(sizes.num_leaves)]
    leaves = [x.astype(jnp.bfloat16) for x in leaves]
    yield f"{len(leaves)} leaves, bfloat16", 0.003, leaves
    yield "entries of 1e-23, float32", 1e-22, [np.full(2000, 1e-23, np.float32)]


def _entries(size: int, dtype: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    large = 300 if dtype == jnp.float16 else 1e15
    one_large = np.full(size, 2.0**-12)
    one_large[0] = 1
    normal = rng.normal(size=size)
    return {
        "equal entries": np.full(size, 1 / 3),
        f"entries of {large:g}": np.full(size, large),
        "entries of 1.5e-4": np.full(size, 1.5e-4),
        "one large entry": one_large,
        "random entries": normal,
        "entries of many sizes": normal * 10 ** rng.uniform(-4, 3, size),
    }


def _mixed_leaves(num_leaves: int, decades: float) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for i in range(num_leaves):
        value = 10 ** rng.uniform(-decades, decades) / 3
        yield np.full((1, 3, 17, 64)[i % 4], value).astype(_DTYPES[i % 3])


def measure_sensitivity(sums: Sums, sizes: Sizes) -> list[Result]:
    """The largest change of a sum when one example is left out of the batch."""
    squares = {}
    for shape in sums.batches:
        if shape.size > sizes.largest_batch:
            continue
        sum_fn, bound = sums.make(1.0, shape.microbatch_size)
        for name, batch in _batches(shape.size, shape.dtype).items():
            total = sum_fn([batch], np.zeros(shape.size, bool))
            neighbours = _neighbours(batch, sums.assumes_fixed_slots)
            for how, neighbour, is_padding in neighbours:
                pairs = zip(total, sum_fn([neighbour], is_padding), strict=True)
                change = [np.concatenate([x, -y]) for x, y in pairs]
                squares[f"{name}, {shape}, {how}"] = squared_norm(change) / bound**2
    title = "Largest change of a sum between neighbouring batches, over the clip norm"
    return [_result(title, sums, squares, at_most=1.0)]


def _batches(size: int, dtype: Any) -> dict[str, np.ndarray]:
    """Examples, (B, 4); some of them have a norm of 1 or more."""
    equal = np.full((size, 4), 0.5)
    # A running sum rounds each small example up to a whole unit in the last place of a
    # power of two. Without the first example, the sum stays below that power, where
    # units are half as large, and gains half as much.
    stagnating = np.array(equal)
    stagnating[size // 2 :] *= 0.7 * float(jnp.finfo(dtype).eps) * (size // 2)
    normal = np.random.default_rng(size).normal(size=(size, 4))
    batches = {
        "equal": equal,
        "alternating": equal * np.resize([1.0, -1.0], size)[:, None],
        "stagnating": stagnating,
        "random": normal,
        "many sizes": normal * np.logspace(-6, 6, size)[:, None],
    }
    return {name: examples.astype(dtype) for name, examples in batches.items()}


def _neighbours(
    batch: np.ndarray, assumes_fixed_slots: bool
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Batches without an example, and their padding; later examples may move up."""
    size = len(batch)
    slots = np.arange(size)
    for name, i in (("first", 0), ("middle", size // 2), ("last", size - 1)):
        yield f"{name} replaced by padding", batch, slots == i
        if assumes_fixed_slots:
            continue
        moved = np.concatenate([np.delete(batch, i, axis=0), batch[i : i + 1]])
        yield f"{name} removed", moved, slots == size - 1


def squared_norm(tree: Rows) -> Number:
    """The squared L2 norm, exactly; infinite if an entry is not finite."""
    if not all(np.isfinite(x).all() for x in tree):
        return math.inf
    return sum((_sum_of_squares(x) for x in tree), Fraction(0))


def _sum_of_squares(rows: np.ndarray) -> Fraction:
    mantissas, exponents = np.frexp(rows)
    lowest = int(exponents.min(initial=0))
    integers = (mantissas * 2.0**53).astype(np.int64).astype(object)
    entries = np.sum(integers << (exponents - lowest).astype(object), axis=0)
    return sum(x * x for x in entries.tolist()) * Fraction(4) ** (lowest - 53)
