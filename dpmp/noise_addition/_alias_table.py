"""The alias table from which the base draws of the noise are looked up.

In the base distribution D_{Z,s0}, with s0^2 = BASE_VARIANCE, the integer x has a
probability proportional to exp(-x^2 / 2 s0^2). The table holds all x whose probability
is not below 2^-129 (12.9 standard deviations).

References:
  [Walker: An efficient method for generating discrete random variables with general
  distributions](https://doi.org/10.1145/355744.355749)
"""

import decimal
import functools
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# The value is chosen for sums of two draws; see `_discrete_gaussian`.
BASE_VARIANCE = 4 * (1 + 128**2)

_COLUMN_BITS = 13
_NUM_COLUMNS = 2**_COLUMN_BITS
_CENTER = _NUM_COLUMNS // 2
_TOTAL_WEIGHT = 2**128
_CAPACITY = _TOTAL_WEIGHT // _NUM_COLUMNS


class AliasTable(NamedTuple):
    """Columns, by the highest 13 bits c of a uniform integer below 2^128.

    If it is below the end of its column, the value of the noise is c - 4096. Otherwise
    it is the column's other value.
    """

    ends: tuple[np.ndarray, ...]  # four (8192,) uint32 arrays, highest words first
    others: np.ndarray  # (8192,) int16


def look_up(table: AliasTable, words: Sequence[jax.Array]) -> jax.Array:
    """Maps integers of four uint32 words, highest first, to int32 values."""
    column = words[0] >> np.uint32(32 - _COLUMN_BITS)
    own = column.astype(jnp.int32) - np.int32(_CENTER)
    # If one word held two of these values, XLA would store the word to read it twice.
    other, *ends = (
        jnp.asarray(x).at[column].get(mode="promise_in_bounds")
        for x in (table.others, *table.ends)
    )
    other = other.astype(jnp.int32)
    return jnp.where(_is_less(words, ends), own, other)


def _is_less(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
    """Whether a < b, for integers of words, highest first; always reads all words."""
    is_less = a[-1] < b[-1]
    for x, y in zip(a[-2::-1], b[-2::-1], strict=True):
        is_less = (x < y) | ((x == y) & is_less)
    return is_less


@functools.cache
def alias_table() -> AliasTable:
    """Builds the table that gives every value exactly its weight."""
    remaining = list(weights())
    ends = [column * _CAPACITY for column in range(_NUM_COLUMNS)]
    others = list(range(_NUM_COLUMNS))
    small = [column for column in others if remaining[column] < _CAPACITY]
    large = [column for column in others if remaining[column] >= _CAPACITY]
    # The weights that remain for the unfinished columns are the capacity on average. So
    # there is a large column as long as there is a small one.
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
    """Integer weights of -4096, ..., 4095, symmetric, with a sum of 2^128.

    They are 10^50 exp(-x^2 / 2 s0^2), each within 2, scaled and rounded to nearest.
    """
    with decimal.localcontext(decimal.Context(prec=60)):
        exponents = [Decimal(-x * x) / (2 * BASE_VARIANCE) for x in range(_CENTER)]
        half = [int(exponent.exp().scaleb(50)) for exponent in exponents]
    masses = (0, *half[:0:-1], *half)
    total = sum(masses)
    weights = [(2 * _TOTAL_WEIGHT * mass + total) // (2 * total) for mass in masses]
    weights[_CENTER] += _TOTAL_WEIGHT - sum(weights)
    return tuple(weights)
