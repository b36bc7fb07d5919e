"""Computes what the steps of a mechanism cost in privacy, and how much noise to add."""

from dataclasses import dataclass

import dp_accounting

from dpmp import _validate, accounting
from dpmp._numbers import as_number
from dpmp.mechanism import _sampler_share

_Relation = dp_accounting.NeighboringRelation


def larger_sizes(num_examples: int, relation: _Relation) -> tuple[int, ...]:
    """The sizes that the larger of two neighbouring datasets may have."""
    if relation is _Relation.ADD_OR_REMOVE_ONE:
        return num_examples, num_examples + 1
    return (num_examples,)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """All facts that the privacy cost of a run depends on, besides the noise.

    Attributes:
      num_examples: the size of the dataset.
      sampling_prob: the probability that an example is drawn.
      iterations: the number of steps.
      largest_batch: the size to which larger batches are truncated.
      is_clipped: whether the clip norm is finite.
      num_coordinates: an upper bound on the number of entries that receive noise in a
        step.
      neighboring_relation: which two datasets are neighbours.
    """

    num_examples: int
    sampling_prob: float
    iterations: int
    largest_batch: int
    is_clipped: bool
    num_coordinates: int
    neighboring_relation: _Relation

    @property
    def _larger_sizes(self) -> tuple[int, ...]:
        return larger_sizes(self.num_examples, self.neighboring_relation)

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
        num_examples = num_examples or max(self._larger_sizes)
        if not self.is_clipped:
            return dp_accounting.NonPrivateDpEvent()
        if self.largest_batch >= num_examples:
            return accounting.dpsgd_event(
                noise_multiplier, steps, sampling_prob=self.sampling_prob
            )
        return accounting.truncated_dpsgd_event(
            noise_multiplier,
            steps,
            sampling_prob=self.sampling_prob,
            num_examples=num_examples,
            truncated_batch_size=self.largest_batch,
        )

    def calibrate(self, *, epsilon: float, delta: float) -> float:
        """The least noise multiplier for which all steps satisfy (epsilon, delta)."""
        return max(
            _sampler_share.calibrate_noise_multiplier(
                lambda x, size=size: self.event(x, self.iterations, size),
                epsilon=epsilon,
                delta=delta,
                num_entries=self.iterations * self.num_coordinates,
                neighboring_relation=self.neighboring_relation,
            )
            for size in self._larger_sizes
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
                neighboring_relation=self.neighboring_relation,
            )
            for size in self._larger_sizes
        ]
        return max(guarantees, key=lambda guarantee: guarantee.epsilon)
