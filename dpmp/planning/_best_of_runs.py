"""Private selection: what it costs to publish only the best of several runs.

The proof is in docs/proofs.md, "The best of a random number of runs".
"""

import dataclasses
import math
import secrets
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar

from scipy import optimize

from dpmp import _validate, accounting
from dpmp.mechanism import DPSGD

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestOfRuns:
    """A search among settings that publishes one of its runs, the best one.

    All published runs on the same people add up. But if the number of runs is random
    and secret, and only the best run is published, then this costs little more than one
    run. Every run draws its settings at random from the same candidates.

    >>> search = BestOfRuns(
    ...     mechanism=DPSGD(
    ...         num_examples=6000,
    ...         expected_batch_size=60,
    ...         iterations=500,
    ...         l2_clip_norm=1.0,
    ...         noise_multiplier=1.0,
    ...         delta=1e-6,
    ...     ),
    ...     expected_runs=5,
    ... )
    >>> one_run, best_run = search.mechanism.guarantee(), search.guarantee()
    >>> print(f"{one_run.epsilon:.2f} {best_run.epsilon:.2f}")
    1.58 2.14
    >>> runs = search.draw([{"learning_rate": 0.1}, {"learning_rate": 1.0}])

    Guarantees:
      The best run, with everything that it released, is private with the epsilon and
      delta of `.guarantee()`, on these conditions:

      - Nothing else becomes known: neither the other runs nor their number, which the
        duration of the search also tells.
      - `draw` was called once, for candidates that were chosen without the data. All of
        its runs were made, and none depends on another. A run that fails has the lowest
        score.
      - Every run has the privacy cost of `mechanism`. This cost does not depend on the
        loss, the model, the optimizer and the clip norm.
      - The score that ranks runs is computed from what a run released, such as a noisy
        metric, and from public data.

      Other runs on the same people add their own epsilon and delta.

    Attributes:
      mechanism: one run; see `DPSGD`.
      expected_runs: the average number of runs, above 1. The number has a geometric
        distribution: one in `expected_runs` searches makes a single run, and one in
        twenty makes more than three times `expected_runs`.

    References:
      [Koskela et al.: Privacy profiles for private
      selection](https://arxiv.org/abs/2402.06701); [Papernot, Steinke: Hyperparameter
      tuning with Renyi differential privacy](https://arxiv.org/abs/2110.03620)
    """

    mechanism: DPSGD
    expected_runs: float

    def __post_init__(self):
        _validate.instance(DPSGD, "Use DPSGD(...).", mechanism=self.mechanism)
        expected_runs = _validate.as_real(self.expected_runs)
        if not 1 < expected_runs < math.inf:
            _validate.fail(
                "expected_runs must be above 1. Use 5, for example",
                expected_runs=self.expected_runs,
            )
        object.__setattr__(self, "expected_runs", expected_runs)

    def calibrate(self, *, epsilon: float, delta: float) -> "BestOfRuns":
        """The same search with the least noise that satisfies (epsilon, delta).

        Train with the `mechanism` of the result.

        Raises:
          ValueError: as `DPSGD.calibrate`.
        """
        one_run = self.mechanism.calibrate(epsilon=epsilon, delta=delta)

        def search(noise_multiplier: float) -> "BestOfRuns":
            mechanism = dataclasses.replace(one_run, noise_multiplier=noise_multiplier)
            return dataclasses.replace(self, mechanism=mechanism)

        noise_multiplier = accounting.least_noise_multiplier(
            lambda x: search(x).guarantee().epsilon,
            epsilon=epsilon,
            delta=delta,
            guess=one_run.step_cost.noise_multiplier,
        )
        return search(noise_multiplier)

    def guarantee(self, *, delta: float | None = None) -> accounting.PrivacyGuarantee:
        """Computes epsilon of publishing only the best run.

        Args:
          delta: the delta; None for the delta that was given to `calibrate`.

        Raises:
          ValueError: as `DPSGD.guarantee`.
        """
        delta = accounting.required_delta(
            self.mechanism.delta if delta is None else delta
        )
        of_run = self.mechanism.guarantee(delta=delta / self.expected_runs)
        epsilon = of_run.epsilon + 2 * self._epsilon_of_rank()
        return dataclasses.replace(
            of_run,
            epsilon=math.nextafter(epsilon, math.inf),
            delta=delta,
            accountant=f"{of_run.accountant}, for the best of a random number of runs",
        )

    def draw(self, candidates: Sequence[_T]) -> list[_T]:
        """Draws the settings of all runs: a secret list, of a secret random length.

        Call it once, in one process. If the program may stop before all runs are made,
        store the list with the same care as the data.

        Args:
          candidates: the settings to choose from, of any type.

        Returns:
          The settings of each run, with repetitions. They are drawn by the random
          number generator of the operating system.

        Raises:
          ValueError: if there are no candidates, or in a second call.
        """
        if not isinstance(candidates, list | tuple) or not candidates:
            _validate.fail(
                "candidates must be a list with at least one setting. Pass [1e-3, "
                "1e-2], for example.",
                candidates=candidates,
            )
        if self.mechanism.noise_multiplier is None:
            _validate.fail(
                "the mechanism must have a noise multiplier before the one draw. Use "
                "search.calibrate(epsilon=, delta=).",
                noise_multiplier=None,
            )
        if hasattr(self, "_has_drawn"):
            _validate.fail(
                "a search must draw its runs once: those of a second draw cost as "
                "much again. Use the list of the first call. For another search, "
                "whose epsilon adds up, make another BestOfRuns.",
                calls=2,
            )
        object.__setattr__(self, "_has_drawn", True)
        # Rounded up: a search that ends a little earlier costs a little less.
        end = math.ceil(2**64 / Fraction(self.expected_runs))
        runs = [secrets.choice(candidates)]
        while secrets.randbelow(2**64) >= end:
            runs.append(secrets.choice(candidates))
        return runs

    def _epsilon_of_rank(self) -> float:
        """Bounds how much more often a run is the best one on neighbouring data."""
        bounds = []  # one for every delta, so the search needs no exact end

        def difference(log_delta: float) -> float:
            delta = math.exp(log_delta)
            epsilon = min(self.mechanism.guarantee(delta=delta).epsilon, 1e6)
            needed = math.log1p((self.expected_runs - 1) * delta)
            bounds.append(max(epsilon, needed))
            return needed - epsilon

        low, high = math.log(1e-9), math.log(0.5)
        if difference(low) < 0 < difference(high):
            optimize.brentq(difference, low, high, xtol=1e-5)
        return min(bounds)
