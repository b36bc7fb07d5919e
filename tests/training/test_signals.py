"""A run that is stopped by a signal is saved, and pays for complete steps alone."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import jax
import pytest
from environment import environment
from small_runs import (
    PARAMS,
    FailureError,
    Source,
    checkpoints,
    fit,
    fresh_trainer,
    num_of_state,
    num_paid,
    ranges,
    same,
)

from dpmp.sources import _batches
from dpmp.training._loop import Loop
from dpmp.training._programs import Programs
from dpmp.training._stops import Signals

pytestmark = pytest.mark.usefixtures("ctrl_c")


def fail():
    raise FailureError


def send(number):
    """Sends a signal to this process, unless that would end the tests."""
    assert signal.getsignal(number) is not signal.SIG_DFL
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "times", "error"),
    [
        (signal.SIGINT, 1, KeyboardInterrupt),
        (signal.SIGTERM, 1, SystemExit),
        (signal.SIGINT, 2, KeyboardInterrupt),
    ],
)
def test_a_signal_waits_for_the_end_of_the_step_and_a_second_one_does_not(
    number, times, error
):
    done, before = [], signal.getsignal(number)

    def make_step():
        with Signals(sigterm=True) as signals:
            for _ in range(times):
                os.kill(os.getpid(), number)
            done.append("step")
            signals.act()

    with pytest.raises(error):
        make_step()
    assert len(done) == 2 - times
    assert signal.getsignal(number) is before


def test_a_handler_of_the_users_own_stays():
    received = []
    signal.signal(signal.SIGINT, lambda *_: received.append(1))  # `ctrl_c` restores it
    with Signals(sigterm=True) as signals:
        os.kill(os.getpid(), signal.SIGINT)
        signals.act()
    assert received == [1]


def test_other_threads_leave_signals_alone():
    found = []

    def run():
        with Signals(sigterm=True):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


@pytest.mark.parametrize("has_directory", [False, True])
def test_sigterm_is_handled_where_there_is_a_directory(tmp_path, has_directory):
    found = []

    def callback(state):
        found.append(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)

    fit(fresh_trainer(), tmp_path if has_directory else None, callback=callback)
    assert {*found} == {not has_directory}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def notes_of_exit(error):
    """Python does not show the notes of SystemExit, so they are a warning."""
    is_exit = error is SystemExit
    return pytest.warns(match="Run the same") if is_exit else contextlib.nullcontext()


@pytest.mark.parametrize("place", ["fsync", "rename"])
def test_a_signal_lets_a_release_end(tmp_path, monkeypatch, place):
    """A scheduler does not wait for another one."""
    original, calls = getattr(os, place), []

    def interrupted(*args, **kwargs):
        if not calls and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            calls.append(send(signal.SIGTERM))
        return original(*args, **kwargs)

    monkeypatch.setattr(os, place, interrupted)
    trainer = fresh_trainer()
    with pytest.warns(match="after step 3 of 7"), pytest.raises(SystemExit):
        fit(trainer, tmp_path)
    assert checkpoints(tmp_path) == [3]
    assert num_paid(tmp_path) == 3


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_last_step_and_costs_nothing_more(
    tmp_path, number, prefetch
):
    trainer = fresh_trainer()

    def action():
        send(number)
        time.sleep(0.05)

    options = {"data": Source(5, action), "prefetch": prefetch, "every": 100}
    error = SystemExit if number == signal.SIGTERM else KeyboardInterrupt
    with notes_of_exit(error), pytest.raises(error) as caught:
        fit(trainer, tmp_path, **options)
    if error is SystemExit:
        assert caught.value.code == 128 + signal.SIGTERM
    assert "Run the same program again" in "".join(caught.value.__notes__)
    step = int(trainer.last_state.step)
    assert 1 <= step <= 5
    assert checkpoints(tmp_path)[-1] == step
    assert {event for event, *_ in ranges(tmp_path)} == {"released"}
    assert num_paid(tmp_path) == num_of_state(trainer.last_state) == step
    assert same(trainer.init_or_restore(PARAMS, tmp_path), trainer.last_state)
    fit(trainer, tmp_path)
    assert num_paid(tmp_path) == 7


def test_a_signal_to_one_of_several_processes_costs_nothing(tmp_path, monkeypatch):
    """It cannot save a state alone, so it must not show one."""
    stopped = Loop.stopped

    def of_two_processes(self, error):
        with monkeypatch.context() as patched:
            patched.setattr(jax, "process_count", lambda: 2)
            return stopped(self, error)

    monkeypatch.setattr(Loop, "stopped", of_two_processes)
    trainer = fresh_trainer()
    source = Source(5, lambda: send(signal.SIGTERM))
    with pytest.warns(match="run all processes again"), pytest.raises(SystemExit):
        fit(trainer, tmp_path, data=source, prefetch=0)
    assert trainer.last_state is None
    assert checkpoints(tmp_path) == [3]
    assert ranges(tmp_path) == [("released", 0, 3)]
    fit(trainer, tmp_path)
    assert num_paid(tmp_path) == 7


@pytest.mark.parametrize("has_directory", [False, True])
def test_a_signal_during_a_step_is_raised_once(tmp_path, monkeypatch, has_directory):
    trainer, run, calls = fresh_trainer(), Programs.run, []

    def interrupted(self, *args):
        calls.append(None)
        if len(calls) == 2:
            send(signal.SIGINT)
        return run(self, *args)

    monkeypatch.setattr(Programs, "run", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(trainer, tmp_path if has_directory else None)
    assert "after step 2 of 7" in "".join(caught.value.__notes__)
    assert caught.value.__context__ is None
    assert int(trainer.last_state.step) == num_of_state(trainer.last_state) == 2


@pytest.mark.parametrize("has_signal", [False, True])
@pytest.mark.parametrize("error", [FailureError, KeyboardInterrupt, SystemExit])
def test_an_exception_that_is_no_signal_is_paid_for_and_says_nothing(
    tmp_path, error, has_signal
):
    """A program may raise KeyboardInterrupt itself, because of what it has seen."""

    def callback(state):
        if has_signal:  # which the callback swallows
            with contextlib.suppress(KeyboardInterrupt):
                send(signal.SIGINT)
                time.sleep(0.01)

    said = "cannot decode record 7"

    def leave():
        raise error(said)

    trainer, raised = fresh_trainer(), RuntimeError if error is FailureError else error
    with notes_of_exit(error), pytest.raises(raised) as caught:
        fit(trainer, tmp_path, data=Source(5, leave), callback=callback, prefetch=0)
    assert said not in str(caught.value)
    if error is not FailureError:
        assert caught.value.args == ((1,) if error is SystemExit else ())
    assert int(trainer.last_state.step) == 4
    assert num_paid(tmp_path) == num_of_state(trainer.last_state) == 5


HANGING = """
import sys, time
from small_runs import Source, fit, new_trainer

def hang():
    print("hangs", flush=True)
    time.sleep(600)

fit(new_trainer(), sys.argv[1], data=Source(5, hang), every=100)
"""


@pytest.mark.slow
def test_a_process_whose_source_hangs_ends_after_sigterm(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, str(tmp_path)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "hangs\n"
    time.sleep(3)  # the steps whose batches were loaded are made
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - begin < 15
    assert process.returncode == 128 + signal.SIGTERM
    assert "Run the same program again" in errors
    assert num_paid(tmp_path) == checkpoints(tmp_path)[-1] == 4


def test_a_signal_after_an_error_does_not_make_its_step_free(tmp_path, monkeypatch):
    is_raised, result = threading.Event(), _batches._result

    def announced(attempt):
        if attempt[1] is not None:
            is_raised.set()
        return result(attempt)

    class Slow(Source):
        """Gets a signal while it loads the batch after the one that fails."""

        def __getitem__(self, indices):
            if self.calls == self.number:
                assert is_raised.wait(30)
                time.sleep(0.2)
                send(signal.SIGINT)
                time.sleep(0.1)
            return super().__getitem__(indices)

    monkeypatch.setattr(_batches, "_result", announced)
    trainer = fresh_trainer()
    with pytest.raises(RuntimeError, match="FailureError"):
        fit(trainer, tmp_path, data=Slow(4, fail), prefetch=2)
    assert num_paid(tmp_path) == num_of_state(trainer.last_state) == 4


@pytest.mark.parametrize("name", ["fsync", "ignore"])
def test_a_handler_of_the_program_cannot_show_an_error_that_is_not_paid_for(
    tmp_path, monkeypatch, name
):
    """asyncio, for example, has one that raises KeyboardInterrupt anywhere."""

    def interrupt(*_):
        raise KeyboardInterrupt

    def set_handler():
        place = Signals if name == "ignore" else os
        monkeypatch.setattr(place, name, interrupt)
        fail()

    trainer = fresh_trainer()
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(trainer, tmp_path, data=Source(5, set_handler), every=100)
    monkeypatch.undo()
    assert caught.value.__context__ is caught.value.__cause__ is None
    assert trainer.last_state is None
    assert num_paid(tmp_path) == 0


def test_sigterm_before_the_first_step_ends_the_program_in_order(tmp_path):
    trainer = fresh_trainer()
    source = Source(1, lambda: send(signal.SIGTERM))
    with warnings.catch_warnings(action="error"), pytest.raises(SystemExit) as caught:
        fit(trainer, tmp_path, data=source, prefetch=0)
    assert caught.value.code == 128 + signal.SIGTERM
    assert num_paid(tmp_path) == 0
