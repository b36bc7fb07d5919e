"""Computes what a run of a mechanism costs in privacy, and how much noise to add."""

import dataclasses

from dpmp import _validate, accounting
from dpmp._numbers import as_number
from dpmp.mechanism._batches import Batches
from dpmp.mechanism._step_costs import SHARE, StepCost, guarantee_of, largest_epsilon


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """All facts that the privacy cost of a run depends on, besides the noise."""

    batches: Batches
    iterations: int
    is_clipped: bool  # whether the clip norm is finite
    num_coordinates: int  # at most so many entries receive noise in a step

    def of_step(self, noise_multiplier: float) -> StepCost:
        """The cost of one step with this noise."""
        return StepCost(
            sampling_prob=float(self.batches.sampling_prob),
            num_examples=self.batches.num_examples,
            truncated_batch_size=self.batches.largest,
            noise_multiplier=noise_multiplier,
            is_clipped=self.is_clipped,
            num_coordinates=self.num_coordinates,
            neighboring_relation=self.batches.neighboring_relation,
        )

    def calibrate(self, *, epsilon: float, delta: float) -> float:
        """The least noise multiplier for which all steps satisfy (epsilon, delta)."""
        epsilon = _validate.positive(epsilon=epsilon, fix="Use 8, for example.")
        delta = accounting.check_delta(delta)
        largest = largest_epsilon({self.of_step(0.0): self.iterations}, delta)
        _validate.require(
            largest > 0,
            "delta must cover how far the sampler of the noise is from ideal noise",
            delta=delta,
            fix="Use a larger delta, fewer iterations, or a num_parameters closer to "
            "the number of trained parameters.",
        )
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
                lambda x, size=size: self.of_step(x).event(self.iterations, size),
                epsilon=epsilon,
                delta=delta * (1 - SHARE),
                neighboring_relation=self.batches.neighboring_relation,
            )
            for size in self.of_step(0.0).larger_datasets
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
        delta = accounting.required_delta(delta)
        return guarantee_of({self.of_step(noise_multiplier): steps}, delta=delta)
