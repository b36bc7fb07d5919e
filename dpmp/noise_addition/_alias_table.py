"""The base distribution of the noise: an alias table of integers.

It gives the integer x a probability proportional to exp(-x^2 / (2 BASE_VARIANCE)), for
all x whose probability is not below 2^-129 (12.9 standard deviations).

References:
  [Walker: An efficient method for generating discrete random variables with general
  distributions](https://doi.org/10.1145/355744.355749)
"""

import decimal
import functools
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Chosen for sums of two draws: see `_discrete_gaussian`.
BASE_VARIANCE = 4 * (1 + 128**2)

_COLUMN_BITS = 13
_NUM_COLUMNS = 2**_COLUMN_BITS
_CENTER = _NUM_COLUMNS // 2
_TOTAL_WEIGHT = 2**128
_CAPACITY = _TOTAL_WEIGHT // _NUM_COLUMNS


class AliasTable(NamedTuple):
    """What value an integer below 2^128 stands for.

    Its highest 13 bits are the index c of a column. Below the end of that column it
    stands for the column's own value, c - 4096, and from there on for the other one.

    Attributes:
      ends: four (8192,) uint32 arrays, the highest words first.
      others: (8192,) int16.
    """

    ends: tuple[np.ndarray, ...]
    others: np.ndarray


def look_up(table: AliasTable, words: Sequence[jax.Array]) -> jax.Array:
    """The int32 values that integers of four uint32 words, highest first, stand for."""
    column = words[0] >> np.uint32(32 - _COLUMN_BITS)
    own = column.astype(jnp.int32) - np.int32(_CENTER)
    # Were two of these packed into one word, XLA would store what is read for both.
    other = _take(table.others, column).astype(jnp.int32)
    ends = [_take(end, column) for end in table.ends]
    return jnp.where(_is_less(words, ends), own, other)


def _take(array: np.ndarray, index: jax.Array) -> jax.Array:
    return jnp.asarray(array).at[index].get(mode="promise_in_bounds")


def _is_less(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
    """Compares integers of several words, highest first; it always reads all words."""
    is_less = a[-1] < b[-1]
    for x, y in zip(a[-2::-1], b[-2::-1], strict=True):
        is_less = (x < y) | ((x == y) & is_less)
    return is_less


@functools.cache
def alias_table() -> AliasTable:
    """The columns that give every value its weight, exactly."""
    remaining = list(weights())
    ends = [column * _CAPACITY for column in range(_NUM_COLUMNS)]
    others = list(range(_NUM_COLUMNS))
    small = [column for column in others if remaining[column] < _CAPACITY]
    large = [column for column in others if remaining[column] >= _CAPACITY]
    # On average, the columns that are not settled have weights of their capacity: while
    # there is a small one, there is a large one.
    while small:
        column, other = small.pop(), large[-1]
        ends[column] += remaining[column]
        others[column] = other
        remaining[other] -= _CAPACITY - remaining[column]
        if remaining[other] < _CAPACITY:
            small.append(large.pop())
    words = [[end >> shift & 0xFFFFFFFF for end in ends] for shift in (96, 64, 32, 0)]
    return AliasTable(
        tuple(np.array(word, np.uint32) for word in words),
        np.array(others, np.int16) - np.int16(_CENTER),
    )


@functools.cache
def weights() -> tuple[int, ...]:
    """Integer weights of -4096, ..., 4095, symmetric, with a sum of 2^128."""
    masses = _masses()
    total = sum(masses)
    weights = [(2 * _TOTAL_WEIGHT * mass + total) // (2 * total) for mass in masses]
    weights[_CENTER] += _TOTAL_WEIGHT - sum(weights)
    return tuple(weights)


@functools.cache
def table_total_variation() -> Fraction:
    """A bound on the distance of the table's distribution from D_{Z,s0}.

    It is the distance from the distribution of the masses, and that one's from the true
    one. All integers together, their masses are off by less than 2^14, and
    distributions are no further apart than a share of 2^14 in the total.
    """
    masses = _masses()
    total = sum(masses)
    rounding = sum(
        abs(weight * total - mass * _TOTAL_WEIGHT)
        for weight, mass in zip(weights(), masses, strict=True)
    )
    return Fraction(rounding, 2 * _TOTAL_WEIGHT * total) + Fraction(2**14, total)


@functools.cache
def _masses() -> tuple[int, ...]:
    """10^50 exp(-x^2 / 2 s0^2) for -4096, ..., 4095, off by less than 2 in each.

    The integers further out have less than 1 in all.
    """
    with decimal.localcontext(decimal.Context(prec=60)):
        half = [
            int((Decimal(-x * x) / (2 * BASE_VARIANCE)).exp().scaleb(50))
            for x in range(_CENTER)
        ]
    return (0, *half[:0:-1], *half)
