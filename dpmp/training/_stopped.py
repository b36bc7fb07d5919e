"""A run that is stopped: Ctrl-C waits for the step, and the state is kept."""

import contextlib
import signal
import threading
from collections.abc import Iterator

import jax

from dpmp.accounting import round_up
from dpmp.mechanism import DPSGD
from dpmp.training._state import TrainingState


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Lets Ctrl-C raise KeyboardInterrupt at the block's end; a second one at once.

    A step uses up the arrays of the state before it. An interruption between that and
    the assignment of the new state would lose both.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    default = signal.default_int_handler
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not default:
        yield
        return
    received = []

    def remember(number, frame):
        if received:
            default(number, frame)
        received.append(number)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, default)
    if received:
        raise KeyboardInterrupt


def kept(
    mechanism: DPSGD, state: TrainingState, error: BaseException
) -> TrainingState | None:
    """Returns the state of a stopped run, if it is whole, and says so in the error."""
    if any(x.is_deleted() for x in jax.tree.leaves(state)):
        error.add_note(
            "dpmp: the step itself failed, and its state is lost. Go on from a state "
            "that you saved."
        )
        return None
    step, spent = int(state.step), ""
    if mechanism.is_private and mechanism.delta is not None:
        epsilon = mechanism.guarantee(step).epsilon if step else 0.0
        spent = f" with epsilon {round_up(epsilon)} spent"
    error.add_note(
        f"dpmp: the run stopped after step {step} of {mechanism.iterations}{spent}. "
        "Its state is in trainer.last_state; fit goes on from there."
    )
    return state
