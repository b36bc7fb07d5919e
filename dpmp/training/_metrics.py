"""Records the values that steps release, without making the steps wait."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp._warnings import warn
from dpmp.training._state import TrainingState

TIMES = ("seconds", "steps_per_second")  # the names of times in a line

_MOST_LINES = 1000  # of a whole run, roughly

# The noise alone exceeds this many standard deviations once in a billion looks.
_CLEARLY = 6.0


class Metrics:
    """Copies values of some steps, and reads them from the device at release."""

    def __init__(
        self,
        *,
        seconds: float,
        iterations: int,
        report_steps: Collection[int],
        epsilon: Callable[[int], float | None],
    ):
        """Prepares to record steps; the steps before took `seconds`.

        `report_steps` are recorded in any case, with their epsilon if it is known.
        """
        self._interval = max(1, iterations // _MOST_LINES)
        self._report_steps, self._epsilon = report_steps, epsilon
        self._waiting: list[tuple[dict[str, Any], dict[str, jax.Array]]] = []
        self._begin = time.monotonic() - seconds
        self._last: tuple[int, float] | None = None

    def collect(self, step: int, state: TrainingState, *, is_last: bool) -> None:
        """Records a step if it is due, or if it is the last one before a release."""
        if is_last or step in self._report_steps or step % self._interval == 0:
            line = {"step": step, **self._times(step)}
            if (epsilon := self._epsilon(step)) is not None:
                line["epsilon"] = finite(epsilon)
            # The next step may overwrite the arrays of the state.
            self._waiting.append((line, _copy(_released(state))))

    def take(self) -> list[dict[str, Any]]:
        """The lines of all recorded steps; a number that is not finite is None."""
        lines = [
            line | {name: finite(np.asarray(x)) for name, x in copies.items()}
            for line, copies in self._waiting
        ]
        self._waiting.clear()
        return lines

    def _times(self, step: int) -> dict[str, float]:
        """Seconds of the whole run, and the speed since the line before.

        The first step of a process is left out of the speed: it includes compilation.
        """
        now = time.monotonic()
        times = {"seconds": round(now - self._begin, 3)}
        if self._last is not None and now > self._last[1]:
            speed = (step - self._last[0]) / (now - self._last[1])
            times["steps_per_second"] = float(f"{speed:.4g}")
        self._last = step, now
        return times


def _released(state: TrainingState) -> dict[str, jax.Array]:
    """The scalars of a state, by name."""
    values = {f"noisy/{name}": x for name, x in sorted(state.metrics.items())}
    if state.scale_state is not None:
        values["loss_scale"] = state.scale_state.scale
    if state.clip_norm is not None:
        values["clip_norm"] = state.clip_norm
    return values


@jax.jit
def _copy(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.copy, arrays)


def finite(x: Any) -> float | None:
    """A number, or None for infinity and NaN, which JSON does not have."""
    return float(x) if math.isfinite(x) else None


class OverflowWarning:
    """Warns once if the noisy fraction clearly shows that examples train nothing.

    An example whose gradient is not finite contributes zero to a step. If all examples
    are like that, then a run learns from noise alone, without an error.
    """

    def __init__(self, stddev: float, *, start: int, is_dynamic: bool):
        """`stddev` is the standard deviation of the noise on the fraction.

        A dynamic loss scale may halve itself in its first steps, so the warning waits.
        """
        self._least = _CLEARLY * stddev
        self._first_look = start + (50 if is_dynamic else 3)
        self._has_looked = self._has_warned = False

    def look(self, step: int, metrics: Mapping[str, Any], *, is_reported: bool) -> None:
        """Looks at the metrics of a step if it is due; reading them makes it wait."""
        is_due = step >= self._first_look and (is_reported or not self._has_looked)
        if self._has_warned or not is_due:
            return
        self._has_looked = True
        fraction = float(metrics.get("overflowed", 0.0))
        if fraction > self._least:
            self._has_warned = True
            warn(
                f"by the released fraction, about {min(fraction, 1.0):.0%} of the "
                "examples of this step had a gradient with NaN or infinity. Such "
                "examples train nothing. If all of them are like that, the run learns "
                "from noise alone. Likely causes: NaN in the data or in the first "
                "parameters; a learning rate that is too large; with float16, a loss "
                "scale that is too large. To find out, compute the loss and its "
                "gradient on a public example, and try a smaller learning rate."
            )
