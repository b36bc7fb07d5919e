"""A run that goes on with anything changed adds its noise to no other sums.

A copy of the directory, made in the middle of a run, is what a killed process leaves.
"""

import dataclasses
import math
import os
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp
from dpmp import runs
from dpmp.runs._history import guarantee

SIZE = 32
DATA = {"x": np.ones((SIZE, 3), np.float32), "y": np.ones(SIZE, np.float32)}
PARAMS = {"w": jnp.zeros(3)}
MECHANISM = dpmp.DPSGD(
    num_examples=SIZE,
    expected_batch_size=8,
    iterations=6,
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    delta=1e-3,
)


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def make_trainer(loss_fn=loss_fn):
    return dpmp.DPTrainer(
        mechanism=MECHANISM,
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.1),
        policy="float32",
    )


TRAINER = make_trainer()


def init(params=PARAMS):
    return TRAINER.init(params, prng_key=jax.random.key(0))


def run(directory, state=None, *, trainer=TRAINER, data=DATA, **kwargs):
    state = init() if state is None else state
    kwargs = {"checkpoint_dir": directory, "every": 2, "progress": False} | kwargs
    return trainer.fit(state, data, **kwargs)


def killed_after(num_steps, tmp_path, state=None, **kwargs):
    def callback(state):
        if int(state.step) == num_steps:
            newest = str(num_steps // 2 * 2)  # it is being written
            while not (tmp_path / "run" / "checkpoints" / newest).is_dir():
                time.sleep(0.01)
            shutil.copytree(tmp_path / "run", tmp_path / "killed")

    run(tmp_path / "run", state, callback=callback, **kwargs)
    return tmp_path / "killed"


def runs_in(*directories):
    ledgers = [runs.Ledger.open(directory) for directory in directories]
    return [run for ledger in ledgers for run in ledger.runs]


def num_steps(directory):
    return [run.num_steps for run in runs_in(directory)]


def edited(state):
    return state._replace(params={"w": state.params["w"] + 1})


def warns_of_lost_steps(after):
    match = f"after step {after} were lost, and the state, the program"
    return pytest.warns(UserWarning, match=match)


def test_an_edited_state_repeats_lost_steps_with_fresh_keys(tmp_path):
    directory = killed_after(3, tmp_path, every=2)
    state = TRAINER.init_or_restore(PARAMS, directory)
    assert int(state.step) == 2
    with warns_of_lost_steps(after=2):
        run(directory, edited(state))
    assert num_steps(directory) == [4, 4]


def test_a_first_state_of_other_parameters_gets_fresh_keys(tmp_path):
    directory = killed_after(1, tmp_path)
    with warns_of_lost_steps(after=0):
        run(directory, init({"w": jnp.ones(3)}))
    assert num_steps(directory) == [2, 6]


def test_fresh_keys_are_saved_before_they_are_used(tmp_path):
    directory = killed_after(3, tmp_path)
    state = edited(TRAINER.init_or_restore(PARAMS, directory))
    with warns_of_lost_steps(after=2):
        end = run(directory, state, callback=None, stop_at=3)
    again = tmp_path / "again"
    (directory / "checkpoints" / "3").rename(tmp_path / "lost")
    shutil.copytree(directory, again)
    assert num_steps(again) == [4, 1]
    repeated = run(again, TRAINER.init_or_restore(PARAMS, again), stop_at=3)
    np.testing.assert_array_equal(repeated.params["w"], end.params["w"])
    assert num_steps(again) == [4, 1]


def test_an_edited_state_without_lost_steps_is_what_a_killed_run_goes_on_from(tmp_path):
    state = edited(run(tmp_path / "run", stop_at=2))
    expected = np.asarray(state.params["w"])
    directory = killed_after(3, tmp_path, state)
    assert num_steps(directory) == [2, 2]  # steps of two states, each counted once
    restored = TRAINER.init_or_restore(PARAMS, directory)
    np.testing.assert_array_equal(restored.params["w"], expected)


def test_steps_without_the_directory_are_recorded_when_the_run_returns(tmp_path):
    trainer = make_trainer()
    state = run(tmp_path, stop_at=2, trainer=trainer)
    state = trainer.fit(state, DATA, progress=False, stop_at=4)
    run(tmp_path, state, trainer=trainer)
    assert sum(num_steps(tmp_path)) == 6


def test_steps_of_a_restored_state_without_the_directory_are_warned_of(tmp_path):
    directory = killed_after(3, tmp_path)
    trainer = make_trainer()
    state = trainer.init_or_restore(PARAMS, directory)
    with pytest.warns(UserWarning, match="whose ledger will not have the steps"):
        trainer.fit(state, DATA, progress=False, stop_at=3)


@pytest.mark.filterwarnings("error")
def test_another_state_than_the_restored_one_is_not_warned_of(tmp_path):
    trainer = make_trainer()
    run(tmp_path, trainer.init_or_restore(PARAMS, tmp_path), trainer=trainer)
    trainer.fit(trainer.init(PARAMS), DATA, progress=False)


@pytest.mark.parametrize("clears", [False, True])
def test_what_python_code_reads_is_read_once(clears):
    """The steps of a killed run are made again by code that starts anew."""
    rate = {"now": 0.1}

    def update(updates, state, params=None):
        return jax.tree.map(lambda x: -rate["now"] * x, updates), state

    def callback(state):
        rate["now"] = 0.0
        if clears:
            jax.clear_caches()  # jax traces all functions again

    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    trainer = dataclasses.replace(TRAINER, optimizer=optimizer)
    end = trainer.fit(init(), DATA, progress=False, callback=callback)
    expected = make_trainer().fit(init(), DATA, progress=False)
    np.testing.assert_allclose(end.params["w"], expected.params["w"], rtol=1e-6)


def test_a_copy_that_goes_on_in_the_same_way_is_the_same_run(tmp_path):
    directory = killed_after(3, tmp_path)
    for path in (tmp_path / "run", directory):
        run(path, TRAINER.init_or_restore(PARAMS, path))
    one, two = runs_in(tmp_path / "run", directory)
    assert (one.key, one.data, one.steps) == (two.key, two.data, two.steps)


def test_one_key_and_other_first_parameters_have_no_finite_epsilon(tmp_path):
    run(tmp_path / "one")
    run(tmp_path / "two", init({"w": jnp.ones(3)}))
    records = runs_in(tmp_path / "one", tmp_path / "two")
    assert math.isinf(guarantee(records, delta=1e-3).epsilon)


def test_copies_that_go_on_from_edited_states_have_no_finite_epsilon(tmp_path):
    run(tmp_path / "one", stop_at=2)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for path, is_edited in ((tmp_path / "one", False), (tmp_path / "two", True)):
        state = TRAINER.init_or_restore(PARAMS, path)
        run(path, edited(state) if is_edited else state)
        assert sum(num_steps(path)) == 6
    records = runs_in(tmp_path / "one", tmp_path / "two")
    assert math.isinf(guarantee(records, delta=1e-3).epsilon)


def test_two_runs_with_one_key_and_other_data_have_no_finite_epsilon(tmp_path):
    run(tmp_path / "one")
    run(tmp_path / "two", data=DATA | {"y": DATA["y"] + 1})
    records = runs_in(tmp_path / "one", tmp_path / "two")
    assert math.isinf(guarantee(records, delta=1e-3).epsilon)


def scaled_by(factor):
    weights = factor * jnp.arange(1.0, 33.0)
    return lambda params, batch: loss_fn(params, batch) * weights.sum()


def on_host(factor):
    shape = jax.ShapeDtypeStruct((), jnp.float32)

    def scaled(params, batch):
        factor_ = jax.pure_callback(
            lambda: np.float32(factor), shape, vmap_method="sequential"
        )
        return loss_fn(params, batch) * factor_

    return scaled


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (scaled_by(1), scaled_by(-1)),
        (scaled_by(1), scaled_by(2)),
        (on_host(1), on_host(2)),
    ],
    ids=["negated", "doubled", "on the host"],
)
def test_a_change_of_what_the_loss_closes_over_gets_fresh_keys(tmp_path, one, two):
    directory = killed_after(3, tmp_path, trainer=make_trainer(one))
    with warns_of_lost_steps(after=2):
        run(directory, trainer=make_trainer(two))
    assert num_steps(directory) == [4, 4]


def test_a_loss_may_close_over_a_key(tmp_path):
    key = jax.random.key(1)

    def loss(params, batch):
        return loss_fn(params, batch) * jax.random.uniform(key)

    with pytest.warns(UserWarning, match="a key that never changes"):
        run(tmp_path, trainer=make_trainer(loss))
    assert num_steps(tmp_path) == [6]


def test_a_program_may_change_its_directory_during_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    run("run", callback=lambda _: os.chdir(tmp_path / "elsewhere"))
    assert num_steps(tmp_path / "run") == [6]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_error_of_a_source_is_not_hidden_by_parameters_of_numpy():
    class Broken:
        def __len__(self):
            return SIZE

        def __getitem__(self, indices):
            raise ArithmeticError

    state = init()._replace(params={"w": np.zeros(3, np.float32)})
    with pytest.raises(RuntimeError, match="the source raised ArithmeticError"):
        make_trainer().fit(state, Broken(), progress=False)
