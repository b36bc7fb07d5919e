"""A run with a directory loses nothing: it goes on with the same bits, or says why not.

A copy of the directory, made in the middle of a run, is what a killed process leaves.
"""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp
from dpmp import accounting, runs
from dpmp.training._batches import Batches
from dpmp.training._step import Step

SIZE = 32
CANARY = 12345.678  # in the data alone
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(SIZE, 3)).astype(np.float32),
    "y": np.full(SIZE, CANARY, np.float32),
}
PARAMS = {"w": jnp.zeros(3)}
KEY = jax.random.key(5)
MECHANISM = dpmp.DPSGD(
    num_examples=SIZE,
    expected_batch_size=8,
    iterations=7,
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    delta=1e-3,
)


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def make_trainer(rate=0.1, **fields):
    return dpmp.DPTrainer(
        mechanism=dataclasses.replace(MECHANISM, **fields),
        loss_fn=loss_fn,
        optimizer=optax.sgd(rate, momentum=0.9),
        policy="float32",
    )


def run(directory=None, *, trainer=None, state=None, key=KEY, data=DATA, **kwargs):
    trainer = trainer or make_trainer()
    if state is None:
        state = trainer.init(PARAMS, prng_key=key)
    if directory is not None:
        kwargs = {"checkpoint_dir": directory, "every": 3} | kwargs
    return trainer.fit(state, data, progress=False, **kwargs)


@pytest.fixture(scope="module")
def undisturbed():
    return run()


def assert_same(state, other):
    def words(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    for a, b in zip(*map(jax.tree.leaves, (state, other)), strict=True):
        assert words(a).tobytes() == words(b).tobytes()


def killed_after(num_steps, tmp_path):
    """The directory of a run that was killed, with its newest checkpoint."""
    target = tmp_path / "killed"
    newest = str(num_steps // 3 * 3)  # it is being written

    def callback(state):
        if int(state.step) == num_steps:
            while not (tmp_path / "run" / "checkpoints" / newest).is_dir():
                time.sleep(0.01)
            shutil.copytree(tmp_path / "run", target)

    run(tmp_path / "run", callback=callback)
    return target


def ledger_of(directory):
    return runs.Ledger.open(directory)


def num_steps(directory):
    return [run.num_steps for run in ledger_of(directory).runs]


def test_a_directory_does_not_change_the_run(tmp_path, undisturbed):
    assert_same(run(tmp_path), undisturbed)
    assert num_steps(tmp_path) == [7]
    assert ledger_of(tmp_path).guarantee(delta=1e-3) == MECHANISM.guarantee()


def test_the_ledger_has_every_step_before_it_begins(tmp_path):
    def callback(state):
        (steps,) = num_steps(tmp_path)
        assert steps >= int(state.step)

    run(tmp_path, callback=callback)


@pytest.mark.parametrize("step", [4, 5])
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path, undisturbed, step):
    directory = killed_after(step, tmp_path)
    trainer = make_trainer()
    state = trainer.init_or_restore(PARAMS, directory)
    assert int(state.step) < step
    assert_same(run(directory, trainer=trainer, state=state), undisturbed)
    assert num_steps(directory) == [7]


def test_fit_goes_on_from_the_newest_checkpoint_of_its_key(tmp_path, undisturbed):
    directory, seen = killed_after(5, tmp_path), []

    def callback(state):
        seen.append(int(state.step))

    assert_same(run(directory, callback=callback), undisturbed)
    assert seen == [4, 5, 6, 7]


class FailureError(Exception):
    pass


def stopped_after(num_steps, directory, error=FailureError, **kwargs):
    def callback(state):
        if int(state.step) == num_steps:
            raise error

    with pytest.raises(error) as caught:
        run(directory, callback=callback, **kwargs)
    return caught.value


def test_a_stopped_run_is_saved_at_its_last_step(tmp_path, undisturbed):
    error = stopped_after(5, tmp_path)
    assert "saved" in "".join(error.__notes__)
    state = make_trainer().init_or_restore(PARAMS, tmp_path)
    assert int(state.step) == 5
    assert num_steps(tmp_path) == [5]  # the record was for 6
    assert_same(run(tmp_path, state=state), undisturbed)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_step_end_and_saves_it(tmp_path, undisturbed, number):
    class Source:
        def __len__(self):
            return SIZE

        def __getitem__(self, indices):
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 8:  # the first of these look at the data
                os.kill(os.getpid(), number)
            return {name: x[indices] for name, x in DATA.items()}

    with contextlib.ExitStack() as expected:
        if number == signal.SIGTERM:  # Python does not show the notes of SystemExit
            expected.enter_context(pytest.warns(UserWarning, match="Run the same"))
        error = expected.enter_context(
            pytest.raises((SystemExit, KeyboardInterrupt), match="Run the same program")
        )
        run(tmp_path, data=Source())
    if number == signal.SIGTERM:
        assert error.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    state = make_trainer().init_or_restore(PARAMS, tmp_path)
    assert 1 <= int(state.step) < 7
    assert_same(run(tmp_path, state=state), undisturbed)


@pytest.mark.filterwarnings("default")
def test_lost_steps_of_another_program_get_fresh_noise_and_count_twice(tmp_path):
    directory = killed_after(5, tmp_path)
    before = make_trainer().init_or_restore(PARAMS, directory)
    with pytest.warns(UserWarning, match=r"after step 3 were lost.*fresh keys"):
        after = run(directory, trainer=make_trainer(rate=0.2))
    for name in ("sampling_key", "model_key"):
        assert np.any(getattr(after, name) != getattr(before, name))
    one, two = (runs.key_fingerprint(x.noise_state.prng_key) for x in (after, before))
    assert one != two
    assert num_steps(directory) == [6, 4]
    assert_same(run(directory, trainer=make_trainer(rate=0.2), state=after), after)


@pytest.mark.filterwarnings("default")
def test_the_last_line_has_the_epsilon_of_all_that_was_begun(tmp_path, capsys):
    directory = killed_after(5, tmp_path)
    trainer = make_trainer(rate=0.2)
    state = trainer.init_or_restore(PARAMS, directory)
    with pytest.warns(UserWarning, match="fresh keys"):
        trainer.fit(state, DATA, checkpoint_dir=directory, every=3)
    epsilon = ledger_of(directory).guarantee(delta=1e-3).epsilon
    assert epsilon > MECHANISM.guarantee().epsilon
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("dpmp: steps 4 to 7 done in 0:00:")
    claim = f"epsilon {accounting.round_up(epsilon)} at delta 0.001"
    assert last.endswith(f", {claim}, saved in {directory}")


def test_a_stopped_run_says_the_epsilon_of_all_that_was_begun(tmp_path):
    directory = killed_after(5, tmp_path)
    trainer = make_trainer(rate=0.2)
    state = trainer.init_or_restore(PARAMS, directory)

    def callback(state):
        raise KeyboardInterrupt

    with (
        pytest.warns(UserWarning, match="fresh keys"),
        pytest.raises(KeyboardInterrupt) as caught,
    ):
        run(directory, trainer=trainer, state=state, callback=callback)
    epsilon = ledger_of(directory).guarantee(delta=1e-3).epsilon
    assert epsilon > MECHANISM.guarantee(4).epsilon
    notes = "".join(caught.value.__notes__)
    assert (
        f"after step 4 of 7 with epsilon {accounting.round_up(epsilon)} spent" in notes
    )


def test_a_stopped_run_may_go_on_with_another_program(tmp_path):
    stopped_after(5, tmp_path)
    state = run(tmp_path, trainer=make_trainer(rate=0.2))
    keys = (x.noise_state.prng_key for x in (state, run()))
    assert len(set(map(runs.key_fingerprint, keys))) == 1
    assert num_steps(tmp_path) == [5, 2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("l2_clip_norm", 2.0),
        ("expected_batch_size", 9.0),
        ("noise_multiplier", 2.0),
        ("num_examples", SIZE + 1),
        ("arithmetic", "float32"),
    ],
)
def test_another_mechanism_is_refused_by_the_name_of_its_field(tmp_path, field, value):
    stopped_after(4, tmp_path)
    trainer = make_trainer(**{field: value})
    with pytest.raises(ValueError, match=f"{field}.*trainer.init"):
        trainer.init_or_restore(PARAMS, tmp_path)
    size = SIZE + (field == "num_examples")
    data = jax.tree.map(lambda x: np.resize(x, (size, *x.shape[1:])), DATA)
    with pytest.raises(ValueError, match=f"{field}.*trainer.init"):
        run(tmp_path, trainer=trainer, data=data)
    assert num_steps(tmp_path) == [4]


def test_another_key_is_refused(tmp_path):
    stopped_after(4, tmp_path)
    with pytest.raises(ValueError, match=r"prng_key=.*init_or_restore"):
        run(tmp_path, key=jax.random.key(6))
    assert num_steps(tmp_path) == [4]


def test_other_data_are_refused_without_showing_them(tmp_path):
    stopped_after(4, tmp_path)
    data = DATA | {"y": DATA["y"][::-1] + 1}
    with pytest.raises(ValueError, match="must go on with its data") as caught:
        run(tmp_path, data=data)
    assert str(CANARY)[:4] not in str(caught.value)


def test_a_ledger_without_checkpoints_is_refused(tmp_path):
    stopped_after(4, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="must have a checkpoint to go on from"):
        run(tmp_path)


def test_checkpoints_without_a_ledger_are_refused(tmp_path):
    stopped_after(4, tmp_path)
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(ValueError, match="must have its ledger"):
        run(tmp_path)


def test_steps_before_the_first_directory_are_in_the_ledger(tmp_path, undisturbed):
    state = run(stop_at=2)
    assert_same(run(tmp_path, state=state), undisturbed)
    assert num_steps(tmp_path) == [7]


def test_a_finished_run_is_returned(tmp_path, undisturbed):
    run(tmp_path)
    assert_same(run(tmp_path), undisturbed)
    assert num_steps(tmp_path) == [7]


def test_two_runs_in_one_directory_are_refused(tmp_path):
    with (
        runs.locked(tmp_path),
        pytest.raises(RuntimeError, match="only one process at a time"),
    ):
        run(tmp_path)


def test_a_budget_stops_the_run_before_it_is_exceeded(tmp_path):
    budget = (MECHANISM.guarantee(4).epsilon + MECHANISM.guarantee(5).epsilon) / 2
    with pytest.warns(UserWarning, match="allows 4 steps of 7"):
        state = run(tmp_path, epsilon_budget=budget)
    assert int(state.step) == 4
    assert ledger_of(tmp_path).guarantee(delta=1e-3) == MECHANISM.guarantee(4)
    with pytest.raises(ValueError, match="must allow one more step"):
        run(tmp_path, epsilon_budget=budget)
    assert int(run(tmp_path, epsilon_budget=100.0).step) == 7


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"epsilon_budget": 1.0}, "a budget needs a directory"),
        ({"every": 0}, "every must be an integer of at least 1"),
        ({"keep": 0}, "keep must be an integer of at least 1"),
        ({"checkpoint_dir": 3}, "checkpoint_dir must be a path"),
    ],
)
def test_bad_arguments_are_refused_first(kwargs, message):
    with pytest.raises(ValueError, match=message):
        run(**kwargs)


@pytest.mark.parametrize(
    ("budget", "delta", "message"),
    [
        (-1.0, 1e-3, "epsilon_budget must be a finite number above 0"),
        ("8", 1e-3, "epsilon_budget must be"),
        (8.0, None, "a budget needs the delta of the mechanism"),
    ],
)
def test_a_bad_budget_is_refused_before_a_file_is_written(
    tmp_path, budget, delta, message
):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", trainer=make_trainer(delta=delta), epsilon_budget=budget)
    assert not (tmp_path / "run").exists()


def test_a_state_beyond_the_wanted_step_is_returned_with_a_warning(tmp_path):
    run(tmp_path, stop_at=4)
    with pytest.warns(UserWarning, match="state after 4 steps.* to stop at 2"):
        state = run(tmp_path, stop_at=2)
    assert state.step == 4
    assert run(tmp_path, stop_at=4).step == 4  # no warning


def test_steps_made_without_the_directory_are_recorded_at_the_end(tmp_path):
    trainer = make_trainer()
    state = run(tmp_path, trainer=trainer, stop_at=2)
    state = run(trainer=trainer, state=state)
    assert sum(x.num_steps for x in ledger_of(tmp_path).runs) == 2
    run(tmp_path, trainer=trainer, state=state)
    assert sum(x.num_steps for x in ledger_of(tmp_path).runs) == 7


def test_steps_of_another_key_do_not_stand_for_those_of_the_run(tmp_path):
    """The killed run has begun all steps; the one after it has a fresh key."""
    trainer = make_trainer()

    def kill(state):
        if state.step == 3:
            shutil.copytree(tmp_path / "killed", tmp_path / "copy")

    run(tmp_path / "killed", trainer=trainer, callback=kill, every=7)
    other = make_trainer(rate=0.2)
    with pytest.warns(UserWarning, match="fresh keys"):
        state = run(tmp_path / "copy", trainer=other, stop_at=2)
    state = run(trainer=other, state=state, stop_at=5)
    run(tmp_path / "copy", trainer=other, state=state)
    assert steps_by_key(tmp_path / "copy") == [7, 7]


def steps_by_key(directory):
    steps = collections.Counter()
    for x in ledger_of(directory).runs:
        steps[x.key] += x.num_steps
    return sorted(steps.values())


@pytest.mark.parametrize("goes_on_in", ["directory", "memory"])
@pytest.mark.parametrize("fails_in", [(Batches, "draw"), (Step, "run")])
def test_fresh_keys_are_known_to_the_ledger_before_their_first_step(
    tmp_path, monkeypatch, fails_in, goes_on_in
):
    def kill(state):
        if state.step == 3:
            shutil.copytree(tmp_path / "killed", tmp_path / "copy")

    run(tmp_path / "killed", callback=kill, every=7)
    trainer = make_trainer(rate=0.2)

    def fail(*_):
        raise OSError("no data")

    with monkeypatch.context() as patch:
        patch.setattr(*fails_in, fail)
        with (
            pytest.raises(OSError, match="no data"),
            pytest.warns(UserWarning, match="fresh keys"),
        ):
            run(tmp_path / "copy", trainer=trainer)
    assert steps_by_key(tmp_path / "copy") == [0, 7]
    state = trainer.last_state
    if goes_on_in == "memory":
        state = run(trainer=trainer, state=state, stop_at=5)
    run(tmp_path / "copy", trainer=trainer, state=state)
    assert steps_by_key(tmp_path / "copy") == [7, 7]


def test_an_array_of_the_loss_cannot_be_changed_during_a_run():
    weights = np.ones(3, np.float32)

    def weighted(params, batch):
        return loss_fn(jax.tree.map(lambda w: w * weights, params), batch)

    def change(state):
        weights[:] = 5.0

    results = []
    for callback in (None, change):
        weights[:] = 1.0
        trainer = dataclasses.replace(make_trainer(), loss_fn=weighted)
        results.append(run(trainer=trainer, callback=callback).params["w"])
    np.testing.assert_array_equal(*results)


def test_two_directories_of_one_key_and_other_loss_scales_are_no_repetition(tmp_path):
    policy = dpmp.Policy.from_name("mixed_float16")
    for name, initial in (("a", 4.0), ("b", 2.0**-8)):
        trainer = dataclasses.replace(
            make_trainer(),
            policy=policy,
            loss_scale=dpmp.loss_scaling.DynamicScale(initial=initial),
        )
        run(tmp_path / name, trainer=trainer, stop_at=2)
    both = [x for name in "ab" for x in ledger_of(tmp_path / name).runs]
    assert len({x.data for x in both}) == 2


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="checkpoint_dir must be a directory"):
        run(tmp_path / "file")


def test_only_the_owner_may_read_a_run(tmp_path):
    run(tmp_path / "run")
    for path in (tmp_path / "run").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_no_file_shows_an_example_or_a_key(tmp_path):
    state = run(tmp_path)
    words = np.asarray(jax.random.key_data(state.noise_state.prng_key))
    secrets = [str(CANARY)[:7].encode(), np.float32(CANARY).tobytes()]
    secrets += [str(int(x)).encode() for x in (*words, *state.sampling_key)]
    public = [p for p in tmp_path.rglob("*") if p.is_file() and "ocdbt" not in str(p)]
    assert {p.name for p in public} >= {"ledger.jsonl", "lock", "_METADATA"}
    for path in public:
        content = path.read_bytes()
        assert not any(secret in content for secret in secrets if len(secret) > 3)


def test_a_state_that_cannot_be_saved_is_not_lost(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    def callback(state):
        if int(state.step) == 2:
            monkeypatch.setattr("dpmp.runs._checkpoints.Checkpoints.save", full)

    trainer = make_trainer()
    with pytest.raises(OSError, match="No space left") as caught:
        run(tmp_path, trainer=trainer, callback=callback)
    assert "could not be saved" in "".join(caught.value.__notes__)
    assert int(trainer.last_state.step) == 3
    monkeypatch.undo()
    assert_same(run(tmp_path), run())


def test_records_are_json(tmp_path):
    run(tmp_path)
    lines = pathlib.Path(tmp_path, "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line)["start"] for line in lines] == [0, 3, 6]
