"""Describes the privacy that a run has spent, at a small part of the run's time."""

import time
from collections.abc import Callable

from dpmp import accounting
from dpmp.accounting._rounding import digits_above
from dpmp.mechanism import DPSGD

# To compute epsilon takes from milliseconds to seconds.
_SHARE_OF_TIME = 0.01


class SpentPrivacy:
    """Texts on the privacy that is spent after some of the steps of a run.

    Epsilon after all steps is computed at once, so that a mistake shows before the
    first step. Epsilon after fewer steps is left out while computing it would take more
    than a hundredth of the time since the start.
    """

    def __init__(
        self, mechanism: DPSGD, last_step: int, epsilon: Callable[[int], float]
    ):
        """Computes epsilon after `last_step` steps.

        The function `epsilon` computes it after a number of steps.
        """
        start = time.monotonic()
        self._mechanism, self._last_step = mechanism, last_step
        self._epsilon = epsilon
        self._known: dict[int, float] = {}
        self._text = ""
        if not mechanism.is_private:
            self._text = "no privacy"
        elif mechanism.delta is None:
            self._text = "epsilon not shown without a delta"
        else:
            self._known[last_step] = epsilon(last_step)
        self._start = time.monotonic()
        self._seconds = self._largest = self._start - start

    def describe(self, step: int) -> str:
        """The epsilon that is spent after a number of steps, and that of the run."""
        if self._text:
            return self._text
        epsilon = self.epsilon(step)
        final = accounting.round_up(self._known[self._last_step])
        if epsilon is not None:
            return f"epsilon {accounting.round_up(epsilon)} of {final}"
        return f"epsilon below {final}"

    def describe_end(self) -> str:
        """The epsilon of the run, and its delta."""
        delta = self._mechanism.delta
        if self._text or delta is None:
            return self._text
        final = accounting.round_up(self._known[self._last_step])
        return f"epsilon {final} at delta {digits_above(delta, 3)}"

    def epsilon(self, step: int) -> float | None:
        """The epsilon that is spent after a number of steps, if it is known."""
        if self._text:
            return None
        if step not in self._known and self._may_take_time():
            start = time.monotonic()
            self._known[step] = self._epsilon(step)
            self._seconds += time.monotonic() - start
        return self._known.get(step)

    def _may_take_time(self) -> bool:
        elapsed = time.monotonic() - self._start
        return self._seconds + self._largest <= _SHARE_OF_TIME * elapsed
