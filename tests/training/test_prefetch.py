"""Batches that are loaded ahead are the same batches, and leave nothing behind."""

import os
import signal
import threading
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp
from dpmp.training._prefetch import prefetched

SIZE = 32
DATA = {"x": np.ones((SIZE, 3), np.float32), "y": np.arange(SIZE, dtype=np.float32)}


class FailureError(Exception):
    pass


def threads():
    return [x for x in threading.enumerate() if x.name.startswith("dpmp-prefetch")]


def fails_at(failing):
    def draw(step):
        if step == failing:
            raise FailureError(step)
        return step

    return draw


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 7])
def test_batches_come_in_the_order_of_the_steps(depth, num_steps):
    def draw(step):
        time.sleep(0.002 * (step % 2))  # every second one takes longer
        return step

    steps = range(3, 3 + num_steps)
    with prefetched(draw, steps, depth=depth) as batches:
        assert list(batches) == list(steps)
    assert not threads()


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_batches_are_drawn_at_most_the_depth_ahead(depth):
    drawn = []
    with prefetched(drawn.append, range(12), depth=depth) as batches:
        for step, _ in enumerate(batches):
            assert len(drawn) <= step + 1 + depth
            deadline = time.monotonic() + 5
            while len(drawn) < min(12, step + 1 + depth):
                assert time.monotonic() < deadline, "they are not drawn ahead"
                time.sleep(0.001)


def test_one_batch_is_drawn_at_a_time():
    at_work, most = [], []

    def draw(step):
        at_work.append(step)
        time.sleep(0.002)
        most.append(len(at_work))
        at_work.remove(step)

    with prefetched(draw, range(8), depth=4) as batches:
        list(batches)
    assert set(most) == {1}


@pytest.mark.parametrize("depth", [0, 1, 2, 20])
@pytest.mark.parametrize("failing", [0, 1, 4, 9])
def test_an_error_is_raised_at_its_step_with_its_traceback(depth, failing):
    received = []

    def receive_all():
        with prefetched(fails_at(failing), range(10), depth=depth) as batches:
            received.extend(batches)

    def receive_each():
        with prefetched(fails_at(failing), range(10), depth=depth) as batches:
            for batch in batches:
                received.append(batch)

    for receive in (receive_all, receive_each):
        received.clear()
        with pytest.raises(FailureError) as caught:
            receive()
        text = "".join(traceback.format_exception(caught.value))
        assert "raise FailureError(step)" in text
        assert not threads()
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
    assert not threads()
    num_drawn = len(drawn)
    assert num_drawn <= 6
    time.sleep(0.01)
    assert len(drawn) == num_drawn


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
    assert not threads()


def make_trainer():
    return dpmp.DPTrainer(
        mechanism=dpmp.DPSGD(
            num_examples=SIZE,
            expected_batch_size=8,
            iterations=6,
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
            delta=1e-3,
        ),
        loss_fn=lambda w, batch: jnp.mean((batch["x"] @ w - batch["y"]) ** 2),
        optimizer=optax.sgd(0.1, momentum=0.9),
        policy="float32",
    )


TRAINER = make_trainer()


def start():
    return TRAINER.init(jnp.zeros(3), prng_key=jax.random.key(0))


def batches_of_the_run():
    key = int.from_bytes(np.asarray(start().sampling_key).tobytes(), "little")
    return list(TRAINER.mechanism.sampling.batch_iterator(SIZE, key))


class Recording:
    """A source of arrays that remembers its batches, and may fail at one."""

    def __init__(self, failing=None):
        self.failing, self.requests, self.threads = failing, [], set()

    def __len__(self):
        return SIZE

    def __getitem__(self, indices):
        if isinstance(indices, int):
            raise TypeError("an array, please")
        self.threads.add(threading.current_thread() is threading.main_thread())
        self.requests.append(indices)
        if self.failing is not None and np.array_equal(indices, self.failing):
            raise FailureError
        return {name: column[indices] for name, column in DATA.items()}


@pytest.mark.parametrize("stop_at", [1, 4, 6])
def test_a_run_is_the_same_bit_for_bit(stop_at):
    results = []
    for prefetch in (0, 2):
        source = Recording()
        state = TRAINER.fit(
            start(), source, progress=False, prefetch=prefetch, stop_at=stop_at
        )
        leaves = jax.tree.leaves((state.params, state.opt_state, state.step))
        results.append([np.asarray(x).tobytes() for x in leaves])
        results[-1] += [x.tobytes() for x in source.requests]
        assert source.threads == {prefetch == 0}
    assert results[0] == results[1]


@pytest.mark.parametrize("prefetch", [0, 2, 10])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_the_state_before_a_batch_that_fails_is_kept(prefetch, step):
    source = Recording(batches_of_the_run()[step])
    with pytest.raises(RuntimeError, match="the source raised FailureError") as caught:
        TRAINER.fit(start(), source, progress=False, prefetch=prefetch)
    assert not threads()
    assert "raise FailureError" in "".join(traceback.format_exception(caught.value))
    kept = TRAINER.last_state
    assert kept is not None
    assert int(kept.step) == step
    resumed = TRAINER.fit(kept, DATA, progress=False, prefetch=prefetch)
    whole = TRAINER.fit(start(), DATA, progress=False, prefetch=0)
    np.testing.assert_array_equal(resumed.params, whole.params)


@pytest.mark.parametrize("prefetch", [-1, 1.5, None, True])
def test_a_depth_that_is_no_number_of_batches_is_refused(prefetch):
    with pytest.raises(ValueError, match="prefetch must be an integer of at least 0"):
        TRAINER.fit(start(), DATA, progress=False, prefetch=prefetch)
