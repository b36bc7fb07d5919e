"""Computes what the steps of a mechanism cost in privacy, and how much noise to add.

A small share of delta is charged for the samplers. Each entry of the noise deviates
slightly from an ideal discrete Gaussian (`noise_addition/_discrete_gaussian.py`), and
each batch from independent inclusion (`batch_selection/_binomial.py`). Let t be the sum
of the total variation distances of all entries and batches. The probability of any
outcome changes by at most t, for both of two neighbouring datasets. In
P <= exp(epsilon) P' + delta, this costs t on the left and exp(epsilon) t on the right:
(1 + exp(epsilon)) t of delta. If the share does not cover this, no finite epsilon is
claimed.
"""

import dataclasses
import functools
import math

import dp_accounting

from dpmp import _validate, accounting
from dpmp._numbers import as_number
from dpmp.batch_selection import _binomial
from dpmp.mechanism._batches import Batches
from dpmp.noise_addition import _discrete_gaussian

_SHARE = 1e-4  # of delta, for the samplers

# Reports and statements ask for the same epsilons again and again.
_get_epsilon = functools.lru_cache(maxsize=1024)(accounting.get_epsilon)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """All facts that the privacy cost of a run depends on, besides the noise."""

    batches: Batches
    iterations: int
    is_clipped: bool  # whether the clip norm is finite
    num_coordinates: int  # at most so many entries receive noise in a step

    def event(
        self, noise_multiplier: float, steps: int, num_examples: int | None = None
    ) -> dp_accounting.DpEvent:
        """Steps as an event; `num_examples` is the size of the larger dataset."""
        num_examples = num_examples or max(self.batches.larger_datasets)
        sampling_prob = self.batches.sampling_prob
        if not self.is_clipped:
            return dp_accounting.NonPrivateDpEvent()
        if self.batches.largest >= num_examples:
            return accounting.dpsgd_event(
                noise_multiplier, steps, sampling_prob=sampling_prob
            )
        return accounting.truncated_dpsgd_event(
            noise_multiplier,
            steps,
            sampling_prob=sampling_prob,
            num_examples=num_examples,
            truncated_batch_size=self.batches.largest,
        )

    def calibrate(self, *, epsilon: float, delta: float) -> float:
        """The least noise multiplier for which all steps satisfy (epsilon, delta)."""
        epsilon = _validate.positive(epsilon=epsilon, fix="Use 8, for example.")
        delta = accounting.check_delta(delta)
        largest = self._largest_epsilon(delta, self.iterations)
        _validate.require(
            epsilon <= largest,
            f"epsilon must be at most {largest:.4g}: above that, the sampler of the "
            f"noise limits epsilon, and not the width of the noise",
            epsilon=epsilon,
            fix="Use a smaller epsilon, since such a large one protects hardly "
            "anything. Or use without_privacy(), which claims no epsilon.",
        )
        return max(
            accounting.calibrate_noise_multiplier(
                lambda x, size=size: self.event(x, self.iterations, size),
                epsilon=epsilon,
                delta=delta * (1 - _SHARE),
                neighboring_relation=self.batches.neighboring_relation,
            )
            for size in self.batches.larger_datasets
        )

    def guarantee(
        self, noise_multiplier: float, step: int | None, *, delta: float | None
    ) -> accounting.PrivacyGuarantee:
        """Computes epsilon after `step` steps; None is for all of them."""
        steps = self.iterations if step is None else as_number(step)
        _validate.require(
            _validate.is_integer(steps) and 0 <= steps <= self.iterations,
            f"step must be from 0 to iterations = {self.iterations}",
            step=step,
            fix="Use one of these, or plan more iterations before the run starts.",
        )
        if delta is None:
            _validate.fail(
                "epsilon must be computed for a given delta",
                delta=None,
                fix="Pass delta=, well below 1 / num_examples.",
            )
        delta = accounting.check_delta(delta)
        guarantees = [
            _get_epsilon(
                self.event(noise_multiplier, steps, size),
                delta=delta * (1 - _SHARE),
                neighboring_relation=self.batches.neighboring_relation,
            )
            for size in self.batches.larger_datasets
        ]
        worst = max(guarantees, key=lambda guarantee: guarantee.epsilon)
        is_covered = worst.epsilon <= self._largest_epsilon(delta, max(steps, 1))
        epsilon = worst.epsilon if is_covered else math.inf
        return dataclasses.replace(worst, epsilon=epsilon, delta=delta)

    def _largest_epsilon(self, delta: float, steps: int) -> float:
        """The largest epsilon for which the share covers the samplers' deviation."""
        noise = self.num_coordinates * _discrete_gaussian.LARGEST_TOTAL_VARIATION
        deviation = steps * (noise + _binomial.LARGEST_TOTAL_VARIATION)
        share = _SHARE * delta / deviation
        return math.log(share - 1) if share > 1 else -math.inf
