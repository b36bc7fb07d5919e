"""Discrete Gaussian noise: exact, in integers only, in constant time.

Samplers elsewhere reject, and leak through their running time, or round floats, and
leak through the lowest bits. This one looks up a base distribution, D_{Z,s0} with
s0^2 = 4 (1 + 128^2), in an alias table of integers, and adds up draws: a x1 + b x2, or
k (a x1 + b x2) + x3.

D_{Z,s} gives the integer n a probability proportional to exp(-n^2 / 2 s^2). By Poisson
summation, a sum over shifted integers hardly depends on the shift c:

  sum_j exp(-(j - c)^2 / 2 t^2) = t sqrt(2 pi) (1 +- e),
  e = 2 sum_{m >= 1} exp(-2 pi^2 t^2 m^2) < 2^-112.9 where t^2 >= 4.

*Convolution.* For x from D_{Z,u}, y from D_{Z,v} and a, b without a common factor, the
pairs with a x + b y = n are (x0 + j b, y0 - j a) for all integers j. With
s^2 = a^2 u^2 + b^2 v^2 and t = u v / s, completing the square in j makes the
probability of n proportional to

  exp(-n^2 / 2 s^2) sum_j exp(-(j - c)^2 / 2 t^2)     for some c.

So a x + b y is D_{Z,s}, up to a factor between (1 - e) / (1 + e) and its inverse. Two
base draws have u = v = s0, and t^2 = s0^2 / (a^2 + b^2) is at least 4 for
a^2 + b^2 <= 1 + 128^2. Their sum, times k, meets a third with u^2 = (a^2 + b^2) s0^2
and v = s0, where t^2 = s0^2 / (k^2 + 1 / (a^2 + b^2)) is at least 4 for k <= 128.

*Accounting.* Add real Gaussian noise of variance s^2 - 4 to an integer S, and round the
sum x to the integer n with a probability of exp(-(n - x)^2 / 8) / w(x). The integral of
density times exp(-(n - x)^2 / 8) is proportional to exp(-(n - S)^2 / 2 s^2), and w(x)
is 2 sqrt(2 pi) (1 +- e). So n - S is D_{Z,s}, up to a factor within the same bounds,
and adding D_{Z,s} is post-processing of the Gaussian mechanism.

Such a factor makes a total variation distance of at most e / (1 - e) < 2^-112.

References:
  [Canonne, Kamath, Steinke: The discrete Gaussian for differential
  privacy](https://arxiv.org/abs/2004.00010)
  [Micciancio, Walter: Gaussian sampling over the integers: efficient, generic,
  constant-time](https://eprint.iacr.org/2017/259)
"""

import bisect
import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._random import positions
from dpmp._threefry import threefry4x32
from dpmp.noise_addition._alias_table import (
    BASE_VARIANCE,
    AliasTable,
    alias_table,
    look_up,
    table_total_variation,
)

_LARGEST_MULTIPLIER = 128

# The smallest t^2 above, and what a sum over shifted integers then costs.
_LATTICE_VARIANCE = 4
_LATTICE_TOTAL_VARIATION = Fraction(1, 2**112)
_LARGEST_SQUARES = 1 + _LARGEST_MULTIPLIER**2

# Above the total variation of all widths.
LARGEST_TOTAL_VARIATION = 2.0**-109

# Base draws 1, 2 and 3 have a stream each.
_STREAMS_PER_LEAF = 4
_NUM_LEAVES = 2**32 // _STREAMS_PER_LEAF


@dataclass(frozen=True)
class DiscreteGaussian:
    """Integer noise with a probability proportional to exp(-x^2 / (2 variance)).

    >>> noise = DiscreteGaussian((128, 1))
    >>> noise.variance == 32770**2
    True
    >>> key = jnp.array([1, 2, 3, 4], jnp.uint32)
    >>> x = noise.sample(key, (2, 3), step=jnp.int32(0), leaf=0)
    >>> print(x.dtype, x.shape)
    int32 (2, 3)

    Guarantees:
      - Added to integers, it is post-processing of the Gaussian mechanism with
        `effective_stddev`, but for a total variation distance of `total_variation` for
        each entry of each release. If these add up to t, the delta that an accountant
        finds for epsilon grows by (1 + exp(epsilon)) t.
      - That holds for uniform bits. Those of Threefry pass for uniform with everybody
        who does not know the key.
      - Time and control flow are the same for all values: nothing branches, ends early
        or is left out. The addresses read from the table, 144 KiB, do depend on the
        noise, and whoever shares a cache with the program may learn about them.

    Attributes:
      multipliers: of the base draws that are added up: (1,), (a, b) or (k a, k b, 1),
        where a and b have no common factor, a^2 + b^2 is at most 1 + 128^2, and k at
        most 128.

    Raises:
      ValueError: for other multipliers.
    """

    multipliers: tuple[int, ...]

    def __post_init__(self) -> None:
        _validate.require(
            _are_multipliers(self.multipliers),
            "multipliers must be (1,), (a, b) or (k * a, k * b, 1) within their limits",
            multipliers=self.multipliers,
            fix="Use DiscreteGaussian.at_least: other sums are no discrete Gaussians.",
        )

    @classmethod
    def at_least(cls, stddev: float | Fraction) -> "DiscreteGaussian":
        """Noise with an effective standard deviation of at least that, or little more.

        It is 4 % more at most from 3000 units on, and 0.25 % from 33,000 on.

        Raises:
          ValueError: for more than about 4.19 million units.
        """
        squared = Fraction(stddev) ** 2 + _LATTICE_VARIANCE
        needed = math.ceil(squared / BASE_VARIANCE)
        pairs = _pairs()
        if needed <= 1:
            return cls((1,))
        if needed <= _LARGEST_SQUARES:
            return cls(pairs[bisect.bisect_left(pairs, (needed,))][1])
        k = math.isqrt((needed - 2) // _LARGEST_SQUARES) + 1
        _validate.require(
            k <= _LARGEST_MULTIPLIER,
            "the noise must have at most 4.19 million units of the grid",
            stddev=float(stddev),
            fix="Use a lower resolution; for float sums, pass l2_sensitivity.",
        )
        pair = pairs[bisect.bisect_left(pairs, (math.ceil((needed - 1) / k**2),))][1]
        return cls((k * pair[0], k * pair[1], 1))

    @classmethod
    def at_most(cls, stddev: float, num_draws: int) -> "DiscreteGaussian":
        """The widest noise of two or three draws that is no wider, or the narrowest."""
        squared = Fraction(stddev) ** 2 + _LATTICE_VARIANCE
        allowed = int(squared / BASE_VARIANCE)
        pairs = _pairs()
        if allowed <= 1:
            return cls((1,))
        if num_draws == 2 or allowed <= _LARGEST_SQUARES:
            return cls(pairs[bisect.bisect_right(pairs, (allowed + 1,)) - 1][1])
        k = min(math.isqrt((allowed - 2) // _LARGEST_SQUARES) + 1, _LARGEST_MULTIPLIER)
        pair = pairs[bisect.bisect_right(pairs, ((allowed - 1) // k**2 + 1,)) - 1][1]
        return cls((k * pair[0], k * pair[1], 1))

    @property
    def variance(self) -> int:
        """The parameter of the distribution, in squared units of the grid."""
        return BASE_VARIANCE * sum(m * m for m in self.multipliers)

    @property
    def effective_stddev(self) -> float:
        """That of the Gaussian mechanism to account for, rounded down."""
        square = self.variance - _LATTICE_VARIANCE
        root = math.sqrt(square)
        return root if Fraction(root) ** 2 <= square else math.nextafter(root, 0)

    @property
    def total_variation(self) -> float:
        """A bound for one entry, rounded up: see Guarantees.

        It is that of the table for every draw, and that of a sum over shifted integers
        for every convolution and for the rounding of the Gaussian mechanism.
        """
        exact = len(self.multipliers) * (
            table_total_variation() + _LATTICE_TOTAL_VARIATION
        )
        rounded = float(exact)
        return rounded if rounded >= exact else math.nextafter(rounded, math.inf)

    def sample(
        self, key: jax.Array, shape: tuple[int, ...], *, step: jax.Array, leaf: int
    ) -> jax.Array:
        """Draws independent noise, a function of key, step, leaf and place alone.

        The bits are the same under any transformation and any sharding; the places in
        a shard count from zero within `jax.shard_map`.

        Args:
          key: (4,) uint32: `jax.random.key_data` of a 128-bit key that is used for
            nothing else.
          shape: of the noise.
          step: int32 or uint32 scalar, another one for every release under a key.
          leaf: which of the arrays of a release this is, from 0 to 2^30 - 1.

        Returns:
          An int32 array.

        Raises:
          ValueError: for a key, step or leaf of another kind.
        """
        _check_counter(key, step, leaf)
        step = jnp.asarray(step).astype(jnp.uint32)
        noise = jnp.zeros(shape, jnp.int32)
        for i, multiplier in enumerate(self.multipliers, 1):
            stream = np.uint32(_STREAMS_PER_LEAF * leaf + i)
            draw = _base_draw(alias_table(), key, step, stream, shape)
            noise += np.int32(multiplier) * draw
        return noise


# One trace serves all draws of one shape, and a table that comes as an argument is one
# constant of a program, however many shapes there are.
@functools.partial(jax.jit, static_argnames="shape")
def _base_draw(
    table: AliasTable,
    key: jax.Array,
    step: jax.Array,
    stream: jax.Array,
    shape: tuple[int, ...],
) -> jax.Array:
    high, low = positions(shape)
    # A stream is never 0, as the first word is in jax's own blocks, for bits and for
    # keys. And the first thing that happens to a place is to be mixed with a stream:
    # draws share few arrays, which XLA might store for them.
    return look_up(table, threefry4x32(list(key), [stream, low, step, high]))


@functools.cache
def _pairs() -> list[tuple[int, tuple[int, int]]]:
    """All (a^2 + b^2, (a, b)) that a sum of two draws may have, in order."""
    up_to = range(1, _LARGEST_MULTIPLIER + 1)
    return sorted(
        (a * a + b * b, (a, b))
        for a in up_to
        for b in range(1, a + 1)
        if a * a + b * b <= _LARGEST_SQUARES and math.gcd(a, b) == 1
    )


def _are_multipliers(multipliers: Any) -> bool:
    if not isinstance(multipliers, tuple) or not all(
        _validate.is_integer(m) and m > 0 for m in multipliers
    ):
        return False
    if len(multipliers) == 3 and multipliers[2] == 1:
        k = math.gcd(*multipliers[:2])
        multipliers = tuple(m // k for m in multipliers[:2])
        return k <= _LARGEST_MULTIPLIER and _are_multipliers(multipliers)
    if len(multipliers) == 2:
        squares = sum(m * m for m in multipliers)
        return math.gcd(*multipliers) == 1 and squares <= _LARGEST_SQUARES
    return multipliers == (1,)


def _check_counter(key: jax.Array, step: jax.Array, leaf: int) -> None:
    _validate.require(
        _is_array(key, (4,), "uint32"),
        "key must be four uint32 words",
        key=str(jax.typeof(key)),
        fix="Use jax.random.key_data of a 128-bit key.",
    )
    _validate.require(
        _is_array(step, (), "int32", "uint32"),
        "step must be an int32 or uint32 scalar",
        step=str(jax.typeof(step)),
        fix="Count releases in 32 bits: the lower half of a wider count would repeat.",
    )
    _validate.require(
        _validate.is_integer(leaf) and 0 <= leaf < _NUM_LEAVES,
        f"leaf must be an integer from 0 to {_NUM_LEAVES - 1}",
        leaf=leaf,
        fix="Use the position among the leaves of the release.",
    )


def _is_array(x: jax.Array, shape: tuple[int, ...], *dtypes: str) -> bool:
    given = jax.typeof(x)
    return given.shape == shape and given.dtype.name in dtypes
