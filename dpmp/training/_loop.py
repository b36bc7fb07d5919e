"""The loop of a run: loads a batch, makes a step, records it, and reports it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from dpmp._typing import PyTree
from dpmp.training._batches import Batches
from dpmp.training._checks import as_public
from dpmp.training._prefetch import prefetched
from dpmp.training._report import Report
from dpmp.training._run_files import NoFiles
from dpmp.training._state import Callback, SensitiveOutputs, TrainingState
from dpmp.training._step import Step
from dpmp.training._stopped import deferred_signals, is_whole


@dataclasses.dataclass(kw_only=True)
class Loop:
    """Makes the steps of a run; `DPTrainer.fit` documents the callbacks.

    Attributes:
      state: the state after the last complete step.
      stop: the number of steps after which to stop.
      step: makes a step.
      batches: the batches.
      prefetch: how many of them are loaded ahead.
      files: the files of the run.
      report: shows and records the steps.
      callback: is called with the state after every step, and may return numbers.
      sensitive_callback: is called with values without noise after every step.
    """

    state: TrainingState
    stop: int
    step: Step
    batches: Batches
    prefetch: int
    files: NoFiles
    report: Report
    callback: Callback | None
    sensitive_callback: Callable[[SensitiveOutputs], None] | None

    def run(self) -> None:
        """Makes all steps. If it is stopped, the state is recorded."""
        try:
            numbers, draw = range(int(self.state.step), self.stop), self.batches.draw
            with (
                self.report.running(),
                prefetched(draw, numbers, depth=self.prefetch) as batches,
            ):
                for number, batch in zip(numbers, batches, strict=True):
                    self._make_step(number, batch)
        except BaseException as error:
            if is_whole(self.state):
                self.files.keep(self.state, error)
            raise

    def _make_step(self, number: int, batch: tuple[PyTree, Any]) -> None:
        done = number + 1
        with deferred_signals():
            self.files.begin(number)
            self.state, outputs = self.step.run(self.state, *batch)
            self.files.end(done, self.state)
        if self.sensitive_callback is not None:
            is_padding = jnp.asarray(batch[1])
            self.sensitive_callback(SensitiveOutputs(*outputs, is_padding))
        public = {}
        if self.callback is not None:
            public = as_public(self.callback(self.state))
        self.report.update(done, self.state, public)
