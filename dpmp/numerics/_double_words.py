"""Pairs of float32 numbers whose sum has a precision of about 48 bits."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpmp.numerics._grid import GridArray, check_float, snap


class DoubleWord(NamedTuple):
    """An unevaluated sum `hi + lo` of two float32 arrays, about 48 bits wide.

    It is the type of each leaf that `clipped_grad(..., arithmetic="float32x2")`
    returns. Noise must be added before the pair is rounded to float32, as
    `dpmp.noise_addition` does. A rounded pair has lost the precision of the second
    word. Do not add two pairs outside of this module. For example, `psum` would add
    high and low words separately, and the sensitivity does not cover that rounding.
    """

    hi: jax.Array
    lo: jax.Array

    @property
    def is_on_grid(self) -> bool:
        """See `Sum`."""
        return False

    def words(self) -> tuple[jax.Array, jax.Array]:
        """See `Sum`."""
        return self.hi, self.lo

    def to_float(self) -> jax.Array:
        """See `Sum`."""
        return self.hi + self.lo

    def snapped(self, unit: float) -> GridArray:
        """See `Sum`."""
        return snap(self.hi, self.lo, unit)

    def check_before_noise(self, leaf: int) -> None:
        """See `Sum`."""
        check_float(self.hi, leaf)


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rounded sum and its exact error (Knuth)."""
    s = a + b
    b_part = s - a
    return s, (a - (s - b_part)) + (b - b_part)


def _fast_two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rounded sum and its exact error, for |a| >= |b| (Dekker)."""
    s = a + b
    return s, b - (s - a)


@jax.jit  # a program has one copy for every shape
def add(x: DoubleWord, y: DoubleWord) -> DoubleWord:
    """Adds pairs by AccurateDWPlusDW, with a relative error below 3 u^2 + 13 u^3.

    References:
      [Joldes, Muller, Popescu: Tight and rigorous error bounds for basic building
        blocks of double-word arithmetic, algorithm 6](https://doi.org/10.1145/3121432)
    """
    s, s_error = two_sum(x.hi, y.hi)
    t, t_error = two_sum(x.lo, y.lo)
    s, s_error = _fast_two_sum(s, s_error + t)
    return DoubleWord(*_fast_two_sum(s, s_error + t_error))


@jax.jit
def _add_float(x: DoubleWord, y: jax.Array) -> DoubleWord:
    """Adds by DWPlusFP, relative error at most 2 u^2: algorithm 4 of that paper."""
    s, s_error = two_sum(x.hi, y)
    return DoubleWord(*_fast_two_sum(s, x.lo + s_error))


def lift(x: jax.Array) -> DoubleWord:
    x = x.astype(jnp.float32)
    return DoubleWord(x, jnp.zeros_like(x))


def add_block(terms: list[jax.Array]) -> DoubleWord:
    # Eight numbers that are added one after another have partial sums of 35 numbers in
    # all, with a relative error of 2 u^2 each. The slack counts 24 numbers, as in a
    # balanced tree, at 4 u^2 each, which is more.
    first, *others = (term.astype(jnp.float32) for term in terms)
    return functools.reduce(_add_float, others, lift(first))
