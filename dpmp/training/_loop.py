"""The loop of a run: draws a batch, makes a step, and releases it."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate, runs
from dpmp._warnings import warn
from dpmp.accounting import round_up
from dpmp.sources import Load, prefetched
from dpmp.training._account import Account
from dpmp.training._checks import Options, as_public
from dpmp.training._first_line import first_line
from dpmp.training._frames import clear_frames
from dpmp.training._metrics import TIMES, Metrics, OverflowWarning, finite
from dpmp.training._progress import Progress
from dpmp.training._signals import Signals
from dpmp.training._state import SensitiveOutputs, TrainingState
from dpmp.training._step import Step
from dpmp.training._tickets import Batch, Ticket, draw_batch, draw_tickets


class Loop:
    """Makes the steps of a run.

    Without a directory, every step is released as it is made. With a directory, steps
    are released in blocks, by a checkpoint. A step that was not released costs nothing,
    unless something that depends on it is seen: `stopped` pays for such steps.
    """

    def __init__(
        self,
        step: Step,
        state: TrainingState,
        account: Account,
        options: Options,
        *,
        stop: int,
        load: Load,
        root: np.ndarray | None,
        signals: Signals,
        directory: runs.RunDirectory | None,
        lines: list[dict[str, Any]],
        saved: int | None,
    ):
        """Prepares to go on from a state.

        `root` is passed to `draw_tickets`. `lines` and `saved` come from `newest`.
        """
        mechanism, start = account.mechanism, account.start
        self._stop, self._load, self._root = stop, load, root
        self._step, self._state = step, state._replace(spent=None)
        self._account, self._options, self._signals = account, options, signals
        self._directory, self._process = directory, os.getpid()
        self._started = start  # steps that were started
        self._saved = saved  # steps of the newest checkpoint, None for another state's
        self._paid = start  # steps that are in the ledger
        self._is_saving = False
        self._progress = Progress(
            mechanism,
            account.epsilon,
            start,
            stop,
            enabled=options.progress and jax.process_index() == 0,
            first_line=self._first_line,
        )
        self._file = None
        if directory is not None and jax.process_index() == 0:
            self._file = runs.MetricsFile(directory.path, lines, start)
        self._metrics = Metrics(
            start=start,
            seconds=self._file.seconds if self._file else 0.0,
            iterations=mechanism.iterations,
            report_steps=self._progress.report_steps,
            epsilon=self._progress.epsilon,
        )
        self._overflows = OverflowWarning(
            mechanism.overflow_stddev / mechanism.expected_batch_size,
            start=start,
            is_dynamic=step.dynamic_scale is not None,
        )

    @property
    def state(self) -> TrainingState:
        """The state after the last complete step."""
        return self._state._replace(spent=self._account.spent(self._started))

    @property
    def started(self) -> int:
        """The number of steps that were started."""
        return self._started

    def run(self) -> None:
        """Makes all steps, each with a ticket."""
        options = self._options
        steps = range(self._started, self._stop)
        tickets = draw_tickets(steps, self._root, self._account.before.times_made)

        def draw(ticket: Ticket) -> Batch:
            mechanism, sharding = options.mechanism, options.batch_sharding
            return draw_batch(mechanism, self._load, sharding, ticket)

        with (
            self._progress,
            prefetched(draw, tickets, depth=options.prefetch) as batches,
        ):
            while self._started < self._stop:
                self._make_step(batches)
                is_last = self._started in (self._stop, self._end_of_block())
                if self._directory is not None:
                    self._metrics.collect(self._started, self._state, is_last=is_last)
                if self._directory is None or is_last:
                    self._release()
                else:
                    self._show({}, {})
            if self._directory is not None and self._started == self._account.start:
                self._save_complete()
            self._signals.act()

    def _save_complete(self) -> None:
        """Saves a state that has all its steps, and that was made elsewhere."""
        if self._saved is None:
            warn(
                f"the directory has another state after {self._started} steps, which "
                "stays there. The state that was given is returned, and is not saved. "
                "To save it, pass another checkpoint_dir."
            )
        elif self._is_unsaved(self._started):
            self._save([])

    def _is_unsaved(self, step: int) -> bool:
        return step > (self._account.start if self._saved is None else self._saved)

    def end(self) -> None:
        """Shows the last line, when all files are written."""
        place = ""
        if self._directory is not None and self._saved == self._started:
            place = f", saved in {self._directory.path}"
        self._progress.end(place)

    def stopped(
        self, error: BaseException
    ) -> tuple[TrainingState | None, BaseException | None]:
        """Pays for steps that an error may reveal, and saves the state, if possible.

        Adds notes to the error.

        Returns:
          The state after the last complete step, or None if it is lost. If the ledger
          could not be written, the error to raise instead: nobody may see a state, or
          an error, that was not paid for.
        """
        clear_frames(error)
        if self._process != os.getpid():  # a child must leave the run to its parent
            return None, None
        self._signals.ignore()
        step = _step_of(self._state)
        is_signal = self._signals.have_raised(error)
        if is_signal and step is not None:
            self._started = step  # a signal reveals nothing about the step it stopped
        try:
            if not is_signal:
                self._pay(self._started)
            if step is not None and self._is_unsaved(step) and not self._is_saving:
                self._save_stopped(error)
        except BaseException as cause:  # the first error must not be lost
            _add_note(error, f"dpmp: {str(cause) or type(cause).__name__}")
        try:
            self._pay(self._started)  # if the state could not be saved
        except Exception as failure:
            kind = OSError if isinstance(failure, OSError) else RuntimeError
            return None, kind(f"{failure} The run has stopped.")
        except BaseException:  # from a signal handler of the program itself
            return None, KeyboardInterrupt()
        if step is None:
            from_there = "the last checkpoint" if self._directory else "a saved state"
            _add_note(
                error,
                f"dpmp: the step itself failed, and its state is lost. Go on from "
                f"{from_there}.",
            )
            return None, None
        if step > 0:  # there are steps that could be lost
            _add_note(error, self._describe_stop(step))
        if isinstance(error, SystemExit):  # Python would show nothing
            notes = (x.removeprefix("dpmp: ") for x in getattr(error, "__notes__", []))
            with contextlib.suppress(Warning):  # where warnings are errors
                warn(" ".join(notes))
        return self.state, None

    def _save_stopped(self, error: BaseException) -> None:
        if self._directory is None:
            return
        if jax.process_count() > 1:  # the others may be at another step
            _add_note(
                error, "dpmp: run all processes again, to go on from a checkpoint."
            )
        else:
            self._save(self._metrics.take())

    def _describe_stop(self, step: int) -> str:
        mechanism, spent = self._account.mechanism, ""
        if mechanism.is_private and mechanism.delta is not None:
            epsilon = round_up(self._account.epsilon(self._started))
            spent = f" with epsilon {epsilon} spent"
        where = "in trainer.last_state; fit goes on from there"
        if self._directory is not None and self._saved == step:
            where = "saved. Run the same program again, to go on from there"
        return (
            f"dpmp: the run stopped after step {step} of {mechanism.iterations}{spent}."
            f" Its state is {where}."
        )

    def _first_line(self) -> str:
        with self._signals.interruptible():  # it may load two examples
            return first_line(self._step, self._state, self._load)

    def _check_process(self) -> None:
        _validate.require(
            self._process == os.getpid(),
            "a run must go on in the process that began it",
            process="a forked one",
            fix="Leave the forked process by os._exit, or start a run of its own.",
            error=RuntimeError,
        )

    def _make_step(self, batches: Iterator[Batch]) -> None:
        self._check_process()
        # Before the batch: one that does not load reveals something about this step.
        self._started += 1
        with self._signals.interruptible():
            batch = next(batches)
            is_padding = batch.is_padding_example
            prepared = self._step.prepare(self._state, batch.examples, is_padding)
        callback = self._options.sensitive_callback
        if prepared.program.calls_host or callback is not None:
            # Something outside may see values of these steps before their release.
            self._pay(min(self._stop, self._end_of_block()))
        self._state, outputs = self._step.run(prepared, batch.ticket)
        if callback is not None:
            with self._signals.interruptible():
                callback(SensitiveOutputs(*outputs, jnp.asarray(is_padding)))
            self._check_process()  # it may have forked

    def _end_of_block(self) -> int:
        return -(-self._started // self._options.every) * self._options.every

    def _pay(self, stop: int) -> None:
        """Puts steps into the ledger before anything that depends on them is seen."""
        if self._directory is not None and stop > self._paid:
            segment = self._account.segment(self._paid, stop)
            self._directory.charge(segment)
            self._paid = stop

    def _save(self, lines: list[dict[str, Any]]) -> None:
        """Releases the steps since the last checkpoint by a new one."""
        assert self._directory is not None
        step, self._is_saving = int(self._state.step), True
        # Times depend a little on the sizes of the batches, so these lines have none.
        without_times = [
            {name: x for name, x in line.items() if name not in TIMES} for line in lines
        ]
        spent = bytes(self._account.spent(step)).decode()
        self._directory.release(
            self._state,
            self._account.segment(max(self._saved or 0, self._account.start), step),
            {"lines": without_times, "spent": spent},
            keep=self._options.keep,
        )
        self._saved, self._paid = step, max(self._paid, step)
        self._is_saving = False

    def _release(self) -> None:
        """Releases the steps since the last release, and shows their values."""
        lines, public = self._metrics.take(), {}
        if self._directory is not None:
            self._save(lines)
        if self._options.callback is not None:
            with self._signals.interruptible():
                state = jax.tree.map(lambda x: x, self.state)  # callbacks may change it
                public = as_public(self._options.callback(state))
            self._check_process()  # the callback may have forked
        if self._file is not None:
            numbers = {f"public/{name}": finite(x) for name, x in public.items()}
            self._file.append([*lines[:-1], lines[-1] | numbers])
        metrics = self._state.metrics
        is_reported = bool(lines) or self._started in self._progress.report_steps
        self._overflows.look(self._started, metrics, is_reported=is_reported)
        self._show(metrics, public)

    def _show(self, metrics: Mapping[str, Any], public: Mapping[str, float]) -> None:
        with self._signals.interruptible():  # it waits for the device
            self._progress.update(self._started, self._state.step, metrics, public)


def _add_note(error: BaseException, text: str) -> None:
    with contextlib.suppress(Exception):  # an error may refuse
        error.add_note(text)


def _step_of(state: TrainingState) -> int | None:
    """The number of steps, or None if a step has used up the state, or has failed."""
    try:
        arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
        if not any(x.is_deleted() for x in arrays):
            return int(jax.block_until_ready(state).step)
    except Exception:
        return None
    return None
