"""The best attacker of a mechanism, by likelihood ratios, and runs for it to attack.

All numbers are in units of one contribution, the clip norm over the batch size.
"""

import math
from collections.abc import Callable
from typing import Any

import dp_accounting
import numpy as np
from scipy import special

from dpmp._typing import PyTree
from dpmp.mechanism import DPSGD
from dpmp.strategies import BandedInverse, BandedToeplitz

_REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE


class ComputedRows:
    """A source whose rows follow from their indices, which it is given all at once."""

    def __init__(self, num_examples: int, rows_of: Callable[[np.ndarray], PyTree]):
        self._num_examples, self._rows_of = num_examples, rows_of

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, indices: np.ndarray) -> PyTree:
        if not np.ndim(indices):
            raise TypeError("an array, please")
        return self._rows_of(indices)


def name_of(mechanism: DPSGD) -> str:
    """What a step costs, by which a report knows the mechanism; "" if that is private.

    Under ADD_OR_REMOVE_ONE, it would show the number of examples. Before calibration, a
    step has no cost.
    """
    is_known = mechanism.noise_multiplier is not None and not mechanism.hides_size
    return repr(mechanism.step_cost) if is_known else ""


class Attacker:
    """Knows the mechanism, and guesses from its noisy gradients alone."""

    def __init__(self, mechanism: DPSGD):
        metrics, self.iterations = mechanism.released_metrics, mechanism.iterations
        widened = 1 + metrics.noise_increase if metrics else 1.0
        # The noise multiplier of the gradient.
        self.noise = widened * (mechanism.noise_multiplier or 0.0)
        self.sampling_prob = float(mechanism.sampling_prob or 0.0)
        # The steps of an epoch of random allocation, or None.
        self.epoch = mechanism.steps_per_epoch
        self.strategy = mechanism.strategy or BandedToeplitz((1.0,), self.iterations)
        # The contribution of an example that is not in the data: under REPLACE_ONE,
        # another example has its place.
        is_replaced = mechanism.neighboring_relation is _REPLACE_ONE
        self.absent = -1.0 if is_replaced else 0.0
        # The standard deviation of independent noise, before it is correlated.
        self._width = self.noise * self.strategy.sensitivity

    def scores(self, noisy: np.ndarray) -> np.ndarray:
        """The logarithm of the likelihood ratio of each canary: in over not in."""
        product, variance = self.strategy.product, self._width**2
        projected = product(product(noisy)[::-1])[::-1] / variance
        score = self._log_likelihood(projected, variance)
        if self.absent:
            score -= self._log_likelihood(-projected, variance)
        return score

    def _log_likelihood(self, projected: np.ndarray, variance: float) -> np.ndarray:
        """With contributions of 1 over no contributions."""
        columns = self.strategy.product(np.eye(1, self.iterations)[0])
        squares = np.cumsum(np.square(columns))[::-1, None]
        is_turn = self._turns(projected.shape[1])
        if isinstance(self.strategy, BandedInverse):
            changes = self.strategy.product(is_turn.astype(float))
            squares = np.sum(np.square(changes), axis=0)
            return np.sum(projected, axis=0, where=is_turn) - squares / (2 * variance)
        ratios = projected - squares / (2 * variance)
        if self.epoch is None:
            q = self.sampling_prob
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
        if self.epoch is None:
            takes_part = rng.random(shape) < self.sampling_prob
            takes_part &= self._turns(len(is_in))
        else:
            steps = np.arange(self.iterations)
            epochs = -(-self.iterations // self.epoch)
            chosen = rng.integers(self.epoch, size=(epochs, len(is_in)))
            takes_part = chosen[steps // self.epoch] == steps[:, None] % self.epoch
        noise = self.strategy.quotient(rng.normal(0, self._width, shape))
        return takes_part * np.where(is_in, 1.0, self.absent) + noise

    def _turns(self, number: int) -> np.ndarray:
        """Whether it is an example's turn: (iterations, number) of bool."""
        groups = self.strategy.cycle_length
        steps = np.arange(self.iterations)[:, None]
        return steps % groups == np.arange(number) % groups
