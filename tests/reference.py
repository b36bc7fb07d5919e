"""Exact values of computed arrays, and an oracle for clipped sums."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from dpmp.numerics._grid import GridArray


def _is_sum(x: Any) -> bool:
    return isinstance(x, GridArray)


def float64_values(x: Any) -> np.ndarray:
    """A float array of any width in float64, which holds all of its values."""
    return np.asarray(x).astype(np.float64)


def exact_values(x: Any) -> np.ndarray:
    """The flat entries of an array or grid array, as fractions."""
    if isinstance(x, GridArray):
        return exact_values(x.counts) * Fraction(x.unit)
    flat = [Fraction(v) for v in float64_values(x).ravel().tolist()]
    return np.array([*flat, None], object)[:-1]


def exact_squared_norm(tree: Any) -> Fraction:
    """The squared L2 norm over all leaves (arrays or sums), exactly."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_sum)
    return sum((_exact_sum_of_squares(x) for x in leaves), Fraction(0))


def _exact_sum_of_squares(x: Any) -> Fraction:
    if _is_sum(x):
        return sum((v * v for v in exact_values(x)), Fraction(0))
    mantissas, exponents = np.frexp(float64_values(x).ravel())
    if not np.isfinite(mantissas).all():
        raise ValueError("there is no exact norm of what is not finite")
    integers = (mantissas * 2.0**53).astype(np.int64)
    total = Fraction(0)
    for e in np.unique(exponents).tolist():
        group = integers[exponents == e].tolist()
        total += sum(m * m for m in group) * Fraction(4) ** (e - 53)
    return total


def exact_squared_distance(a: Any, b: Any) -> Fraction:
    """The squared L2 distance of two trees of arrays or sums, exactly."""
    pairs = zip(
        jax.tree.leaves(a, is_leaf=_is_sum),
        jax.tree.leaves(b, is_leaf=_is_sum),
        strict=True,
    )
    differences = (exact_values(x) - exact_values(y) for x, y in pairs)
    return sum((v * v for d in differences for v in d), Fraction(0))


def has_norm_at_most(tree: Any, bound: float) -> bool:
    """Whether the exact norm is at most the exact value of `bound`."""
    return exact_squared_norm(tree) <= Fraction(bound) ** 2


def norm(tree: Any) -> float:
    """The L2 norm, to float64."""
    return math.sqrt(exact_squared_norm(tree))


def relative_distance(actual: Any, expected: Any) -> float:
    """The distance of two trees over the norm of the second, to float64."""
    differences = jax.tree.map(
        lambda a, b: float64_values(a) - float64_values(b), actual, expected
    )
    return norm(differences) / norm(expected)


def per_example_norms(stack: Any) -> np.ndarray:
    """The norms of a tree of stacked gradients, (B,), to float64."""
    flat = [float64_values(x).reshape(len(x), -1) for x in jax.tree.leaves(stack)]
    rows = np.concatenate(flat, axis=1)
    return np.array([math.sqrt(math.fsum(row * row)) for row in rows])


def clipped_sum(
    stack: Any,
    l2_clip_norm: Any,
    *,
    keep: Sequence[bool] | None = None,
    divisor: float = 1.0,
) -> Any:
    """The sum of clipped per-example gradients, to float64.

    Args:
      stack: a tree of arrays with a leading example axis.
      l2_clip_norm: a number, or a tree of numbers that is a prefix of `stack`.
      keep: which examples contribute.
      divisor: what the sum is divided by.
    """
    clip_norms, prefix = jax.tree.flatten(l2_clip_norm)
    groups = prefix.flatten_up_to(stack)
    sums = [
        _clipped_sum_of_group(group, clip_norm, keep, divisor)
        for group, clip_norm in zip(groups, clip_norms, strict=True)
    ]
    return jax.tree.unflatten(prefix, sums)


def _clipped_sum_of_group(
    group: Any, clip_norm: float, keep: Sequence[bool] | None, divisor: float
) -> Any:
    norms = per_example_norms(group)
    coefs = np.array([min(1.0, clip_norm / n) if n else 1.0 for n in norms]) / divisor
    kept = np.flatnonzero(np.ones(len(norms), bool) if keep is None else keep)

    def leaf_sum(x: Any) -> np.ndarray:
        scaled = float64_values(x).reshape(len(x), -1)[kept] * coefs[kept, None]
        total = np.array([math.fsum(column) for column in scaled.T])
        return total.reshape(np.shape(x)[1:])

    return jax.tree.map(leaf_sum, group)


def assert_trees_close(actual: Any, expected: Any, *, rtol: float) -> None:
    """Compares leaf by leaf, up to `rtol` times the leaf's largest entry."""
    jax.tree.map(lambda a, b: _assert_leaves_close(a, b, rtol), actual, expected)


def _assert_leaves_close(actual: Any, expected: Any, rtol: float) -> None:
    actual, expected = float64_values(actual), float64_values(expected)
    scale = np.max(np.abs(expected), initial=0.0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * scale)


# The float sums of each gradient engine.
FLOAT_SUMS = {"per_example": "float32", "book_keeping": "unproved_float32"}
