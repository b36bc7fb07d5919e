"""Shows the progress of a run: a bar on a terminal, plain lines elsewhere.

The report is made of step counts, epsilons and noisy metrics. Nothing else that depends
on the data reaches it.
"""

import datetime
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import rich.console
import rich.progress
import rich.table

from dpmp.training._overflows import OverflowNote

_NUM_REPORTS = 10
_SECONDS_BETWEEN = 0.5  # looks at the device, which wait for it, on a terminal


class Progress:
    """A context manager that reports the steps of a run.

    The report shows the privacy that is spent at a few steps. Between these, it shows
    that of the next of them, which is never less than what was spent.
    """

    def __init__(
        self,
        *,
        start: int,
        stop: int,
        examples_per_step: float,
        describe_privacy: Callable[[int], str],
        headline: Callable[[], str] = str,
        metrics_are: str = "noisy",
        note: OverflowNote | None = None,
        enabled: bool = True,
        console: rich.console.Console | None = None,
    ):
        """Prepares a report on the steps from `start` to `stop`.

        `describe_privacy` returns a text on the privacy that is spent after a number of
        steps. The text of `headline` comes first. The names of metrics follow what
        `metrics_are`. `note` looks at them. By default, the report goes to standard
        error.
        """
        self._begin = self._start = start
        self._stop = stop
        self._examples_per_step = examples_per_step
        self._describe_privacy = describe_privacy
        self._metrics_are = metrics_are
        self._public: dict[str, float] = {}
        self._headline, self._note = headline if enabled else str, note
        self._console = console or rich.console.Console(stderr=True, soft_wrap=True)
        self._shows_bar = enabled and self._console.is_terminal
        interval = max(1, (stop - start) // _NUM_REPORTS)
        self.report_steps = sorted({*range(start + interval, stop, interval), stop})
        self._shows_lines_at = self.report_steps if enabled else []
        self._first_look = start + note.first_look if enabled and note else None
        self._first_step_at: float | None = None
        self._entered_at = self._shown_at = -math.inf
        self._enabled = enabled
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
        self._print(self._headline())
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(
        self,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        public: Mapping[str, float] | None = None,
    ) -> None:
        """Reports `step` steps, and the metrics of the last one, if a report is due.

        The user's public numbers are shown until there are new ones.
        """
        self._public |= public or {}
        if self._first_step_at is None:
            # The speed leaves out the first step, which includes compilation.
            self._start, self._first_step_at = step, time.monotonic()
        if not self.is_due(step):
            return
        text = self._describe(step, metrics or {})
        if self._shows_bar:
            self._shown_at = time.monotonic()
            self._bar.update(self._task, completed=step, description=text)
        elif step in self._shows_lines_at:
            self._print(text)
        if self._note is not None:
            self._print(self._note.text(step - self._begin, metrics or {}))

    def is_due(self, step: int) -> bool:
        """Whether `update` may show anything new at this step."""
        is_shown = step in self._shows_lines_at or step == self._first_look
        return is_shown or (self._shows_bar and self._may_look())

    def end(self, text: str) -> None:
        """Shows the last line, which begins with the steps and their time."""
        if self._enabled:
            seconds = round(time.monotonic() - self._entered_at)
            steps = f"steps {self._begin + 1} to {self._stop}"
            steps = steps if self._begin < self._stop else "no more steps"
            time_ = datetime.timedelta(seconds=seconds)
            self._print(f"dpmp: {steps} done in {time_}{text}")

    def _may_look(self) -> bool:
        return time.monotonic() - self._shown_at >= _SECONDS_BETWEEN

    def _print(self, text: str) -> None:
        if text:
            self._console.print(text, highlight=False, markup=False)

    def _describe(self, step: int, metrics: Mapping[str, Any]) -> str:
        covered = next(s for s in self.report_steps if s >= step)
        elapsed = time.monotonic() - (self._first_step_at or 0)
        privacy = self._describe_privacy(covered)
        parts = [f"step {step}/{self._stop}", privacy]
        kind = self._metrics_are
        parts += [f"{kind} {name} {float(x):.3g}" for name, x in metrics.items()]
        parts += [f"public {name} {x:.3g}" for name, x in self._public.items()]
        if step > self._start and elapsed > 0:
            steps_per_second = (step - self._start) / elapsed
            left = round((self._stop - step) / steps_per_second)
            parts.append(f"{steps_per_second * self._examples_per_step:.1f} examples/s")
            parts.append(f"{datetime.timedelta(seconds=left)} left")
        return ", ".join(parts)
