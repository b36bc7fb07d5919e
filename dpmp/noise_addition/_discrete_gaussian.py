"""Samples discrete Gaussian noise in constant time, with integers only.

Other samplers reject candidates and leak information through their running time, or
round floats and leak it through the lowest bits. This sampler looks up draws from a
base distribution, D_{Z,s0} with s0^2 = 4 (1 + 128^2), in an alias table of integers. It
returns one draw, or a sum: a x1 + b x2, k (a x1 + b x2) + x3, or a multiple of that and
a fourth draw.

D_{Z,s} gives the integer n a probability proportional to exp(-n^2 / 2 s^2). By Poisson
summation, a sum of draws has such a distribution as well, and it is as private as the
Gaussian mechanism with the variance s^2 - 4, both almost exactly: docs/proofs.md shows
how far from it, and how large the factors may be.

References:
  [Canonne, Kamath, Steinke: The discrete Gaussian for differential
  privacy](https://arxiv.org/abs/2004.00010)
  [Micciancio, Walter: Gaussian sampling over the integers: efficient, generic,
  constant-time](https://eprint.iacr.org/2017/259)
"""

import bisect
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._fence import fence
from dpmp._random import positions, threefry4x32
from dpmp.noise_addition._alias_table import (
    BASE_VARIANCE,
    AliasTable,
    alias_table,
    look_up,
)

_LARGEST_MULTIPLIER = 128
_LARGEST_OUTERMOST = 16  # no noise of four draws exceeds 32 bits

# The largest sums of squared multipliers, by the number of draws.
_LARGEST_SQUARES = {2: 1 + _LARGEST_MULTIPLIER**2}
_LARGEST_SQUARES[3] = 1 + _LARGEST_MULTIPLIER**2 * _LARGEST_SQUARES[2]
_LARGEST_SQUARES[4] = 1 + _LARGEST_OUTERMOST**2 * _LARGEST_SQUARES[3]
_LATTICE_VARIANCE = 4  # the smallest t^2 in the proof

# A bound on the total variation distance of one entry: docs/proofs.md.
NOISE_TOTAL_VARIATION = 2.0**-109

# A draw on a GPU stores up to eight words for each entry. So a large array is drawn in
# parts of about this many entries.
_PART = 2**24
# The number of devices along an axis is assumed to divide this number.
_NUMBERS_OF_DEVICES = 256 * 3 * 5 * 7
_SHORTEST_RUN = 32  # adjacent entries, which are 128 bytes

# Stream 4 i + d of the random bits is for base draw d (1, 2, 3 or 4) of leaf i.
_STREAMS_PER_LEAF = 4


@dataclass(frozen=True)
class DiscreteGaussian:
    """Integer noise with a probability proportional to exp(-x^2 / (2 variance)).

    Guarantees:
      - Adding this noise to integers is as private as the Gaussian mechanism with
        `effective_stddev`, up to a total variation distance of
        `NOISE_TOTAL_VARIATION` for each entry of each release. If these distances add
        up to t, the delta of epsilon grows by (1 + exp(epsilon)) t.
      - This is proved for uniform random bits. The bits of Threefry are assumed to look
        uniform to everyone who does not know the key.
      - Running time and control flow do not depend on the values of the noise. The
        addresses that are read from the table of 144 KiB do depend on them. A program
        that shares a cache with this one may learn something about these addresses.

    Attributes:
      multipliers: the factors of the base draws: (1,), (a, b), (k a, k b, 1) or (j k a,
        j k b, j, 1). Here a and b have no common factor, a^2 + b^2 is at most 1 +
        128^2, k is at most 128, and j at most 16. Other multipliers are refused.
    """

    multipliers: tuple[int, ...]

    def __post_init__(self) -> None:
        inner = self.multipliers
        for largest in (_LARGEST_OUTERMOST, _LARGEST_MULTIPLIER)[4 - len(inner) :]:
            k = math.gcd(*inner[:-1])
            within = inner[-1:] == (1,) and 0 < k <= largest
            inner = tuple(m // k for m in inner[:-1]) if within else ()
        if not (
            len(inner) in (1, 2)
            and min(inner) > 0
            and math.gcd(*inner) == 1
            and _squares(inner) <= _LARGEST_SQUARES[2]
        ):
            _validate.fail(
                "multipliers must be (1,), (a, b), (k a, k b, 1) or (j k a, j k b, j, "
                "1) within their limits. Use DiscreteGaussian.at_least. Other sums "
                "are not discrete Gaussian.",
                multipliers=self.multipliers,
            )

    @classmethod
    def at_least(cls, stddev: float | Fraction) -> "DiscreteGaussian":
        """Noise whose effective standard deviation is `stddev` or slightly more.

        It is at most 4 % more from 3000 units of the grid on, and at most 0.25 % more
        from 33,000 units on.
        """
        needed = math.ceil(_num_squares(stddev))
        if not needed <= _LARGEST_SQUARES[4]:
            _validate.fail(
                "the noise must have at most 67 million units of the grid. Use a "
                "lower resolution. For float sums, pass l2_sensitivity.",
                stddev=float(stddev),
            )
        return cls(_nested(needed, 4, _above))

    @classmethod
    def at_most(cls, stddev: float, num_draws: int) -> "DiscreteGaussian":
        """The widest noise of at most 2 to 4 draws up to `stddev`, or the narrowest."""
        return cls(_nested(int(_num_squares(stddev)), num_draws, _below))

    @property
    def variance(self) -> int:
        """The parameter s^2 of the distribution, in squared units of the grid."""
        return BASE_VARIANCE * _squares(self.multipliers)

    @property
    def effective_stddev(self) -> float:
        """The stddev of the Gaussian mechanism to account for, rounded down."""
        square = self.variance - _LATTICE_VARIANCE
        root = math.sqrt(square)
        return root if Fraction(root) ** 2 <= square else math.nextafter(root, 0)

    def sample(
        self, key: jax.Array, shape: tuple[int, ...], *, step: jax.Array, leaf: int
    ) -> jax.Array:
        """Draws independent noise for every entry of an array.

        Each entry is a function of the key, the step, the leaf and the place of the
        entry. It is the same under any transformation and any sharding. Within
        `jax.shard_map`, the places in each shard count from zero.

        Args:
          key: (4,) uint32, the words of a 128-bit key. Use it for nothing else.
          shape: the shape of the noise, an int32 array.
          step: int32 or uint32 scalar. Use another one for every release with the key.
          leaf: the number of the array within the release, below 2^30 - 1.
        """
        given = jax.typeof(step)
        if given.shape != () or given.dtype not in (jnp.int32, jnp.uint32):
            _validate.fail(
                "step must be an int32 or uint32 scalar. Count in 32 bits: the lower "
                "half of a wider count would repeat.",
                step=str(given),
            )
        step = jnp.asarray(step).astype(jnp.uint32)
        streams = _STREAMS_PER_LEAF * leaf + 1 + np.arange(len(self.multipliers))
        draws = streams.astype(np.uint32), np.array(self.multipliers, np.int32)
        division = _divided(shape)

        def part_of_noise(start: Any) -> jax.Array:
            def add_draw(noise: jax.Array, draw: Any) -> tuple[jax.Array, None]:
                stream, multiplier = draw
                # Without the fence, the compiler would compute the positions once for
                # all draws, before the loop, and store them (and their mixture with the
                # key). These arrays are as large as the noise.
                own_key, one, _ = fence((key, np.uint32(1), stream))
                draw = _base_draw(
                    alias_table(),
                    key=own_key,
                    stream=stream,
                    step=step,
                    start=start,
                    one=one,
                    division=division,
                )
                return noise + multiplier * draw, None

            # A loop, because compiling one draw takes a large part of a second.
            zeros = jnp.zeros(division.shape_with(division.run), jnp.int32)
            return jax.lax.scan(add_draw, zeros, draws)[0]

        def set_part(noise: jax.Array, start: Any) -> tuple[jax.Array, None]:
            drawn, axis = part_of_noise(start), division.axis + 1
            return jax.lax.dynamic_update_slice_in_dim(noise, drawn, start, axis), None

        if not division.run:
            return part_of_noise(jnp.uint32(0))
        noise = jnp.zeros(division.shape_with(division.block_size), jnp.int32)
        noise, _ = jax.lax.scan(set_part, noise, division.starts)
        return noise.reshape(shape)


class _Division(NamedTuple):
    """A division of an array into parts: each part has a run of each block of an axis.

    So devices that share the blocks share each part. The last two parts overlap if the
    runs do not divide the blocks: common entries are drawn twice, with one result.
    """

    shape: tuple[int, ...]
    axis: int = 0
    block_size: int = 0
    run: int = 0  # the indices of a block in one part; 0 if one part is the whole array

    @property
    def starts(self) -> np.ndarray:
        """The first index of each part in every block."""
        starts = np.arange(0, self.block_size, self.run)
        return np.minimum(starts, self.block_size - self.run).astype(np.uint32)

    def shape_with(self, run: int) -> tuple[int, ...]:
        """The shape with `run` indices of each block in place of the divided axis."""
        if not self.run:  # XLA would store words for more axes, even of size 1.
            return self.shape
        before, after = self.shape[: self.axis], self.shape[self.axis + 1 :]
        return *before, self.shape[self.axis] // self.block_size, run, *after

    def indices(self, start: jax.Array) -> list[jax.Array]:
        """The indices in the whole array of the entries of a part, by axis."""
        shape, axis = self.shape_with(self.run), self.axis
        found = [
            jax.lax.broadcasted_iota(jnp.uint32, shape, i) for i in range(len(shape))
        ]
        if self.run:
            block, place = found[axis : axis + 2]
            first = block * np.uint32(self.block_size) + start
            found[axis : axis + 2] = [first + place]
        return found


def _divided(shape: tuple[int, ...]) -> _Division:
    """Chooses the division with the most parts, up to one for each `_PART` entries.

    Devices that can share an axis evenly must also share its blocks evenly: otherwise
    the compiler would make each device draw the noise of all devices.
    """
    most, found = 1, _Division(shape)
    wanted = -(-math.prod(shape) // _PART)
    for axis, size in enumerate(shape if wanted > 1 else ()):
        block_size = size // math.gcd(size, _NUMBERS_OF_DEVICES)
        shortest = max(1, _SHORTEST_RUN // math.prod(shape[axis + 1 :]))
        parts = min(wanted, block_size // shortest)
        if parts > most:
            run = -(-block_size // parts)
            most, found = parts, _Division(shape, axis, block_size, run)
    return found


# jit traces this once for all draws of one shape. The table is an argument, so that a
# program holds it once as a constant, however many shapes there are.
@functools.partial(jax.jit, static_argnames="division")
def _base_draw(
    table: AliasTable,
    *,
    key: jax.Array,
    stream: jax.Array,
    step: jax.Array,
    start: jax.Array,
    one: jax.Array,
    division: _Division,
) -> jax.Array:
    """One draw for a part of an array, in the shape that `division` gives it."""
    high, low = positions(division.shape, division.indices(start), one)
    # In the counters that jax uses itself, for bits and for keys, the first word is 0.
    # A stream is never 0, so that no counter is used twice. The stream comes first for
    # another reason: the places are mixed with it at once, and draws share few arrays
    # that XLA might store.
    return look_up(table, threefry4x32(list(key), [stream, low, step, high]))


def _squares(multipliers: tuple[int, ...]) -> int:
    return sum(m * m for m in multipliers)


def _num_squares(stddev: float | Fraction) -> Fraction:
    """The sum of squared multipliers that makes `stddev` the effective stddev."""
    return (Fraction(stddev) ** 2 + _LATTICE_VARIANCE) / BASE_VARIANCE


def _nested(
    squares: Fraction | int,
    num_draws: int,
    choose: Callable[[Fraction | int], tuple[int, ...]],
) -> tuple[int, ...]:
    """Multipliers of at most `num_draws` draws; `choose` gives those of two draws."""
    while num_draws > 2 and squares <= _LARGEST_SQUARES[num_draws - 1]:
        num_draws -= 1
    if num_draws == 2:
        return choose(squares)
    # The smallest k with which the draws within can be wide enough.
    k = math.isqrt((math.ceil(squares) - 2) // _LARGEST_SQUARES[num_draws - 1]) + 1
    k = min(k, _LARGEST_OUTERMOST if num_draws == 4 else _LARGEST_MULTIPLIER)
    inner = _nested(Fraction(squares - 1) / k**2, num_draws - 1, choose)
    return (*(k * m for m in inner), 1)


def _above(squares: Fraction | int) -> tuple[int, ...]:
    """The multipliers (1,) or (a, b) with the least sum of squares >= `squares`."""
    return _sums()[bisect.bisect_left(_sums(), (squares,))][1]


def _below(squares: Fraction | int) -> tuple[int, ...]:
    """The multipliers with the greatest sum of squares <= `squares`, or (1,)."""
    number = bisect.bisect_left(_sums(), (math.floor(squares) + 1,))
    return _sums()[max(number, 1) - 1][1]


@functools.cache
def _sums() -> list[tuple[int, tuple[int, ...]]]:
    """The sums of squares for one or two draws, with their multipliers, in order."""
    up_to = range(1, _LARGEST_MULTIPLIER + 1)
    pairs = [(a, b) for a in up_to for b in range(1, a + 1) if math.gcd(a, b) == 1]
    limit = _LARGEST_SQUARES[2]
    return sorted((_squares(x), x) for x in [(1,), *pairs] if _squares(x) <= limit)
