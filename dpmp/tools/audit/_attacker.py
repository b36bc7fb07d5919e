"""The best attacker of a mechanism, by likelihood ratios, and runs as it is claimed.

All numbers are in units of one contribution, the clip norm over the batch size.
"""

import math
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
from scipy import signal, special

from dpmp.mechanism import DPSGD

_REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE


class Attacker(NamedTuple):
    """Knows the mechanism, and guesses from its noisy gradients alone.

    `noise` is the noise multiplier of the gradient, `epoch` the steps of an epoch of
    random allocation, or None, and `absent` the contribution of an example that is not
    in the data: under REPLACE_ONE, another example has its place.
    """

    iterations: int
    sampling_prob: float
    noise: float
    epoch: int | None
    coefficients: tuple[float, ...]
    absent: float

    @classmethod
    def of(cls, mechanism: DPSGD) -> "Attacker":
        """The attacker who knows a mechanism."""
        metrics, strategy = mechanism.released_metrics, mechanism.strategy
        widened = 1 + metrics.noise_increase if metrics else 1.0
        return cls(
            mechanism.iterations,
            float(mechanism.sampling_prob or 0.0),
            widened * (mechanism.noise_multiplier or 0.0),
            mechanism.steps_per_epoch,
            strategy.coefficients if strategy else (1.0,),
            -1.0 if mechanism.neighboring_relation is _REPLACE_ONE else 0.0,
        )

    def scores(self, noisy: np.ndarray) -> np.ndarray:
        """The logarithm of the likelihood ratio of each canary: in over not in."""
        projected: Any = signal.lfilter(self.coefficients, [1.0], noisy, axis=0)
        projected = signal.lfilter(self.coefficients, [1.0], projected[::-1], axis=0)
        variance = self._width**2
        projected = projected[::-1] / variance
        score = self._log_likelihood(projected, variance)
        if self.absent:
            score -= self._log_likelihood(-projected, variance)
        return score

    def _log_likelihood(self, projected: np.ndarray, variance: float) -> np.ndarray:
        """With contributions of 1 over no contributions."""
        steps = np.arange(self.iterations)[:, None]
        squares = np.cumsum(np.square(self.coefficients))
        ends = np.minimum(self.iterations - steps, len(squares)) - 1
        ratios = projected - squares[ends] / (2 * variance)
        if self.epoch is None:
            q, groups = self.sampling_prob, len(self.coefficients)
            is_turn = steps % groups == np.arange(ratios.shape[1]) % groups
            with np.errstate(divide="ignore"):  # the probability may be 1
                mixed = np.logaddexp(np.log1p(-q), math.log(q) + ratios)
            return np.sum(mixed, axis=0, where=is_turn)
        # In the last epoch, the step of an example may not be reached.
        rest = -self.iterations % self.epoch
        ratios = np.concatenate([ratios, np.zeros((rest, ratios.shape[1]))])
        ratios = ratios.reshape(-1, self.epoch, ratios.shape[1])
        mixed: Any = special.logsumexp(ratios, axis=1)
        return np.sum(mixed - math.log(self.epoch), axis=0)

    def simulate(self, is_in: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Noisy gradients as the claim describes them."""
        shape = self.iterations, len(is_in)
        steps, numbers = np.arange(self.iterations)[:, None], np.arange(len(is_in))
        if self.epoch is None:
            groups = len(self.coefficients)
            takes_part = rng.random(shape) < self.sampling_prob
            takes_part &= steps % groups == numbers % groups
        else:
            epochs = -(-self.iterations // self.epoch)
            chosen = rng.integers(self.epoch, size=(epochs, len(is_in)))
            takes_part = chosen[steps[:, 0] // self.epoch] == steps % self.epoch
        noise: Any = rng.normal(0, self._width, shape)
        noise = signal.lfilter([1.0], self.coefficients, noise, axis=0)
        return takes_part * np.where(is_in, 1.0, self.absent) + noise

    @property
    def _width(self) -> float:
        """The standard deviation of independent noise, before it is correlated."""
        return self.noise * float(np.linalg.norm(self.coefficients))
