"""Shows the progress of a run: a bar on a terminal, about ten plain lines elsewhere.

The report is made of step counts, epsilons, released metrics, numbers of callbacks, and
times. Nothing else that depends on the data reaches it.
"""

import datetime
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import rich.console
import rich.progress
import rich.table

from dpmp.accounting import digits_above, round_up
from dpmp.mechanism import DPSGD

_NUM_REPORTS = 10
_SECONDS_BETWEEN = 0.5  # between updates of the bar, which wait for the device

# Computing epsilon takes milliseconds to seconds. It may take this share of the time.
_SHARE_OF_TIME = 0.01


class Progress:
    """A context that reports the steps of a run; by default to standard error."""

    def __init__(
        self,
        mechanism: DPSGD,
        epsilon: Callable[[int], float],
        start: int,
        stop: int,
        *,
        enabled: bool = True,
        first_line: Callable[[], str] = str,
        console: rich.console.Console | None = None,
    ):
        """Prepares a report on the steps from `start` to `stop`.

        `epsilon` computes the epsilon that is spent after a number of steps. The text
        of `first_line` comes first.
        """
        self._mechanism, self._first_line = mechanism, first_line
        self._spent = SpentPrivacy(mechanism, stop, epsilon)
        self._begin, self._stop, self._enabled = start, stop, enabled
        self._values: dict[str, float] = {}
        self._console = console or rich.console.Console(stderr=True, soft_wrap=True)
        self._shows_bar = enabled and self._console.is_terminal
        interval = max(1, (stop - start) // _NUM_REPORTS)
        self.report_steps = sorted({*range(start + interval, stop, interval), stop})
        self._first: tuple[int, float] | None = None  # a step, and when it was made
        self._entered_at = self._shown_at = -math.inf
        self._bar = rich.progress.Progress(
            rich.progress.BarColumn(bar_width=20),
            # A narrow terminal has the text on several lines, beside the bar.
            rich.progress.TextColumn(
                "{task.description}",
                markup=False,
                table_column=rich.table.Column(ratio=1, no_wrap=False),
            ),
            expand=True,
            console=self._console,
            disable=not self._shows_bar,
        )
        self._task = self._bar.add_task("", total=stop, completed=start)

    def __enter__(self) -> "Progress":
        self._entered_at = time.monotonic()
        if self._enabled:
            self._print(self._first_line())
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def epsilon(self, step: int) -> float | None:
        """The epsilon of a step that is reported, if it is known or quickly found."""
        return self._spent.epsilon(step) if step in self.report_steps else None

    def update(
        self,
        step: int,
        done: jax.Array,
        metrics: Mapping[str, Any],
        public: Mapping[str, float],
    ) -> None:
        """Reports `step` steps, and released values, if a report is due.

        `done` is an array that is ready when the step is done. Values are shown until
        there are new values.
        """
        # The speed leaves out the first step, which includes compilation.
        self._first = self._first or (step, time.monotonic())
        self._values |= {f"public {name}": x for name, x in public.items()}
        waited = time.monotonic() - self._shown_at
        shows_bar = self._shows_bar and waited >= _SECONDS_BETWEEN
        if not (self._enabled and (shows_bar or step in self.report_steps)):
            return
        jax.block_until_ready(done)
        kind = "noisy" if self._mechanism.noise_multiplier else "exact"
        self._values |= {f"{kind} {name}": float(x) for name, x in metrics.items()}
        text = self._describe(step)
        if self._shows_bar:
            self._shown_at = time.monotonic()
            self._bar.update(self._task, completed=step, description=text)
        else:
            self._print(text)

    def end(self, ending: str = "") -> None:
        """Shows the last line: the steps, their time, the privacy spent, `ending`."""
        if self._enabled:
            seconds = round(time.monotonic() - self._entered_at)
            steps = f"steps {self._begin + 1} to {self._stop}"
            steps = steps if self._begin < self._stop else "no more steps"
            took = datetime.timedelta(seconds=seconds)
            privacy = self._spent.describe_end()
            self._print(f"dpmp: {steps} done in {took}, {privacy}{ending}")

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def _describe(self, step: int) -> str:
        # Between two reports, epsilon is that of the next one, which is never less.
        covered = next(s for s in self.report_steps if s >= step)
        parts = [f"step {step}/{self._stop}", self._spent.describe(covered)]
        parts += [f"{name} {x:.3g}" for name, x in self._values.items()]
        first, begin = self._first or (step, 0.0)
        elapsed = time.monotonic() - begin
        if step > first and elapsed > 0:
            per_second = (step - first) / elapsed
            left = round((self._stop - step) / per_second)
            examples = per_second * self._mechanism.expected_batch_size
            parts.append(f"{examples:.1f} examples/s")
            parts.append(f"{datetime.timedelta(seconds=left)} left")
        return ", ".join(parts)


class SpentPrivacy:
    """Describes the spent privacy, within a small part of the running time.

    Epsilon after all steps is computed at once, so that a mistake shows before the
    first step. Epsilon after fewer steps is left out while computing it would take more
    than a hundredth of the time since the start.
    """

    def __init__(self, mechanism: DPSGD, last: int, epsilon: Callable[[int], float]):
        """`epsilon` is a function of a number of steps, up to `last`."""
        start = time.monotonic()
        self._delta, self._last, self._epsilon = mechanism.delta, last, epsilon
        self._known: dict[int, float] = {}
        self._text = "" if mechanism.is_private else "no privacy"
        if mechanism.delta is None and not self._text:
            self._text = "epsilon not shown without a delta"
        if not self._text:
            self._known[last] = epsilon(last)
        self._start = time.monotonic()
        self._seconds = self._largest = self._start - start

    def describe(self, step: int) -> str:
        """A text: the epsilon spent after some steps, and the epsilon of the run."""
        if self._text:
            return self._text
        epsilon, final = self.epsilon(step), round_up(self._known[self._last])
        if epsilon is None:
            return f"epsilon below {final}"
        return f"epsilon {round_up(epsilon)} of {final}"

    def describe_end(self) -> str:
        """The epsilon of the run, and its delta."""
        if self._text or self._delta is None:
            return self._text
        final = round_up(self._known[self._last])
        return f"epsilon {final} at delta {digits_above(self._delta, 3)}"

    def epsilon(self, step: int) -> float | None:
        """The epsilon that is spent after a number of steps, if it is known."""
        if self._text:
            return None
        elapsed = time.monotonic() - self._start
        is_quick = self._seconds + self._largest <= _SHARE_OF_TIME * elapsed
        if step not in self._known and is_quick:
            start = time.monotonic()
            self._known[step] = self._epsilon(step)
            self._seconds += time.monotonic() - start
        return self._known.get(step)
