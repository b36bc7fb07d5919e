"""Reports a run: a bar on a terminal, plain lines elsewhere, and lines for a file.

Reports are made of step counts, epsilons, released metrics, numbers of callbacks, and
times. Nothing else that depends on the data reaches them. The first line is made of the
mechanism and of shapes, for which examples 0 and 1 may be loaded.
"""

import contextlib
import datetime
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
import rich.table

from dpmp._typing import PyTree
from dpmp._warnings import warn
from dpmp.accounting import digits_above, round_up
from dpmp.mechanism import DPSGD
from dpmp.programs import analysis, interpreter, losses
from dpmp.sources import Load
from dpmp.training._state import TrainingState
from dpmp.training._step import Step

TIMES = ("seconds", "steps_per_second")  # the names of times in a line

_MOST_LINES = 1000  # in the file of a whole run, roughly
_NUM_REPORTS = 10
_SECONDS_BETWEEN = 0.5  # between updates of the bar, which wait for the device

# Computing epsilon takes milliseconds to seconds. It may take this share of the time.
_SHARE_OF_TIME = 0.01

# The noise alone exceeds this many standard deviations once in a billion looks.
_CLEARLY = 6.0


class _Console(rich.console.Console):
    """A console without which a run goes on, where rich would end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def first_line(step: Step, state: TrainingState, load: Load) -> str:
    """Returns the line, which depends on the mechanism and on shapes."""
    mechanism, size = step.mechanism, "as many examples as fit"
    policy = step.policy
    computed_in = policy.compute_dtype.name
    # If the loss or the dataset fails, the first step raises a better error.
    with contextlib.suppress(Exception):
        rows, padded = load(np.zeros(0, np.int64)), mechanism.padded_batch_size
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((padded, *x.shape[1:]), x.dtype), rows
        )
        size = f"up to {step.microbatch_size(state, batch)} of {padded} padded rows"
        computed_in += _share_of_products(step, state, batch)
    computed_in += policy.shown_products
    why = " (the fastest with a proof)" if mechanism.has_default_method else ""
    num_trained = sum(x.size for x in jax.tree.leaves(state.params))
    return (
        f'method="{mechanism.method}"{why}, arithmetic="{mechanism.arithmetic}", '
        f"{size} at a time, loss in {computed_in}, "
        f"{num_trained:,} entries are trained"
    )


def _share_of_products(step: Step, state: TrainingState, batch: PyTree) -> str:
    """How many products of the loss a policy of 16 bits has, if it has not all."""
    if step.policy.compute_dtype.itemsize > 2:
        return ""
    args = step.loss_shapes(state, batch, rows=slice(1))
    jaxpr, _ = interpreter.trace(step.loss_fn, *args)
    narrow = losses.are_narrow(analysis.equations(jaxpr.jaxpr))
    return "" if all(narrow) else f" ({sum(narrow)} of {len(narrow)} products)"


class Report:
    """A context that shows the steps of a run, and records some for a file."""

    def __init__(
        self,
        mechanism: DPSGD,
        epsilon: Callable[[int], float],
        start: int,
        stop: int,
        *,
        enabled: bool = True,
        seconds: float = 0.0,
        has_dynamic_scale: bool = False,
        first_line: Callable[[], str] = str,
        console: rich.console.Console | None = None,
    ):
        """Prepares for the steps from `start`, before which a run took `seconds`."""
        self._mechanism, self._first_line = mechanism, first_line
        self._spent = SpentPrivacy(mechanism, stop, epsilon)
        self._begin, self._stop, self._enabled = start, stop, enabled
        self._values: dict[str, float] = {}  # shown until there are new ones
        self._console = console or _Console(stderr=True, soft_wrap=True)
        self._shows_bar = enabled and self._console.is_terminal
        interval = max(1, (stop - start) // _NUM_REPORTS)
        self.report_steps = sorted({*range(start + interval, stop, interval), stop})
        self._first: tuple[int, float] | None = None  # a step, and when it was made
        self._entered_at = self._shown_at = -math.inf
        self._waiting: list[tuple[dict[str, Any], dict[str, jax.Array]]] = []
        self._run_began_at = time.monotonic() - seconds
        self._recorded: tuple[int, float] | None = None  # as `_first`
        stddev = mechanism.overflow_stddev / mechanism.expected_batch_size
        self._overflows = OverflowWarning(stddev, start, has_dynamic_scale)
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

    def __enter__(self) -> "Report":
        self._entered_at = time.monotonic()
        if self._enabled:
            self._print(self._first_line())
            if self._begin:
                is_complete = self._begin >= self._stop
                rest = ", the last one: its parameters are returned" * is_complete
                self._print(f"goes on from step {self._begin}{rest}")
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def record(self, step: int, state: TrainingState, *, is_last: bool) -> None:
        """Records a step if it is due, or if it is the last one before a release."""
        is_reported = step in self.report_steps
        interval = max(1, self._mechanism.iterations // _MOST_LINES)
        if is_last or is_reported or step % interval == 0:
            line = {"step": step, **self._times(step)}
            epsilon = self._spent.epsilon(step) if is_reported else None
            if epsilon is not None:
                line["epsilon"] = finite(epsilon)
            # The next step may overwrite the arrays, and must not wait for a read.
            self._waiting.append((line, _copy(_released(state))))

    def take_lines(self) -> list[dict[str, Any]]:
        """The lines of all recorded steps; a number that is not finite is None."""
        lines = [
            line | {name: finite(np.asarray(x)) for name, x in copies.items()}
            for line, copies in self._waiting
        ]
        self._waiting.clear()
        return lines

    def show(
        self,
        step: int,
        done: jax.Array,
        metrics: Mapping[str, Any],
        public: Mapping[str, float],
    ) -> None:
        """Shows `step` steps if a report is due; `done` is ready when they are done."""
        if metrics:
            is_recorded = self._recorded is not None and self._recorded[0] == step
            is_reported = is_recorded or step in self.report_steps
            self._overflows.look(step, metrics, is_reported=is_reported)
            if is_recorded:  # they are on the disk, so that nothing has to wait
                self._remember(metrics)
        # The speed leaves out the first step, which includes compilation.
        self._first = self._first or (step, time.monotonic())
        self._values |= {f"public {name}": x for name, x in public.items()}
        waited = time.monotonic() - self._shown_at
        shows_bar = self._shows_bar and waited >= _SECONDS_BETWEEN
        if not (self._enabled and (shows_bar or step in self.report_steps)):
            return
        jax.block_until_ready(done)
        self._remember(metrics)
        text = self._describe(step)
        if self._shows_bar:
            self._shown_at = time.monotonic()
            self._bar.update(self._task, completed=step, description=text)
        else:
            self._print(text)

    def _remember(self, metrics: Mapping[str, Any]) -> None:
        kind = "noisy" if self._mechanism.noise_multiplier else "exact"
        self._values |= {f"{kind} {name}": float(x) for name, x in metrics.items()}

    def end(self, ending: str = "") -> None:
        """Shows the last line: the steps, their time, the privacy spent, `ending`."""
        if self._enabled:
            seconds = round(time.monotonic() - self._entered_at)
            steps = f"steps {self._begin + 1} to {self._stop}"
            steps = steps if self._begin < self._stop else "no more steps"
            took = datetime.timedelta(seconds=seconds)
            privacy = self._spent.at_end  # epsilon and delta of the run
            self._print(f"dpmp: {steps} done in {took}, {privacy}{ending}")

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def _describe(self, step: int) -> str:
        # Between two reports, epsilon is that of the next one, which is never less.
        covered = next(s for s in self.report_steps if s >= step)
        parts = [f"step {step}/{self._stop}", self._spent.describe(covered)]
        parts += [f"{name} {x:.3g}" for name, x in self._values.items()]
        per_second = _speed(step, self._first)
        if per_second is not None:
            left = round((self._stop - step) / per_second)
            examples = per_second * self._mechanism.expected_batch_size
            parts.append(f"{examples:.1f} examples/s")
            parts.append(f"{datetime.timedelta(seconds=left)} left")
        return ", ".join(parts)

    def _times(self, step: int) -> dict[str, float]:
        """Seconds of the whole run, and the speed since the line before."""
        now = time.monotonic()
        times = {"seconds": round(now - self._run_began_at, 3)}
        per_second = _speed(step, self._recorded)
        if per_second is not None:
            times["steps_per_second"] = float(f"{per_second:.4g}")
        self._recorded = step, now
        return times


def _speed(step: int, since: tuple[int, float] | None) -> float | None:
    """Steps per second since a step and its time, if they are known."""
    first, begin = since or (step, 0.0)
    elapsed = time.monotonic() - begin
    return (step - first) / elapsed if step > first and elapsed > 0 else None


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


class SpentPrivacy:
    """Describes the spent privacy, within a small part of the running time.

    Epsilon after all steps is computed at once, so that a mistake shows before the
    first step. Epsilon after fewer steps is left out while computing it would take more
    than a hundredth of the time since the start.
    """

    def __init__(self, mechanism: DPSGD, last: int, epsilon: Callable[[int], float]):
        """`epsilon` is a function of a number of steps, up to `last`."""
        start = time.monotonic()
        self._epsilon, self._known = epsilon, {}
        if not mechanism.is_private:
            self.at_end = "no privacy"
        elif mechanism.delta is None:
            self.at_end = "epsilon not shown without a delta"
        else:
            self._known[last] = epsilon(last)
            self._final = round_up(self._known[last])
            delta = digits_above(mechanism.delta, 3)
            self.at_end = f"epsilon {self._final} at delta {delta}"
        self._start = time.monotonic()
        self._seconds = self._largest = self._start - start

    def describe(self, step: int) -> str:
        """A text: the epsilon spent after some steps, and the epsilon of the run."""
        if not self._known:
            return self.at_end
        epsilon = self.epsilon(step)
        if epsilon is None:
            return f"epsilon below {self._final}"
        return f"epsilon {round_up(epsilon)} of {self._final}"

    def epsilon(self, step: int) -> float | None:
        """The epsilon that is spent after a number of steps, if it is known."""
        if not self._known:
            return None
        elapsed = time.monotonic() - self._start
        is_quick = self._seconds + self._largest <= _SHARE_OF_TIME * elapsed
        if step not in self._known and is_quick:
            start = time.monotonic()
            self._known[step] = self._epsilon(step)
            self._seconds += time.monotonic() - start
        return self._known.get(step)


class OverflowWarning:
    """Warns once if the noisy fraction clearly shows that examples train nothing."""

    def __init__(self, stddev: float, start: int, is_dynamic: bool):
        """`stddev` is the standard deviation of the noise on the fraction."""
        self._least = _CLEARLY * stddev
        # A dynamic loss scale may halve itself in its first steps.
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
