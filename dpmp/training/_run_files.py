"""What a run writes into its directory: a lock, a ledger, and checkpoints.

Every step is in the ledger before it begins. After a crash, the steps since the last
checkpoint are made again. They have the same bits, and release nothing new, as long as
the keys, the data, the program and the machine are the same. Otherwise they are made
with fresh keys, so that their noise is independent, and they count twice.
"""

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from dpmp import _validate, runs
from dpmp._warnings import warn
from dpmp.mechanism import DPSGD
from dpmp.runs._checkpoints import Checkpoints
from dpmp.runs._environment import describe_environment
from dpmp.runs._processes import agreed, described_by_all, on_first
from dpmp.training._keys import with_fresh_keys
from dpmp.training._same_run import NO_FACTS, entry_of, newest, origin_of, probe
from dpmp.training._source import Load
from dpmp.training._state import TrainingState
from dpmp.training._stopped import sigterm_as_exit

_SAVED = "dpmp: the state is saved. Run the same program again to go on."


class NoFiles:
    """A run without a directory."""

    path: pathlib.Path | None = None

    def __init__(
        self, state: TrainingState, stop: int, epsilon: Callable[[int], float]
    ):
        """The run goes on from `state`, to `stop` steps.

        The function `epsilon` computes what is spent after a number of steps.
        """
        self.state, self.stop, self.epsilon = state, stop, epsilon

    def begin(self, step: int) -> None:
        """Is called before each step."""

    def end(self, step: int, state: TrainingState) -> None:
        """Is called with the number of steps and the state after each step."""

    def keep(self, state: TrainingState, error: BaseException) -> None:
        """Is called with the state after the last complete step of a stopped run."""


class RunFiles(NoFiles):
    """The ledger and the checkpoints of a run, with the state that it goes on from."""

    def __init__(
        self,
        state: TrainingState,
        stop: int,
        epsilon: Callable[[int], float],
        *,
        path: pathlib.Path,
        entry: runs.Entry,
        checkpoints: Checkpoints,
        beside: dict[str, np.ndarray],
        every: int,
    ):
        """Prepares to record the steps from `state` to `stop`."""
        super().__init__(state, stop, epsilon)
        self.path = path
        self._entry, self._checkpoints = entry, checkpoints
        self._beside, self._every = beside, every
        self._begun = int(state.step)
        self._save(self._begun, state)
        checkpoints.wait()

    def begin(self, step: int) -> None:
        """Writes the steps up to the next checkpoint into the ledger."""
        if step == self._begun:
            self._begun = min(step + self._every - step % self._every, self.stop)
            on_first(lambda: self._entry.begin(step, self._begun))

    def end(self, step: int, state: TrainingState) -> None:
        """Starts to save the state if a checkpoint is due."""
        if step == self._begun:
            self._save(step, state)

    def keep(self, state: TrainingState, error: BaseException) -> None:
        """Saves the state of a stopped run, if possible, and says so in the error."""
        if jax.process_count() > 1:  # the others may be at another step
            error.add_note("dpmp: run all processes again, to go on from a checkpoint.")
            return
        step = int(state.step)
        try:
            try:
                self._save(step, state)
                self._checkpoints.wait()
            finally:
                self._entry.stop_before(step)
        except Exception as cause:  # the first error must not be lost
            error.add_note(f"dpmp: this state could not be saved: {cause}")
        else:
            error.add_note(_SAVED)
        if isinstance(error, SystemExit):  # Python would show nothing
            warn(error.__notes__[-1])

    def _save(self, step: int, state: TrainingState) -> None:
        self._checkpoints.save(step, {"state": state, **self._beside})


def restore(directory: str | os.PathLike[str], like: TrainingState) -> TrainingState:
    """The state of the newest checkpoint in a directory, or `like` if there is none."""
    if not pathlib.Path(directory).is_dir():
        return like
    with _locked(directory) as path, _opened(path) as checkpoints:
        saved = checkpoints.restore({"state": like, **NO_FACTS})
        return like if saved is None else saved["state"]


@contextlib.contextmanager
def run_files(
    directory: str | os.PathLike[str] | None,
    state: TrainingState,
    stop: int,
    *,
    mechanism: DPSGD,
    load: Load,
    describe_program: Callable[[TrainingState], str],
    check_state: Callable[[TrainingState], None],
    every: int,
    keep: int,
    epsilon_budget: float | None,
) -> Iterator[NoFiles]:
    """Opens the records of a run, and continues the run that is in the directory.

    Args:
      directory: the directory, or None for no files.
      state: the state to go on from, unless the directory has a later one.
      stop: the number of steps to make.
      mechanism: the mechanism of the run.
      load: loads examples.
      describe_program: a function of the state that describes the program of a step.
      check_state: raises an error for the state of another mechanism.
      every: the number of steps between two checkpoints.
      keep: the number of checkpoints to keep.
      epsilon_budget: the epsilon at which to stop, or None.
    """
    _check(directory, mechanism, every=every, keep=keep, epsilon_budget=epsilon_budget)
    epsilon = _epsilon_of(mechanism)
    if directory is None:
        yield NoFiles(state, stop, epsilon)
        return
    with (
        sigterm_as_exit(),
        _locked(directory) as path,
        _opened(path, keep) as checkpoints,
    ):
        ledger = runs.Ledger.open(path)
        on_first(lambda: None)  # none writes before all have read
        state, origin = newest(
            checkpoints, ledger, state, load, mechanism.num_examples, check_state
        )
        step = int(state.step)
        if step >= stop and step in checkpoints.steps:
            _warn_of_later_state(step, stop)
            yield NoFiles(state, stop, epsilon)
            return
        state, beside, entry = _with_entry(
            state,
            origin,
            stop,
            checkpoints=checkpoints,
            ledger=ledger,
            mechanism=mechanism,
            load=load,
            describe_program=describe_program,
        )
        for steps in entry.gaps(step):  # they were made without the directory
            on_first(functools.partial(entry.begin, steps.start, steps.stop))
        if epsilon_budget is not None and step < stop:
            stop = _within_budget(entry, epsilon_budget, mechanism, step, stop)
        if mechanism.delta is not None:
            epsilon = entry.epsilon_after(step, delta=mechanism.delta)
        yield RunFiles(
            state,
            stop,
            epsilon,
            path=path,
            entry=entry,
            checkpoints=checkpoints,
            beside=beside,
            every=every,
        )


def _with_entry(
    state: TrainingState,
    origin: np.ndarray,
    stop: int,
    *,
    checkpoints: Checkpoints,
    ledger: runs.Ledger,
    mechanism: DPSGD,
    load: Load,
    describe_program: Callable[[TrainingState], str],
) -> tuple[TrainingState, dict[str, np.ndarray], runs.Entry]:
    """The state to go on from, what is saved beside it, and the ledger's entry for it.

    The state has fresh keys if its next steps were begun before, and would not have the
    same bits.
    """
    step, environment = int(state.step), describe_environment()

    def entry_for(state: TrainingState, beside: dict[str, np.ndarray]) -> runs.Entry:
        program = described_by_all(describe_program(state) + environment)
        return entry_of(ledger, mechanism, state, beside, program)

    beside = {"data": probe(load, mechanism.num_examples, state), "origin": origin}
    is_saved = checkpoints.has(step, {"state": state, **beside})
    if not is_saved:
        beside["origin"] = origin_of(state, origin)
    entry = entry_for(state, beside)
    if step == stop:  # only the steps that made the state are to be recorded
        return state, beside, entry
    # Nobody can say whether an unsaved state is the one that made the lost steps.
    is_new = not is_saved and entry.were_begun(step, stop)
    if not agreed(is_new or entry.repeats_noise(step, stop)):
        return state, beside, entry
    warn(
        f"the steps that were begun after step {step} were lost, and the state, the "
        "program or the machine has changed since. They are made again with fresh "
        "keys, and the ledger counts them twice."
    )
    state = with_fresh_keys(state)
    beside["data"] = probe(load, mechanism.num_examples, state)
    entry = entry_for(state, beside)
    # The ledger has a key before anything else does. Else steps with the former key
    # could stand for steps that are made with this one, without the directory.
    on_first(lambda: entry.enter(step))
    return state, beside, entry


def _warn_of_later_state(step: int, stop: int) -> None:
    if step > stop:
        warn(
            f"the directory has a state after {step} steps, but the run was to stop at "
            f"{stop}. Nothing was trained, and the later state is returned. To have an "
            "earlier one, train in another directory."
        )


@contextlib.contextmanager
def _locked(directory: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Holds the lock of the directory, by the first of several processes."""
    with contextlib.ExitStack() as stack:
        on_first(lambda: stack.enter_context(runs.locked(directory)))
        yield pathlib.Path(directory).absolute()


def _check(
    directory: Any,
    mechanism: DPSGD,
    *,
    every: Any,
    keep: Any,
    epsilon_budget: float | None,
) -> None:
    _validate.positive_integer(every=every, fix="Use 100, for example.")
    _validate.positive_integer(keep=keep, fix="Use 3, for example.")
    _validate.require(
        directory is not None or epsilon_budget is None,
        "a budget needs a directory, whose ledger has all steps that were begun",
        checkpoint_dir=directory,
        fix="Pass checkpoint_dir too.",
    )
    is_path = isinstance(directory, str | os.PathLike | None)
    _validate.require(
        is_path,
        "checkpoint_dir must be a path",
        type=type(directory).__name__,
        fix='Use "runs/1", for example.',
    )
    _validate.require(
        directory is None or not os.path.isfile(directory),
        "checkpoint_dir must be a directory",
        checkpoint_dir=directory,
        fix="Use another name.",
    )
    if epsilon_budget is not None:
        _validate.positive(epsilon_budget=epsilon_budget, fix="Use 8, for example.")
        _validate.require(
            mechanism.delta is not None,
            "a budget needs the delta of the mechanism",
            delta=None,
            fix="Use mechanism.calibrate(epsilon=, delta=), or DPSGD(delta=).",
        )


def _epsilon_of(mechanism: DPSGD) -> Callable[[int], float]:
    return lambda step: mechanism.guarantee(step).epsilon


@contextlib.contextmanager
def _opened(path: pathlib.Path, keep: int = 3) -> Iterator[Checkpoints]:
    checkpoints = Checkpoints(path, keep=keep)
    try:
        yield checkpoints
    except BaseException as error:
        # A checkpoint that cannot be written must not hide the first error.
        try:
            checkpoints.close()
        except Exception as cause:
            error.add_note(f"dpmp: the last checkpoint was not written: {cause}")
        raise
    checkpoints.close()


def _within_budget(
    entry: runs.Entry, epsilon_budget: float, mechanism: DPSGD, step: int, stop: int
) -> int:
    delta = mechanism.delta
    assert delta is not None  # since _check
    steps = entry.steps_within(epsilon_budget, delta=delta, start=step, stop=stop)
    _validate.require(
        steps > 0,
        "the budget must allow one more step",
        epsilon_budget=epsilon_budget,
        step=step,
        fix="The ledger of the directory has all steps that were begun: "
        "python -m dpmp ledger DIR.",
    )
    if step + steps < stop:
        warn(
            f"the budget of epsilon {epsilon_budget} allows {step + steps} steps of "
            f"{stop}; the run will stop there."
        )
    return step + steps
