"""Records what the steps of a run release, without making the steps wait."""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dpmp.runs._metrics import MetricsFile
from dpmp.runs._tensorboard import TensorBoard
from dpmp.training._state import TrainingState

_MOST_LINES = 1000  # of a whole run, roughly


class Metrics:
    """A context manager that writes released values of some steps to the run's files.

    To read a value from a device waits for the step that makes it. So the values of a
    step are read when the next step that is recorded has been started.
    """

    def __init__(
        self,
        outputs: Sequence[MetricsFile | TensorBoard],
        *,
        start: int,
        seconds: float = 0.0,
        iterations: int,
        report_steps: Collection[int],
        epsilon: Callable[[int], float | None],
    ):
        """Prepares to record steps after `start`, which took so many `seconds`.

        `report_steps` are recorded in any case, with their epsilon if it is known. If
        there are several processes, only the first one has `outputs`. The others must
        take part, because all of them hold a part of the state.
        """
        self._outputs = outputs
        self._interval = max(1, iterations // _MOST_LINES)
        self._report_steps, self._epsilon = report_steps, epsilon
        self._pending: tuple[int, dict[str, float], dict[str, jax.Array]]
        self._pending = start, {}, {}
        self._begin = time.monotonic() - seconds
        self._last: tuple[int, float] | None = None

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object):
        try:
            with contextlib.ExitStack() as stack:
                for output in self._outputs:
                    stack.callback(output.close)
                self._write()
        except Exception as cause:  # the first error must not be lost
            if error is None:
                raise
            error.add_note(f"dpmp: the last metrics were not written: {cause}")

    def update(
        self, step: int, state: TrainingState, public: Mapping[str, float]
    ) -> None:
        """Records a step if it is due, or if the user has computed numbers."""
        is_reported = step in self._report_steps
        if not (public or is_reported or step % self._interval == 0):
            return
        values = self._times(step)
        if is_reported and (epsilon := self._epsilon(step)) is not None:
            values["epsilon"] = epsilon
        values |= {f"public/{name}": x for name, x in public.items()}
        # The next step may overwrite the arrays of the state.
        released = _released(state)
        copies = dict(zip(released, _copy(list(released.values())), strict=True))
        self._write()
        self._pending = step, values, copies

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

    def _write(self) -> None:
        """Writes the values that wait; the device has most likely computed them."""
        step, values, copies = self._pending
        if values:
            values |= {name: float(np.asarray(x)) for name, x in copies.items()}
            for output in self._outputs:
                output.write(step, values)
        self._pending = step, {}, {}


def _released(state: TrainingState) -> dict[str, jax.Array]:
    """The scalars of a state that are released, by name."""
    values = {f"noisy/{name}": x for name, x in sorted(state.metrics.items())}
    if state.scale_state is not None:
        values["loss_scale"] = state.scale_state.scale
    if state.clip_norm is not None:
        values["clip_norm"] = state.clip_norm
    return values


@jax.jit
def _copy(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(x) for x in arrays]
