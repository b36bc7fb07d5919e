"""Clipped sums of gradients that are never formed, with a sensitivity that is proved.

A gradient engine that keeps left and right factors of gradients cannot round and check
a contribution as `_grid.py` does. But it can bound what rounding does to it, and clip
by the bound. Let example i have, for one parameter, the gradient

    G_i = sum over positions t of  l_it (x) r_it,     A_i = sum over t of |l_it| |r_it|

of numbers that are in memory, and so exact. (A gradient that was formed and is kept for
the sum is in memory itself: one position, A_i = |G_i|. Several sites of a parameter,
that are summed in the same entries, have more positions. In K independent groups, and
for several parameters, A_i^2 is the sum of their squares; so is |G_i|^2, and by
Minkowski's inequality what follows holds for them together.) Let u bound the relative
error of one float32 operation and

    gamma(h) = (1 + u)^h - 1

what h of them add up to, in any order: a computed sum of terms is the sum of terms
times (1 + theta), |theta| <= gamma(h), if no path from a term to the sum has more than
h.

1. Norms. Computed from inner products of positions, |G_i|^2 is a sum over t, s of (l_t
   . l_s)(r_t . r_s), whose terms are at most |l_t||l_s||r_t||r_s| before they are
   rounded: it is off by at most gamma(inner) A_i^2. Computed from a gradient that was
   formed, that is off by gamma(product) A_i in norm, and the sum of its squares by a
   factor 1 + gamma(total). A_i^2 itself is a sum of nonnegative terms, off by a factor
   1 + gamma(extent). So with the computed V and E

       A_i <= A = sqrt(E (1 + gamma(extent)))
       |G_i| <= N = sqrt(V (1 + gamma(total)) + gamma(inner) A^2) + gamma(product) A.

2. The coefficient is folded into one of the two factors, whose entries are rounded to
   their dtype, of relative error eta (2^-8 for bfloat16: 8 bits, half a unit in the
   last place). The product that is summed then differs from c G_i by at most c eta A_i:

       norm of the contribution, in exact arithmetic, <= c (N + eta A).

3. The sum. One contraction over m examples and all positions, in any order, errs in
   each entry by at most gamma(h) times the sum of the magnitudes of its terms, h = m T
   + (sites and the last product), so that its error has a norm of at most gamma(h)
   times the sum over examples of c_i (1 + eta) A_i. With

       c = target / max(N + eta A, (1 + eta) A / kappa)

   every summand is at most kappa * target, and two microbatches one of which lacks an
   example (its slot is empty: nothing else moves) differ by at most

       target (1 + gamma(h) (2 m - 1) kappa)  =  target (1 + SLACK),

   for kappa is chosen so. Examples with A > kappa N are scaled down more than their
   norm asks for.

4. Each microbatch's sum is rounded to a grid, which moves two of them apart by at most
   a unit in each entry, sqrt(D) units in all, and these integers are added without any
   rounding. Microbatches that do not have the example are the same, bit for bit. With

       target = (l2_clip_norm - sqrt(D) units) / (1 + SLACK)

   the sum changes by at most `l2_clip_norm`.

Underflow. Products below 2^-126 may be flushed to zero. `_SMALLEST_NORMAL` for each of
the terms is added to V, and `FLOOR` for each entry to |l_t|^2 and |r_t|^2, which makes
gamma(inner) A^2 larger than what inner products can lose. Bounds above 2^60 give the
coefficient zero, so that no smaller one underflows. What the sum can lose (m T 2^-126
in an entry) is below a thousandth of a unit of the grid.

Conditions. What is in memory for an example depends on that example alone, in its
place; a sum of the same numbers is the same whenever it is computed (on GPUs, those of
embeddings are if XLA is told so: `--xla_gpu_deterministic_ops`); examples keep their
places (REPLACE_SPECIAL and REPLACE_ONE, not ADD_OR_REMOVE_ONE).

Devices. Where a compiler divides a contraction over devices, their parts are added as
one more step of the same sum, in whatever order: h counts these additions as well, as
there are at most m T terms. Under `shard_map` each device has microbatches of its own,
of which one changes; `psum` adds integers.

References:
  Higham: Accuracy and stability of numerical algorithms, 2002, chapters 3 and 4.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.numerics._float_sums import UNIT_ROUNDOFF
from dpmp.numerics._grid import LARGEST_RESOLUTION, Grid

# The share of the clip norm that is set aside for the rounding of sums.
SLACK = 2.0**-6

# Added for each entry to squared norms of factors.
FLOOR = 2.0**-100

_SMALLEST_NORMAL = 2.0**-126
_LARGEST_BOUND = 2.0**60

# For roundings of what is computed here.
_SPARE_ROUNDINGS = 16


class Roundings(NamedTuple):
    """How many roundings there are on the longest path, by what they are relative to.

    Attributes:
      inner: of a squared norm from inner products, relative to A^2.
      product: of a gradient that is formed, relative to A.
      total: of a sum of squares, relative to itself.
      extent: of A^2, relative to itself.
      positions: what one example adds to the sum: positions of all sites.
    """

    inner: int = 0
    product: int = 0
    total: int = 0
    extent: int = 0
    positions: int = 1

    def after(self, additions: int) -> "Roundings":
        """With that many more, of the parts of all parameters to a total."""
        return self._replace(
            inner=self.inner + additions,
            total=self.total + additions,
            extent=self.extent + additions,
        )

    def at_least(self, other: "Roundings") -> "Roundings":
        """As many as in either of the two."""
        return Roundings(*map(max, self, other))


def clip_by(
    squared_norm: jax.Array,
    extent: jax.Array,
    roundings: Roundings,
    *,
    num_terms: int,
    folding_error: float,
) -> jax.Array:
    """What the target norm is divided by for a coefficient that holds: (B,).

    Args:
      squared_norm: V of a microbatch of B examples, (B,).
      extent: E, (B,).
      roundings: of these and of the sum.
      num_terms: how many products V and E are made of.
      folding_error: eta.

    Raises:
      ValueError: for a microbatch so large that hardly a gradient would be left whole.
    """
    size = squared_norm.shape[0]
    kappa = largest_extent(size, roundings)
    _validate.require(
        kappa >= 1,
        f'"bounded" sums of {roundings.positions} positions for each example need '
        f"small microbatches",
        microbatch_size=size,
        fix=f"Leave it out, use microbatch_size="
        f"{largest_microbatch(roundings.positions)} or less, shorter examples, or "
        'sums that are not proved: "unproved_float32".',
    )
    lost = num_terms * _SMALLEST_NORMAL
    a_squared = extent * (1 + _gamma(roundings.extent + _SPARE_ROUNDINGS)) + lost
    a = jnp.sqrt(a_squared)
    v = jnp.maximum(squared_norm, 0) * (1 + _gamma(roundings.total))
    norm = jnp.sqrt(v + _gamma(roundings.inner) * a_squared + lost)
    norm += (_gamma(roundings.product) + folding_error) * a
    bound = jnp.maximum(norm, (1 + folding_error) / kappa * a)
    bound *= 1 + _gamma(_SPARE_ROUNDINGS)
    return jnp.where(bound <= _LARGEST_BOUND, bound, jnp.inf)


def largest_extent(microbatch_size: int, roundings: Roundings) -> float:
    """Kappa: the largest A, in units of the target norm."""
    chain = _gamma(microbatch_size * roundings.positions + _SPARE_ROUNDINGS)
    return SLACK / (chain * (2 * microbatch_size - 1))


def largest_microbatch(positions: int) -> int:
    """A power of two, of examples with that many positions, that are hardly cut.

    The gradients of trained transformers have an extent of 5 to 7 norms.
    """
    size = 1
    while largest_extent(2 * size, Roundings(positions=positions)) >= 8:
        size *= 2
    return size


def _gamma(num_roundings: int) -> float:
    """What roundings add up to; none cost nothing."""
    # Matrix units of accelerators may truncate, at twice the error.
    u = UNIT_ROUNDOFF * (1 if jax.default_backend() == "cpu" else 2)
    return math.expm1(num_roundings * math.log1p(u))


@dataclasses.dataclass(frozen=True)
class BoundedSums:
    """The arithmetic of bounded sums; an `Arithmetic`.

    Microbatches are summed in floats, rounded to a grid, and added up in integers.

    Attributes:
      resolution: how many units of the grid the largest contribution has.
      grid: that of the sum, once the clip norms are known.
    """

    resolution: int = LARGEST_RESOLUTION
    grid: Grid = Grid.UNKNOWN

    name: str = dataclasses.field(default="bounded", init=False)
    bytes_per_entry: int = dataclasses.field(default=4, init=False)
    is_proved: bool = dataclasses.field(default=True, init=False)
    needs_clipping: bool = dataclasses.field(default=True, init=False)
    clips_by_bounds: bool = dataclasses.field(default=True, init=False)
    assumption: str = dataclasses.field(
        default="It is assumed that other examples keep their places in the batch, and "
        "that the device adds in the same order every time.",
        init=False,
    )

    def check_method(self, method: str) -> None:
        """See `Arithmetic`."""
        _validate.require(
            method == "book_keeping",
            '"bounded" sums are for gradients that are never formed',
            method=method,
            arithmetic=self.name,
            fix='Use "exact", or method="book_keeping".',
        )

    def for_clip_norms(
        self, bounds: Sequence[float], l2_norm_bound: float
    ) -> "BoundedSums":
        """See `Arithmetic`."""
        grid = Grid.from_bounds(bounds, l2_norm_bound, self.resolution)
        return dataclasses.replace(self, grid=grid)

    def check_batch(self, batch_size: int, microbatch_size: int) -> None:
        """Warns of sums that can wrap around."""
        del microbatch_size
        self.grid.warn_of_overflow(batch_size)

    def check_mode(self) -> None:
        """No 64-bit mode is needed."""

    def check_not_mapped(self) -> None:
        """Integers may be added over devices."""

    def targets(
        self, targets: list[tuple[float, Any]], num_entries: list[int]
    ) -> list[tuple[float, Any]]:
        """The norms to clip to, and the largest coefficients, in units."""
        scaled = []
        for (bound, cap), radius, size in zip(
            targets, self.grid.radii, num_entries, strict=True
        ):
            room = (1 + 2.0**-10) * math.sqrt(size)
            self.grid.check_loss(radius - room, radius, size, bound)
            largest = max(radius - room, 0) / (1 + SLACK)
            scaled.append((largest, self.grid.in_units(cap)))
        return scaled

    def lift(self, total: jax.Array) -> jax.Array:
        """The sum of a microbatch, in units, rounded to integers."""
        return _to_integers(total)

    def add(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The sum of two parts of a batch."""
        return a + b

    def finish(self, total: PyTree) -> PyTree:
        """A tree of sums, with the unit that they are counted in."""
        return self.grid.finish(total)

    def wanted_resolution(self, num_parameters: int) -> float:
        """See `Arithmetic`."""
        return 400 * math.sqrt(num_parameters)

    def share_lost(self, num_parameters: int, resolution: int) -> float:
        """See `Arithmetic`; what `targets` takes."""
        return math.sqrt(num_parameters) / resolution

    def describe(self, resolution: int | None, microbatch_size: int | None) -> str:
        """See `Arithmetic`."""
        examples = "as many examples as that allows, chosen from shapes alone"
        if microbatch_size is not None:
            examples = f"{microbatch_size} examples"
        return (
            f"gradients are never formed; they are clipped by bounds on their norms "
            f"that include rounding, in microbatches whose sums may err by {SLACK:.2%} "
            f"of the clip norm, which is lowered by that (of {examples}). The sums are "
            f"rounded to a grid on which the largest contribution has {resolution} "
            f"units, and added up in integers."
        )


@jax.jit  # a program has it once for all arrays of one shape
def _to_integers(x: jax.Array) -> jax.Array:
    limit = 2.0**31 - 128  # the largest float32 below 2^31
    return jnp.round(jnp.clip(x, -limit, limit)).astype(jnp.int32)
