"""Computes what the steps of a mechanism cost in privacy, and how much noise to add."""

from dataclasses import dataclass

import dp_accounting

from dpmp import _validate, accounting
from dpmp._numbers import as_number
from dpmp.mechanism import _sampler_share
from dpmp.mechanism._batches import Batches


@dataclass(frozen=True, kw_only=True)
class Costs:
    """All facts that the privacy cost of a run depends on, besides the noise.

    Attributes:
      batches: the sampling of batches, and the neighbouring relation.
      iterations: the number of steps.
      is_clipped: whether the clip norm is finite.
      num_coordinates: an upper bound on the number of entries that receive noise in a
        step.
    """

    batches: Batches
    iterations: int
    is_clipped: bool
    num_coordinates: int

    def event(
        self, noise_multiplier: float, steps: int, num_examples: int | None = None
    ) -> dp_accounting.DpEvent:
        """Describes a number of steps as an event for an accountant.

        Args:
          noise_multiplier: the noise multiplier of every step.
          steps: the number of steps.
          num_examples: the size of the larger of two neighbouring datasets; None for
            the largest possible size.
        """
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
        return max(
            _sampler_share.calibrate_noise_multiplier(
                lambda x, size=size: self.event(x, self.iterations, size),
                epsilon=epsilon,
                delta=delta,
                num_entries=self.iterations * self.num_coordinates,
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
        guarantees = [
            _sampler_share.get_epsilon(
                self.event(noise_multiplier, steps, size),
                delta=accounting.check_delta(delta),
                num_entries=max(steps, 1) * self.num_coordinates,
                neighboring_relation=self.batches.neighboring_relation,
            )
            for size in self.batches.larger_datasets
        ]
        return max(guarantees, key=lambda guarantee: guarantee.epsilon)
