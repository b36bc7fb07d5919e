"""A run that is stopped: signals wait for the step, and the state is kept."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from dpmp.accounting import round_up
from dpmp.mechanism import DPSGD
from dpmp.training._state import TrainingState


def _exit(number: int, frame: Any) -> None:
    """Ends the process as SIGTERM does, but as an exception, so that files are closed.

    Shells report a process that a signal ended with the status 128 + its number.
    """
    raise SystemExit(128 + number)


_HANDLERS: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: _exit,
}


@contextlib.contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Lets SIGTERM raise SystemExit, unless the program has a handler of its own.

    Schedulers of clusters send SIGTERM some seconds before they kill a process.
    """
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not (is_default and _in_main_thread()):
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM act at the block's end; a second one acts at once.

    A step uses up the arrays of the state before it. An interruption between that and
    the assignment of the new state would lose both.
    """
    handlers = {n: h for n, h in _HANDLERS.items() if signal.getsignal(n) is h}
    if not _in_main_thread():
        handlers = {}
    received = []

    def remember(number: int, frame: Any) -> None:
        if received:
            handlers[number](number, frame)
        received.append(number)

    for number in handlers:
        signal.signal(number, remember)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in received:
        handlers[number](number, None)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def is_whole(state: TrainingState) -> bool:
    """Whether no array of a state was used up by a step."""
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    return not any(x.is_deleted() for x in arrays)


def kept(
    mechanism: DPSGD,
    epsilon: Callable[[int], float],
    state: TrainingState,
    error: BaseException,
) -> TrainingState | None:
    """Returns the state of a stopped run, if it is whole, and says so in the error.

    The function `epsilon` computes what is spent after a number of steps.
    """
    if not is_whole(state):
        error.add_note(
            "dpmp: the step itself failed, and its state is lost. Go on from a state "
            "that you saved."
        )
        return None
    step, spent = int(state.step), ""
    if step == 0:  # nothing was made that could be lost
        return state
    if mechanism.is_private and mechanism.delta is not None:
        spent = f" with epsilon {round_up(epsilon(step))} spent"
    error.add_note(
        f"dpmp: the run stopped after step {step} of {mechanism.iterations}{spent}. "
        "Its state is in trainer.last_state; fit goes on from there."
    )
    return state
