"""The matrices C of strategies, by which the noise of steps is correlated."""

import abc
import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
from scipy import signal

from dpmp import _validate

# Numbers in columns of C are rounded up to multiples of 2^-64.
_LOG_PRECISION = 64


@dataclass(frozen=True)
class Strategy(abc.ABC):
    """What `BandedToeplitz` and `BandedInverse` have in common.

    Attributes:
      coefficients: 1, and others from -1 to 1, which are rounded to a grid, so that
        noise is computed in integers. Their number is the number of bands.
      iterations: the number of steps that it is for.
    """

    LOG_GRID: ClassVar[int]  # coefficients are multiples of 2^-LOG_GRID

    coefficients: tuple[float, ...]
    iterations: int

    def __post_init__(self):
        _validate.fields(self, iterations=_validate.positive_integer)
        given = [_validate.as_real(x) for x in self.coefficients]
        if given[:1] != [1.0] or not all(
            isinstance(x, float) and abs(x) <= 1 for x in given
        ):
            _validate.fail(
                "coefficients must begin with 1, and all must be from -1 to 1",
                coefficients=self.coefficients,
                fix="Use strategies.banded_toeplitz(8, iterations=...).",
            )
        grid = 2**self.LOG_GRID
        rounded = tuple(round(x * grid) / grid for x in given)
        object.__setattr__(self, "coefficients", rounded)

    @property
    def bands(self) -> int:
        """The number of coefficients."""
        return len(self.coefficients)

    @property
    def numerators(self) -> tuple[int, ...]:
        """The coefficients as multiples of 2^-LOG_GRID."""
        return tuple(int(x * 2**self.LOG_GRID) for x in self.coefficients)

    @property
    @abc.abstractmethod
    def cycle_length(self) -> int:
        """The number of groups of examples, which take turns."""

    @property
    @abc.abstractmethod
    def stored_steps(self) -> int:
        """The number of earlier steps whose noise is in memory."""

    @functools.cached_property
    def sensitivity(self) -> float:
        """How much wider than without a strategy independent noise must be.

        It is the largest change of C G over the root of the number of turns of one
        example, whose contributions have norm 1, rounded up.
        """
        square = self.square_of_sensitivity()
        root = math.sqrt(square)
        return root if Fraction(root) ** 2 >= square else math.nextafter(root, math.inf)

    @abc.abstractmethod
    def square_of_sensitivity(self) -> Fraction:
        """The square of `sensitivity`, or an upper bound."""

    @property
    def width_of_counts(self) -> float:
        """How much wider than without a strategy the noise on a released count is."""
        return self.sensitivity

    @abc.abstractmethod
    def product(self, x: np.ndarray) -> Any:
        """C times x, whose first axis has a row for each step."""

    @abc.abstractmethod
    def quotient(self, x: np.ndarray) -> Any:
        """The inverse of C times x: noise of the steps, from independent noise."""

    @functools.cached_property
    def noise_gain(self) -> float:
        """The noise of the last step over independent noise, in standard deviations."""
        return float(np.linalg.norm(self.quotient(np.eye(1, self.iterations)[0])))

    @property
    def widening(self) -> float:
        """By which factor more units than independent noise need must have room.

        Noise of four draws leaves room for a noise gain of almost 2.
        """
        return self.sensitivity * max(1.0, self.noise_gain / 1.9)

    def error(self, *, momentum: float = 0.0, at_end: bool = False) -> float:
        """The error of the parameters, for noise multiplier 1 and sensitivity 1.

        It is the root mean square of the noise in the sum of all updates so far, over
        all steps, in units of one contribution. With `momentum`, the updates are those
        of SGD with momentum. With `at_end`, it is that of the sum of all updates alone.
        """
        factors = self.quotient(
            sums_of_updates(self.iterations, checked_momentum(momentum))
        )
        weights = 1 if at_end else weights_of_steps(self.iterations)
        return math.sqrt(np.sum(weights * factors**2)) * self.sensitivity


@dataclass(frozen=True)
class BandedToeplitz(Strategy):
    """A matrix with bands: noise of a step depends on the noise of the last few steps.

    Let c_0 = 1, c_1, ... be the coefficients, and W_t independent noise. The noise of
    step t is N_t = W_t - c_1 N_{t-1} - c_2 N_{t-2} - ...

    Attributes:
      coefficients: c_0 = 1, and others from -1 to 1, which are rounded to multiples of
        1/64. Their number is the number of bands.
      iterations: the number of steps that it is for.
    """

    LOG_GRID = 6  # the error grows by less than 0.05 %, for up to 64 bands

    def __post_init__(self):
        super().__post_init__()
        if not self.noise_gain <= 16:
            _validate.fail(
                "coefficients must let noise die out: the noise of a step would have "
                "more than 16 times the standard deviation of independent noise",
                coefficients=self.coefficients,
                fix="Use smaller coefficients.",
            )

    @property
    def cycle_length(self) -> int:
        """The number of groups of examples, which take turns (the number of bands)."""
        return self.bands

    @property
    def stored_steps(self) -> int:
        """The number of earlier steps whose noise is in memory."""
        return self.bands - 1

    def square_of_sensitivity(self) -> Fraction:
        """The squared norm of a column of C, because turns have columns apart."""
        return sum((Fraction(x) ** 2 for x in self.coefficients), Fraction(0))

    def product(self, x: np.ndarray) -> Any:
        """C times x, whose first axis has a row for each step."""
        return signal.lfilter(self.coefficients, [1.0], x, axis=0)

    def quotient(self, x: np.ndarray) -> Any:
        """The inverse of C times x: noise of the steps, from independent noise."""
        return signal.lfilter([1.0], self.coefficients, x, axis=0)


@dataclass(frozen=True)
class BandedInverse(Strategy):
    """A matrix whose inverse has bands: independent noise of a few steps is combined.

    Let d_0 = 1, d_1, ... be the coefficients, and W_t independent noise. The noise of
    step t is N_t = W_t + d_1 W_{t-1} + d_2 W_{t-2} + ... Nothing is stored: the noise
    of earlier steps is drawn again from their keys.

    Attributes:
      coefficients: d_0 = 1, and others from -1 to 0, which are rounded to multiples of
        1/4096. Their number, at least 2, is the number of bands.
      iterations: the number of steps that it is for.
      steps_per_epoch: an example takes part in one step of each epoch, always at the
        same place.
    """

    LOG_GRID = 12

    steps_per_epoch: int

    def __post_init__(self):
        super().__post_init__()
        _validate.fields(self, steps_per_epoch=_validate.positive_integer)
        if not (self.bands > 1 and max(self.coefficients[1:]) <= 0):
            _validate.fail(
                "coefficients must begin with 1, and the others must not be positive",
                coefficients=self.coefficients,
                fix="Use strategies.banded_inverse(4, ...).",
            )
        if not sum(self.coefficients) >= 0:
            _validate.fail(
                "coefficients must have a sum of at least 0, so that no step adds up "
                "what examples contributed to many earlier ones",
                coefficients=self.coefficients,
                fix="Use smaller coefficients.",
            )

    @property
    def cycle_length(self) -> int:
        """The number of groups of examples, which take turns (steps of an epoch)."""
        return self.steps_per_epoch

    @property
    def stored_steps(self) -> int:
        """The number of earlier steps whose noise is in memory (none)."""
        return 0

    def square_of_sensitivity(self) -> Fraction:
        """The squared norm of the sum of k columns of C, over k.

        An example takes part in one step of each of k epochs. The number of epochs is
        the one for which the quotient is largest: see docs/proofs.md.
        """
        total, largest = 0, Fraction(0)
        for step, x in enumerate(self.columns(), 1):
            total += x**2
            if step % self.steps_per_epoch == 0 or step == self.iterations:
                epochs = -(-step // self.steps_per_epoch)
                largest = max(largest, Fraction(total, epochs))
        return largest / 2 ** (2 * _LOG_PRECISION)

    @property
    def width_of_counts(self) -> float:
        """How much wider than without a strategy the noise on a released count is."""
        return self.sensitivity * self.noise_gain

    def columns(self) -> list[int]:
        """The sum of one column of C in each epoch, in 2^-64, rounded up."""
        tail = [-x for x in self.numerators[1:]]
        column: list[int] = []  # the first one: no entry is negative
        found: list[int] = []
        for step in range(self.iterations):
            recent = zip(tail, reversed(column[-len(tail) :]), strict=False)
            total = sum(x * y for x, y in recent)
            first = 2**_LOG_PRECISION if step == 0 else 0
            column.append(first - (-total >> self.LOG_GRID))
            last = step - self.steps_per_epoch
            found.append(column[-1] + (found[last] if last >= 0 else 0))
        return found

    def product(self, x: np.ndarray) -> Any:
        """C times x, whose first axis has a row for each step."""
        return signal.lfilter([1.0], self.coefficients, x, axis=0)

    def quotient(self, x: np.ndarray) -> Any:
        """The inverse of C times x: noise of the steps, from independent noise."""
        return signal.lfilter(self.coefficients, [1.0], x, axis=0)


def checked_momentum(momentum: Any) -> float:
    """Returns a number; ValueError if it is out of range."""
    momentum = _validate.as_real(momentum)
    if not 0 <= momentum < 1:
        _validate.fail(
            "momentum must be at least 0 and below 1",
            momentum=momentum,
            fix="Use 0.9, for example.",
        )
    return momentum


def sums_of_updates(iterations: int, momentum: float) -> Any:
    """By which factor an update enters the sum a number of steps later."""
    sums = np.convolve([1.0, -1.0], [1.0, -momentum])
    return signal.lfilter([1.0], sums, np.eye(1, iterations)[0])


def weights_of_steps(iterations: int) -> np.ndarray:
    """Which share of all sums noise enters after a number of steps."""
    return 1 - np.arange(iterations) / iterations
