"""What a run shows and records while it trains: privacy, metrics and speed."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from dpmp.runs._metrics import MetricsFile
from dpmp.runs._tensorboard import TensorBoard
from dpmp.training._headline import headline
from dpmp.training._metrics import Metrics
from dpmp.training._overflows import OverflowNote
from dpmp.training._progress import Progress
from dpmp.training._run_files import NoFiles
from dpmp.training._source import Load
from dpmp.training._spent import SpentPrivacy
from dpmp.training._state import TrainingState
from dpmp.training._step import Step


@dataclasses.dataclass(frozen=True)
class Report:
    """A context manager that shows steps, and records them in the run's directory.

    Attributes:
      progress: shows them.
      metrics: records them; None without a directory.
      ending: the end of the last line.
    """

    progress: Progress
    metrics: Metrics | None
    ending: str

    @contextlib.contextmanager
    def running(self):
        """The time in which steps are made."""
        with self.progress, self.metrics or contextlib.nullcontext():
            yield

    def update(
        self, step: int, state: TrainingState, public: Mapping[str, float]
    ) -> None:
        """Reports the state after `step` steps, and the user's public numbers."""
        if self.metrics is not None:
            self.metrics.update(step, state, public)
        if self.progress.is_due(step):
            jax.block_until_ready(state.step)
        self.progress.update(step, state.metrics, public)

    def end(self) -> None:
        """Shows the last line, when all files are written."""
        self.progress.end(self.ending)


def report_on(step: Step, files: NoFiles, load: Load, *, enabled: bool) -> Report:
    """Prepares the report on the steps of a run from `files.state` to `files.stop`."""
    enabled = enabled and jax.process_index() == 0
    mechanism, size = step.mechanism, step.mechanism.expected_batch_size
    start, stop = int(files.state.step), files.stop
    is_dynamic = step.dynamic_scale is not None
    is_needed = enabled or files.path is not None
    spent = SpentPrivacy(mechanism, stop, files.epsilon) if is_needed else None
    progress = Progress(
        start=start,
        stop=stop,
        examples_per_step=size,
        describe_privacy=spent.describe if spent else str,
        metrics_are="noisy" if mechanism.noise_multiplier else "exact",
        headline=functools.partial(headline, step, files.state, load),
        note=OverflowNote(mechanism.overflow_stddev / size, is_dynamic=is_dynamic),
        enabled=enabled,
    )
    metrics, ending = None, ""
    if spent is not None:
        ending = f", {spent.describe_end()}"
    if spent is not None and files.path is not None:
        ending += f", saved in {files.path}"
        metrics = _metrics_in(
            files.path,
            start=start,
            iterations=mechanism.iterations,
            report_steps=progress.report_steps,
            epsilon=spent.epsilon,
        )
    return Report(progress, metrics, ending)


def _metrics_in(path: pathlib.Path, *, start: int, **options: Any) -> Metrics:
    """Opens the files of the first process; the others write nothing."""
    if jax.process_index() > 0:
        return Metrics([], start=start, **options)
    file = MetricsFile(path, start)
    outputs = [file, TensorBoard(path, start)]
    return Metrics(outputs, start=start, seconds=file.seconds, **options)
