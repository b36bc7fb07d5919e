"""The loop of a run: draws a batch, makes a step, pays for it, and shows it.

Nothing that depends on a step is seen before the ledger has the step:

- Steps that reach the end of a block are paid for by their checkpoint.
- Where a function on the host may see values inside of a step, the whole block is
  charged before.
- A signal depends on no value. So the complete steps are saved, and no others cost. Of
  several processes, none can save alone: the steps since the last checkpoint are lost.
- Any other error may depend on all steps that were started. They are charged.
- If that fails, both the error and the state are withheld.
- A forked process leaves everything to its parent.

Without a directory, each block is one step. The state itself says what it cost; if it
is lost, the next state of the trainer pays.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _validate, runs
from dpmp._warnings import warn
from dpmp.accounting import round_up
from dpmp.sources import Load, prefetched
from dpmp.training._account import Account, LastStep, newest, past_of
from dpmp.training._checks import Options, as_public, is_used_up
from dpmp.training._programs import Programs
from dpmp.training._report import TIMES, Report, finite, first_line
from dpmp.training._state import SensitiveOutputs, TrainingState
from dpmp.training._stops import Signals, add_note, clear_frames, warn_of_exit
from dpmp.training._tickets import Batch, Root, draw_batch, draw_tickets

_LARGER = (
    "Epsilon may become larger than planned. So publish trainer.guarantee(state), and "
    "not mechanism.statement() alone."
)
_RUN_AGAIN = "run all processes again, to go on from a checkpoint."


class Loop:
    """Makes the steps of a run, in blocks that end with a release."""

    def __init__(
        self,
        programs: Programs,
        state: TrainingState,
        load: Load,
        options: Options,
        directory: runs.RunDirectory | None,
        signals: Signals,
        root: Root | None,
        last_step: LastStep,
    ):
        """Prepares to go on from a state, or from a later one in the directory."""
        self._programs, self._load, self._root = programs, load, root
        self._directory, self._signals, self._options = directory, signals, options
        self._last_step, self._process = last_step, os.getpid()
        mechanism = programs.step.mechanism
        # The directory may have a later state, but someone has seen this one.
        given = past_of(mechanism, state)
        # `_saved`: steps of the newest checkpoint, None for another state's.
        state, lines, self._saved = newest(state, directory)
        account = Account.of(
            mechanism, state, last_step.failed, directory, others=given
        )
        if directory is not None and options.epsilon_budget is not None:
            directory.check_delta()
        account = account.within(options.stop, options.epsilon_budget)
        _warn_of_past(account, options.stop)
        self._stop = max(account.start, min(options.stop, account.end))
        self._account, self._state = account, state._replace(spent=None)
        self._started = self._paid = account.start  # steps started; in the ledger
        self._is_saving = False
        self._past = None  # noise to which that of the next step is correlated
        is_first, self._file = jax.process_index() == 0, None
        if directory is not None and is_first:
            self._file = runs.MetricsFile(directory.path, lines, account.start)
        self._report = Report(
            mechanism,
            account.epsilon,
            account.start,
            self._stop,
            enabled=options.progress and is_first,
            seconds=self._file.seconds if self._file else 0.0,
            has_dynamic_scale=programs.step.dynamic_scale is not None,
            first_line=self._first_line,
        )

    @property
    def state(self) -> TrainingState:
        """The state after the last complete step."""
        return self._state._replace(spent=self._account.spent(self._started))

    def run(self) -> None:
        """Makes all steps, each with a ticket."""
        options, start = self._options, self._account.start
        steps, times_made = range(start, self._stop), self._account.before.times_made
        mechanism = options.mechanism
        tied = 0 if mechanism.makes_steps_alone else start
        tickets = draw_tickets(steps, self._root, times_made, tied)
        drawer = mechanism.batch_selection_strategy.drawer
        draw = functools.partial(
            draw_batch,
            mechanism,
            self._load,
            options.batch_sharding,
            draw=drawer(mechanism.num_examples, start=start),
        )
        with (
            self._report,
            prefetched(draw, tickets, depth=options.prefetch) as batches,
        ):
            while self._started < self._stop:
                self._make_step(batches)
                is_last = self._started == self._end_of_block()
                if self._directory is not None:
                    self._report.record(self._started, self._state, is_last=is_last)
                self._release() if is_last else self._show({}, {})
            if self._directory is not None and start == self._started:
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
            self._save()

    def _is_unsaved(self, step: int) -> bool:
        return step > (self._account.start if self._saved is None else self._saved)

    def end(self) -> None:
        """Shows the last line, when all files are written."""
        place = ""
        if self._directory is not None and self._saved == self._started:
            place = f", saved in {self._directory.path}"
        self._report.end(place)

    def stopped(self, error: BaseException) -> TrainingState | None:
        """Pays for steps that an error may reveal, and saves the state, if possible.

        Adds notes to the error. Returns the state after the last complete step, or None
        if it is lost. An exception that this raises must take the place of the error.
        """
        clear_frames(error)
        self._past = None  # the error's frames lead to this loop
        if self._process != os.getpid():
            return None
        self._signals.ignore()
        step = _step_of(self._state)
        is_signal = self._signals.have_raised(error)
        if is_signal and self._directory is not None and jax.process_count() > 1:
            # The others may be at another step. So the complete steps are withheld,
            # which costs nothing, as if the process had been killed.
            add_note(error, _RUN_AGAIN)
            warn_of_exit(error)
            return None
        if is_signal and step is not None:
            self._started = step
        try:
            if not is_signal:
                self._pay(self._started)
            can_save = self._directory is not None and not self._is_saving
            if can_save and step is not None and self._is_unsaved(step):
                if jax.process_count() == 1:
                    self._save()
                else:  # the others may be at another step
                    add_note(error, _RUN_AGAIN)
        except BaseException as cause:  # the first error must not be lost
            add_note(error, str(cause) or type(cause).__name__)
        self._pay(self._started)  # if the state could not be saved
        if step is None:
            from_there = "the last checkpoint" if self._directory else "a saved state"
            lost = "the state of the run is lost"
            add_note(error, f"{lost}. Go on from {from_there}.")
            return None
        if step > 0:  # there are steps that could be lost
            add_note(error, self._describe_stop(step))
        warn_of_exit(error)
        return self.state

    def settle(self, last_state: TrainingState | None) -> None:
        """Leaves steps that neither a state nor the ledger has to the next state."""
        account = self._account
        if last_state is not None or self._directory is not None:
            self._last_step.have_paid(account.before)
        elif self._started > account.start:
            # No state has these steps: they were planned beside those of every state.
            lost = account.segment(account.start, self._started)
            planned = account.end - account.start
            self._last_step.fail(dataclasses.replace(lost, planned=planned))

    def _describe_stop(self, step: int) -> str:
        mechanism, spent = self._account.mechanism, ""
        if mechanism.is_private and mechanism.delta is not None:
            epsilon = round_up(self._account.epsilon(self._started))
            spent = f" with epsilon {epsilon} spent"
            if self._started < mechanism.iterations:
                planned = round_up(self._account.epsilon(mechanism.iterations))
                spent += f" ({planned}, of all steps, if a result led to the stop)"
        where = "in trainer.last_state; fit goes on from there"
        if self._directory is not None and self._saved == step:
            where = "saved. Run the same program again, to go on from there"
        elif self._directory is not None:
            where += (
                ". It is not saved: a new start makes the steps after the last "
                "checkpoint again, at a new cost"
            )
        return (
            f"the run stopped after step {step} of {mechanism.iterations}{spent}. Its "
            f"state is {where}."
        )

    def _first_line(self) -> str:
        with self._signals.interruptible():  # it may load two examples
            return first_line(self._programs.step, self._state, self._load)

    @contextlib.contextmanager
    def _user_code(self) -> Iterator[None]:
        """Lets a signal act in the block, which may fork the process."""
        with self._signals.interruptible():
            yield
        self._check_process()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            _validate.fail(
                "a run must go on in the process that began it. Leave the forked "
                "process by os._exit, or start a run of its own.",
                process="a forked one",
                error=RuntimeError,
            )

    def _make_step(self, batches: Iterator[Batch]) -> None:
        self._check_process()
        # Before the batch: one that does not load reveals something about this step.
        self._started += 1
        with self._signals.interruptible():
            batch = next(batches)
            program, args = self._programs.prepare(self._state, batch, self._past)
        callback = self._options.sensitive_callback
        if program.calls_host or callback is not None:
            # Something outside may see values of these steps before their release.
            self._pay(self._end_of_block())
        self._state, outputs, self._past = self._programs.run(program, args)
        if callback is not None:
            is_padding = jnp.asarray(batch.is_padding_example)
            with self._user_code():
                callback(SensitiveOutputs(*outputs, is_padding))

    def _end_of_block(self) -> int:
        every = 1 if self._directory is None else self._options.every
        return min(self._stop, -(-self._started // every) * every)

    def _pay(self, stop: int) -> None:
        """Puts steps into the ledger before anything that depends on them is seen."""
        if self._directory is not None and stop > self._paid:
            self._directory.charge(self._account.segment(self._paid, stop))
            self._paid = stop

    def _save(self) -> list[dict[str, Any]]:
        """Releases the steps since the last checkpoint, and returns their metrics."""
        lines = self._report.take_lines()
        if self._directory is None:
            return lines
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
        return lines

    def _release(self) -> None:
        """Releases the steps since the last release, and shows their values."""
        lines, public = self._save(), {}
        if self._options.callback is not None:
            with self._user_code():
                state = jax.tree.map(lambda x: x, self.state)  # callbacks may change it
                public = as_public(self._options.callback(state))
            if is_used_up(self._state):
                _validate.fail(
                    "a callback must leave the arrays of its state in memory. "
                    "train_step and fit reuse them, so give them "
                    "jax.tree.map(jnp.copy, state).",
                    state="one whose arrays were reused or deleted",
                )
        if self._file is not None:
            numbers = {f"public/{name}": finite(x) for name, x in public.items()}
            self._file.append([*lines[:-1], lines[-1] | numbers])
        self._show(self._state.metrics, public)

    def _show(self, metrics: Mapping[str, Any], public: Mapping[str, float]) -> None:
        with self._signals.interruptible():  # it waits for the device
            self._report.show(self._started, self._state.step, metrics, public)


def _warn_of_past(account: Account, stop: int) -> None:
    """Warns of past steps that make epsilon larger than planned."""
    mechanism = account.mechanism
    if {x.cost for x in account.before.segments} - {mechanism.step_cost}:
        warn(
            "this run goes on from steps of another mechanism, and epsilon covers "
            "both. mechanism.statement() does not know of the other steps, so "
            "publish trainer.guarantee(state) with the model."
        )
    epoch, goes_on = mechanism.steps_per_epoch or 1, 0 < account.start < stop
    if goes_on and account.start % epoch:
        warn(
            f"the run goes on inside an epoch of random allocation, because step "
            f"{account.start} is no multiple of {epoch}. The rest of this epoch is "
            f"made of Poisson steps, which cost more. {_LARGER}"
        )
    if goes_on and mechanism.has_correlated_noise:
        warn(
            f"the run goes on after step {account.start} with a new sequence of "
            "noise, which does not cancel the noise of the steps before. To "
            "evaluate on the way, pass a callback to one call of fit. "
            f"{_LARGER}"
        )


def _step_of(state: TrainingState) -> int | None:
    """The number of steps, or None if a step has used up the state, or has failed."""
    with contextlib.suppress(Exception):
        if not is_used_up(state):
            return int(jax.block_until_ready(state).step)
    return None
