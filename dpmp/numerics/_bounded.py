"""Clipped sums in book-keeping, with a proved sensitivity.

docs/proofs.md has the proof ("Bounded sums") and its conditions. Book-keeping caches
factors of gradients, not gradients. So it cannot round and check each contribution, as
`_exact.py` does. Instead, it computes an upper bound on each norm that includes all
rounding errors, and clips by this bound. For one parameter, the gradient of an example
and its sum of magnitudes are

    G = sum over positions t of  l_t (x) r_t,     A = sum over t of |l_t| |r_t|.

Let u be an upper bound on the relative error of one float32 operation, and gamma(h) =
(1 + u)^h - 1 that of h operations. V is the computed |G|^2, and E the computed A^2. The
words in brackets are fields of `Roundings`; eta is the error of rounding the factor
that is multiplied by the coefficient. For groups of m slots, the coefficient is

    target / max(N + eta A, (1 + eta) A / kappa),
    A = sqrt(E (1 + gamma(magnitude)))
    N = sqrt(V (1 + gamma(total)) + gamma(inner) A^2) + gamma(product) A
    1 + gamma(m T + ...) (2 m - 1) kappa = 1 + ROUNDING_RESERVE

with T positions. The sum of each group is rounded to a grid, which takes at most
sqrt(D) units of the clip norm for D entries, and the integers are added.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp.numerics._grid import LARGEST_RESOLUTION, GridSums
from dpmp.numerics._interface import PartialSums
from dpmp.numerics.reduction import SMALLEST_NORMAL, UNIT_ROUNDOFF

# The share of the clip norm that is reserved for the rounding of sums.
ROUNDING_RESERVE = 2.0**-6

# Added to the squared norms of factors, once for each entry.
FLOOR = 2.0**-100

_LARGEST_BOUND = 2.0**60

# Covers the roundings of the computations in this file.
_SPARE_ROUNDINGS = 16


class Roundings(NamedTuple):
    """The largest numbers of roundings on any path, by what they are relative to."""

    inner: int = 0  # of a squared norm from inner products, relative to A^2
    product: int = 0  # of a gradient that is materialized, relative to A
    total: int = 0  # of a sum of squares, relative to that sum
    magnitude: int = 0  # of A^2, relative to A^2
    positions: int = 1  # of one example, over all uses

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
    lost = num_terms * SMALLEST_NORMAL
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
    """Returns the largest divisor of a microbatch's size with kappa >= 8, or 1."""
    # In the gradients of trained transformers, A is 5 to 7 times the norm.
    roundings = Roundings(positions=positions)
    divisors = (m for m in range(1, microbatch_size + 1) if microbatch_size % m == 0)
    return max(
        (m for m in divisors if largest_condition_number(m, roundings) >= 8), default=1
    )


def _gamma(num_roundings: int) -> float:
    """The relative error that roundings add up to; zero for no roundings."""
    return math.expm1(num_roundings * math.log1p(_unit_roundoff()))


def _unit_roundoff() -> float:
    # Matrix units of GPUs cut off bits in place of rounding.
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
        # The factor covers products that are flushed to zero.
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
