"""Batches that are loaded ahead are the same batches, and leave nothing behind."""

import contextlib
import os
import queue
import signal
import threading
import time
import traceback

import pytest
from small_runs import FailureError, Source, fit, keyed_trainer, same

from dpmp.sources import prefetched


def no_threads():
    deadline = time.monotonic() + 5
    while names := [x for x in threading.enumerate() if "_work" in x.name]:
        if time.monotonic() > deadline:
            return names
        time.sleep(0.001)
    return True


@pytest.mark.parametrize("depth", [0, 1, 2, 100])
@pytest.mark.parametrize("num_steps", [0, 1, 7])
def test_batches_are_drawn_one_at_a_time_and_at_most_the_depth_ahead(depth, num_steps):
    drawn, at_work, threads = [], [], []
    steps = range(3, 3 + num_steps)

    def draw(step):
        at_work.append(step)
        time.sleep(0.002 * (step % 2))  # every second one takes longer
        assert at_work == [step]
        at_work.remove(step)
        drawn.append(step)
        return step

    def tickets():  # where several processes agree on them, they do in one order
        for step in steps:
            threads.append(threading.current_thread())
            yield step

    with prefetched(draw, tickets(), depth=depth) as batches:
        for i, batch in enumerate(batches):
            assert batch == steps[i]
            most = min(num_steps, i + 1 + depth)
            deadline = time.monotonic() + 5
            while len(drawn) < most:
                assert time.monotonic() < deadline, "they are not drawn ahead"
                time.sleep(0.001)
            assert len(drawn) == len(threads) == most
    assert no_threads() is True
    assert drawn == list(steps)
    assert {*threads} <= {threading.current_thread()}


@pytest.mark.parametrize("depth", [0, 1, 2, 20])
@pytest.mark.parametrize("failing", [0, 1, 4, 9])
def test_an_error_is_raised_at_its_step_without_the_frames_of_the_batch(depth, failing):
    received = []

    def draw(step):
        if step == failing:
            raise FailureError(step)
        return step

    def receive():
        with prefetched(draw, range(10), depth=depth) as batches:
            received.extend(batches)

    with pytest.raises(FailureError) as caught:
        receive()
    frames = traceback.walk_tb(caught.value.__traceback__)
    assert "draw" not in {frame.f_code.co_name for frame, _ in frames}
    assert no_threads() is True
    assert received == list(range(failing))


@pytest.mark.parametrize("error", [FailureError, KeyboardInterrupt])
def test_nothing_is_left_when_the_loop_is_stopped(error):
    drawn = []

    def draw(step):
        drawn.append(step)
        time.sleep(0.002)
        return step

    def stop_at_two():
        with prefetched(draw, range(1000), depth=3) as batches:
            for step in batches:
                if step == 2:
                    raise error

    with pytest.raises(error):
        stop_at_two()
    assert no_threads() is True
    num_drawn = len(drawn)
    assert num_drawn <= 6
    time.sleep(0.01)
    assert len(drawn) == num_drawn


def test_the_thread_may_take_the_last_job_while_the_loop_is_stopped(monkeypatch):
    class TakenInBetween(queue.SimpleQueue):
        def empty(self):
            return False

    monkeypatch.setattr(queue, "SimpleQueue", TakenInBetween)

    def stop():
        with contextlib.suppress(FailureError), prefetched(str, [1, 2, 3], depth=2):
            raise FailureError

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_wait_for_a_batch():
    release = threading.Event()

    def draw(step):
        if step == 0:
            time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)
            release.wait(0.2)

    def wait_for_a_batch():
        with prefetched(draw, range(5), depth=2) as batches:
            next(batches)

    with pytest.raises(KeyboardInterrupt):
        wait_for_a_batch()
    assert no_threads() is True


class Recording(Source):
    """Remembers its batches and their threads."""

    def __init__(self):
        super().__init__(0, None)
        self.requests, self.threads = [], set()

    def __getitem__(self, indices):
        rows = super().__getitem__(indices)
        self.threads.add(threading.current_thread() is threading.main_thread())
        self.requests.append(indices.tobytes())
        return rows


def test_a_run_is_the_same_bit_for_bit():
    results = []
    for prefetch in (0, 2, 10):
        source = Recording()
        state = fit(keyed_trainer(), data=source, prefetch=prefetch)
        results.append((state, source.requests))
        assert (True in source.threads) >= (prefetch == 0)
        assert (False in source.threads) == (prefetch > 0)
    for state, requests in results[1:]:
        assert same(state, results[0][0])
        assert requests == results[0][1]
