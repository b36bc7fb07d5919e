"""Clipped sums in book-keeping, with a proved sensitivity.

Book-keeping caches factors of gradients, not gradients. So it cannot round and check
each contribution (the clipped gradient of one example), as `_exact.py` does. Instead,
it computes an upper bound on each norm that includes all rounding errors, and clips by
this bound.

Notation. For one parameter, the gradient of example i and its sum of magnitudes A_i are

    G_i = sum over positions t of  l_it (x) r_it,     A_i = sum over t of |l_it| |r_it|.

The factors l_it and r_it are in memory, so they are exact numbers. Let u be an upper
bound on the relative error of one float32 operation, and let

    gamma(h) = (1 + u)^h - 1.

This is the relative error that h operations can add up to, in any order: in a computed
sum, each summand is multiplied by a factor 1 + theta with |theta| <= gamma(h), if no
path from a summand to the sum has more than h operations.

These cases are covered too:

- A gradient that is stored (materialized once for the sum) is in memory itself. It
  is one position, with A_i = |G_i|.
- Several uses of a parameter may add to the same entries. Their positions are counted
  together.
- For K independent groups, or for several parameters, A_i^2 is the sum of the squares
  of their A_i, and |G_i|^2 is the sum of their squared norms. By Minkowski's
  inequality, all that follows holds for them together.

1. Norms. There are two ways to compute |G_i|^2. The first takes inner products of
   positions: |G_i|^2 is a sum over t, s of (l_t . l_s)(r_t . r_s). Before rounding, the
   magnitudes of the products in one of these summands add up to at most
   |l_t||l_s||r_t||r_s|, and over all t, s to at most A_i^2. So the sum is off by at
   most gamma(inner) A_i^2. The second way materializes the gradient, which is off by at
   most gamma(product) A_i in norm. The sum of its squares is off by at most a factor
   1 + gamma(total). A_i^2 itself is a sum of nonnegative summands, and is off by at
   most a factor 1 + gamma(magnitude). Let V be the computed |G_i|^2, and E the computed
   A_i^2. Then

       A_i <= A = sqrt(E (1 + gamma(magnitude)))
       |G_i| <= N = sqrt(V (1 + gamma(total)) + gamma(inner) A^2) + gamma(product) A.

2. The coefficient c. It is multiplied into one of the two factors, and the entries of
   the result are rounded to their dtype, with a relative error of at most eta. For
   bfloat16, eta is 2^-8: 8 bits, half a unit in the last place. The outer products that
   are summed then differ from c G_i by at most c eta A_i, so

       norm of the contribution, in exact arithmetic, <= c (N + eta A).

3. The sum of a group. The examples of a microbatch are divided into groups of m slots,
   the same for all parameters. The sum of a group is one contraction over its m
   examples and all positions, in any order. Each entry is off by at most gamma(h)
   times the sum of the magnitudes of its summands, where h = m T + (uses and the last
   product). So the error has a norm of at most gamma(h) times the sum over examples of
   c_i (1 + eta) A_i. The coefficient is chosen as

       c = target / max(N + eta A, (1 + eta) A / kappa).

   Then each c_i (1 + eta) A_i is at most kappa * target. Consider two groups, one of
   which lacks an example: its slot is empty, and nothing else moves. Their errors
   have m and m - 1 such summands, so the two sums differ by at most

       target (1 + gamma(h) (2 m - 1) kappa)  =  target (1 + ROUNDING_RESERVE).

   The last equation defines kappa. An example with A > kappa N is scaled down more than
   its norm requires.

4. The sum of a batch. The sum of each group, over all uses of a parameter, is rounded
   to a grid. This moves two sums further apart by at most one unit in each of D
   entries, so by at most sqrt(D) units in norm. The resulting integers are added
   without any rounding. Groups without the example are the same in both batches, bit
   for bit. With

       target = (l2_clip_norm - sqrt(D) units) / (1 + ROUNDING_RESERVE)

   the sum changes by at most `l2_clip_norm`.

Matrix units. Those of GPUs add k >= 2 products to a float32 number in one step: they
align all k + 1 terms to the largest of their exponents, cut off (towards zero) the bits
that are smaller than 2^-23 times that power of two, and cut the sum off to float32. So
u is 2^-23 there: in a sum of n products, the error is at most n u S, where S is the sum
of magnitudes. To see this, let 2^e be the power of two. All partial sums are at most S,
because magnitudes only shrink. The largest term loses nothing, so that the terms lose
less than k u 2^e <= k u S. If the sum is below 2^(e + 1), it needs no other cut.
Otherwise S >= 2^(e + 1), so that the terms lose less than (k / 2) u S, and the cut of
the sum less than u S: together at most k u S. If the last step has one product only, it
may lose u S / 2 more; the first step, which adds to zero, loses so much less. Units
that keep more bits have less error.

Underflow. Products below 2^-126 may be flushed to zero. So `_SMALLEST_NORMAL` for each
product is added to V and to A^2. `FLOOR` for each entry is added to |l_t|^2 and
|r_t|^2, which makes gamma(inner) A^2 larger than the loss in inner products. If the
denominator of c exceeds 2^60, the coefficient is zero, so that no coefficient
underflows. The sum can lose m T 2^-126 in an entry, which is below a thousandth of a
unit of the grid. `BoundedSums.max_norm_before_rounding` covers this loss.

Conditions. The factors in memory for an example, and its coefficient, depend on that
example alone, in its place. A sum of the same numbers is the same whenever it is
computed. (On GPUs, this holds for the sums of embeddings if XLA is run with
`--xla_gpu_deterministic_ops`.)
Examples keep their places, which REPLACE_SPECIAL and REPLACE_ONE grant, but
ADD_OR_REMOVE_ONE does not.

Devices. A compiler may divide a contraction over devices and then add the parts, in any
order. These additions are more operations of the same sum. They are counted in h: no
path has more additions than the sum has summands, and these are at most m T. Under
`shard_map` each device has microbatches of its own, and only one of them changes;
`psum` adds integers.

References:
  Higham: Accuracy and stability of numerical algorithms, 2002, chapters 3 and 4.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp.numerics._float_sums import UNIT_ROUNDOFF
from dpmp.numerics._grid import LARGEST_RESOLUTION, GridSums
from dpmp.numerics._interface import PartialSums

# The share of the clip norm that is reserved for the rounding of sums.
ROUNDING_RESERVE = 2.0**-6

# Added to the squared norms of factors, once for each entry.
FLOOR = 2.0**-100

_SMALLEST_NORMAL = 2.0**-126
_LARGEST_BOUND = 2.0**60

# Covers the roundings of the computations in this file.
_SPARE_ROUNDINGS = 16


class Roundings(NamedTuple):
    """The largest numbers of roundings on any path, by the size they are relative to.

    Attributes:
      inner: roundings of a squared norm from inner products, relative to A^2.
      product: roundings of a gradient that is materialized, relative to A.
      total: roundings of a sum of squares, relative to that sum.
      magnitude: roundings of A^2, relative to A^2.
      positions: the number of positions of one example, over all uses.
    """

    inner: int = 0
    product: int = 0
    total: int = 0
    magnitude: int = 0
    positions: int = 1

    def after(self, additions: int) -> "Roundings":
        """Adds the roundings of `additions`, which sum the parts of all parameters."""
        return self._replace(
            inner=self.inner + additions,
            total=self.total + additions,
            magnitude=self.magnitude + additions,
        )

    def at_least(self, other: "Roundings") -> "Roundings":
        """Returns the larger count of the two, for each attribute."""
        return Roundings(*map(max, self, other))


def norm_bound_for_clipping(
    squared_norm: jax.Array,
    magnitude: jax.Array,
    roundings: Roundings,
    *,
    group_size: int,
    num_terms: int,
    folding_error: float,
) -> jax.Array:
    """Returns the divisor of the target norm that gives the coefficient: (B,).

    The arguments are V, E, their counts of roundings, m, the number of products that V
    and E are sums of, and eta. Raises ValueError for examples so long that almost every
    gradient would be scaled down more than its norm requires.
    """
    kappa = largest_condition_number(group_size, roundings)
    if not kappa >= 1:
        _validate.fail(
            '"bounded" sums need examples of fewer positions. Use shorter examples, '
            'method="per_example", or sums without a proof: '
            'arithmetic="unproved_float32".',
            positions=roundings.positions,
        )
    lost = num_terms * _SMALLEST_NORMAL
    a_squared = magnitude * (1 + _gamma(roundings.magnitude + _SPARE_ROUNDINGS)) + lost
    a = jnp.sqrt(a_squared)
    v = jnp.maximum(squared_norm, 0) * (1 + _gamma(roundings.total))
    norm = jnp.sqrt(v + _gamma(roundings.inner) * a_squared + lost)
    norm += (_gamma(roundings.product) + folding_error) * a
    bound = jnp.maximum(norm, (1 + folding_error) / kappa * a)
    bound *= 1 + _gamma(_SPARE_ROUNDINGS)
    return jnp.where(bound <= _LARGEST_BOUND, bound, jnp.inf)


def largest_condition_number(group_size: int, roundings: Roundings) -> float:
    """Returns kappa: if A > kappa N, a gradient is scaled down more than N requires."""
    chain = _gamma(group_size * roundings.positions + _SPARE_ROUNDINGS)
    return ROUNDING_RESERVE / (chain * (2 * group_size - 1))


def group_size(microbatch_size: int, positions: int) -> int:
    """Returns the largest divisor of a microbatch's size with kappa >= 8, or 1.

    In the gradients of trained transformers, A is 5 to 7 times the norm.
    """
    roundings = Roundings(positions=positions)
    divisors = (m for m in range(1, microbatch_size + 1) if microbatch_size % m == 0)
    return max(
        (m for m in divisors if largest_condition_number(m, roundings) >= 8), default=1
    )


def _gamma(num_roundings: int) -> float:
    """The relative error that roundings add up to; zero for no roundings."""
    return math.expm1(num_roundings * math.log1p(_unit_roundoff()))


def _unit_roundoff() -> float:
    return UNIT_ROUNDOFF * (1 if jax.default_backend() == "cpu" else 2)


@dataclasses.dataclass(frozen=True)
class BoundedSums(GridSums, PartialSums):
    """The "bounded" arithmetic of `clipped_grad`, with a resolution to choose.

    Attributes:
      resolution: how many units of the grid the largest contribution has, up to 2^24.
    """

    resolution: int = LARGEST_RESOLUTION

    largest_resolution = 2**24  # integers up to this one are exact in float32
    name = "bounded"
    method = "book_keeping"
    rounding_reserve = ROUNDING_RESERVE
    needs_norm_bounds = True
    assumption = (
        "The other examples keep their places, and the device adds in the same order "
        "every time."
    )

    def max_norm_before_rounding(self, max_norm: int, size: int) -> float:
        return max_norm - (1 + 2.0**-10) * math.sqrt(size)

    def from_float(self, total: jax.Array) -> jax.Array:
        return _to_integers(total)

    def wanted_resolution(self, num_parameters: int) -> float:
        return 400 * math.sqrt(num_parameters)

    def rounding_share(self, num_parameters: int, resolution: int) -> float:
        # To first order, `max_norm_before_rounding` takes this share.
        return math.sqrt(num_parameters) / resolution

    def describe(self, resolution: int | None, microbatch_size: int | None) -> str:
        size = "The microbatch size follows from the shapes."
        if microbatch_size is not None:
            size = f"A microbatch has {microbatch_size} examples."
        return (
            f"most per-example gradients are never materialized; they are clipped by "
            f"bounds on their norms that include rounding. The clip norm is reduced by "
            f"{ROUNDING_RESERVE:.2%} to cover the rounding of the sum of each group of "
            f"examples. {size} The sums are rounded to a grid on which the largest "
            f"contribution has {resolution} units, and added up in integers."
        )


@jax.jit  # a program has one copy for all arrays of one shape
def _to_integers(x: jax.Array) -> jax.Array:
    limit = jnp.asarray(2.0**31 - 128, x.dtype)  # the largest float32 below 2^31
    return jnp.round(jax.lax.clamp(-limit, x, limit)).astype(jnp.int32)
