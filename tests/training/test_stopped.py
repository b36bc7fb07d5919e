"""A run that is stopped loses nothing."""

import dataclasses
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp
from dpmp.training._stopped import deferred_signals

SIZE = 32
DATA = {"x": np.ones((SIZE, 3), np.float32), "y": np.ones(SIZE, np.float32)}


def make_trainer():
    return dpmp.DPTrainer(
        mechanism=dpmp.DPSGD(
            num_examples=SIZE,
            expected_batch_size=8,
            iterations=4,
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
            delta=1e-3,
        ),
        loss_fn=lambda w, batch: jnp.mean((batch["x"] @ w - batch["y"]) ** 2),
        optimizer=optax.sgd(0.1, momentum=0.9),
        policy="float32",
    )


def run(trainer, state=None, source=DATA, **kwargs):
    if state is None:
        state = trainer.init(jnp.zeros(3), prng_key=jax.random.key(0))
    return trainer.fit(state, source, progress=False, **kwargs)


def same(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


class FailureError(Exception):
    pass


def stop_after(num_steps, error=FailureError):
    def callback(state):
        if int(state.step) == num_steps:
            raise error

    return callback


class FailingSource:
    """Fails when the batch of the third step is loaded."""

    def __init__(self, trainer):
        state = trainer.init(jnp.zeros(3), prng_key=jax.random.key(0))
        key = int.from_bytes(np.asarray(state.sampling_key).tobytes(), "little")
        batches = list(trainer.mechanism.sampling.batch_iterator(SIZE, key))
        self.failing = batches[2]

    def __len__(self):
        return SIZE

    def __getitem__(self, indices):
        if np.array_equal(indices, self.failing):
            raise FailureError
        return {name: column[indices] for name, column in DATA.items()}


@pytest.mark.parametrize("error", [FailureError, KeyboardInterrupt])
def test_a_run_goes_on_from_the_state_of_an_exception(error):
    trainer = make_trainer()
    with pytest.raises(error) as caught:
        run(trainer, callback=stop_after(2, error))
    (note,) = caught.value.__notes__
    epsilon = dpmp.accounting.round_up(trainer.mechanism.guarantee(2).epsilon)
    assert f"after step 2 of 4 with epsilon {epsilon} spent" in note
    assert "trainer.last_state" in note
    assert int(trainer.last_state.step) == 2
    resumed = run(trainer, trainer.last_state)
    assert same(resumed.params, run(make_trainer()).params)
    assert trainer.last_state is None


def test_a_run_that_stops_before_its_first_step_says_nothing_of_a_state():
    trainer = dataclasses.replace(make_trainer(), loss_fn=lambda w, batch: batch["z"])
    with pytest.raises(KeyError) as caught:
        run(trainer)
    assert not any("stopped after" in note for note in caught.value.__notes__)
    assert int(trainer.last_state.step) == 0


def test_a_source_that_fails_loses_no_state():
    trainer = make_trainer()
    with pytest.raises(RuntimeError, match="the source raised FailureError"):
        run(trainer, source=FailingSource(trainer))
    assert int(trainer.last_state.step) == 2
    assert same(run(trainer, trainer.last_state).params, run(make_trainer()).params)


def test_a_state_whose_arrays_are_gone_is_not_kept():
    trainer = make_trainer()
    program = trainer._step.run

    def broken(state, *args):
        program(state, *args)
        raise FailureError

    object.__setattr__(trainer._step, "run", broken)
    with pytest.raises(FailureError) as caught:
        run(trainer)
    assert "state is lost" in caught.value.__notes__[-1]
    assert trainer.last_state is None


def interrupt(times, done):
    with deferred_signals():
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        done.append("step")


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_waits_for_the_end_of_the_step():
    done = []
    with pytest.raises(KeyboardInterrupt):
        interrupt(1, done)
    assert done == ["step"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_interrupt_does_not_wait():
    done = []
    with pytest.raises(KeyboardInterrupt):
        interrupt(2, done)
    assert not done


def test_a_handler_of_the_users_own_stays():
    received = []
    before = signal.signal(signal.SIGINT, lambda *_: received.append(1))
    try:
        with deferred_signals():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [1]
