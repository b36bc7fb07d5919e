"""A run with a directory goes on after any accident, and pays for what was released.

A copy of the directory, made at some instant, is what a process leaves that is killed
then. `test_killed.py` has processes that are killed.
"""

import contextlib
import os
import re
import shutil
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import NeighboringRelation
from small_runs import (
    ANOTHER_MECHANISM,
    DATA,
    KEY,
    MECHANISM,
    PARAMS,
    SIZE,
    FailureError,
    Source,
    checkpoints,
    copied,
    epsilon_of,
    fails_at,
    fit,
    fixed_tickets,
    fresh_trainer,
    keyed_trainer,
    killed_copies,
    loss_fn,
    new_trainer,
    noisier_trainer,
    num_of_state,
    num_paid,
    ranges,
    same,
)

from dpmp import accounting, runs
from dpmp.training import _tickets
from dpmp.training._account import Account
from dpmp.training._programs import Programs

PLANNED = MECHANISM.guarantee().epsilon


@pytest.fixture(scope="module")
def undisturbed():
    return fit(keyed_trainer())


# What is released, and when.


def test_a_run_pays_for_its_steps_before_a_callback_sees_them(tmp_path):
    seen = []

    def callback(state):
        with pytest.raises(RuntimeError, match="only one run at a time"):
            fresh_trainer().init_or_restore(PARAMS, tmp_path)
        seen.append(int(state.step))
        assert num_paid(tmp_path) == num_of_state(state) == state.step
        assert checkpoints(tmp_path)[-1] == state.step
        return {"accuracy": 0.5}

    state = fit(fresh_trainer(), tmp_path, keep=2, callback=callback)
    assert seen == [3, 6, 7]
    lines = runs.read_metrics(tmp_path)
    assert [x["step"] for x in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert [x["step"] for x in lines if "public/accuracy" in x] == seen
    assert ranges(tmp_path) == [("released", i, min(i + 3, 7)) for i in (0, 3, 6)]
    assert checkpoints(tmp_path) == [6, 7]
    assert epsilon_of(tmp_path) == PLANNED
    assert fresh_trainer().guarantee(state).epsilon == PLANNED
    assert same(fit(fresh_trainer(), tmp_path), state)  # it is returned
    assert num_paid(tmp_path) == 7
    for path in (tmp_path, *tmp_path.iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path


# Accidents.


def killed_in_release(monkeypatch, tmp_path, block, trainer, hook=list, **options):
    """What a kill leaves of a directory, at every instant of the release of a block.

    `hook` is called before the first.
    """
    release, calls, killed = runs.RunDirectory.release, [], []

    def release_and_copy(self, *args, **kwargs):
        calls.append(None)
        if len(calls) != block:
            return release(self, *args, **kwargs)
        hook()
        with killed_copies(self.path, tmp_path) as copies:
            release(self, *args, **kwargs)
        return killed.extend(copies)

    with monkeypatch.context() as patch:
        patch.setattr(runs.RunDirectory, "release", release_and_copy)
        fit(trainer, tmp_path / "run", **options)
    return killed


def some_of(killed):
    """Every fourth of the copies, and those before and after the record."""
    paid = [num_paid(directory) for directory in killed]
    record = paid.index(paid[-1])
    chosen = {*range(0, len(killed), 4), record - 1, record, len(killed) - 1}
    return [killed[i] for i in sorted(chosen)]


def test_a_run_goes_on_after_a_kill_at_any_instant_of_a_release(
    tmp_path, monkeypatch, undisturbed
):
    options, trainer = {"every": 3, "keep": 1}, keyed_trainer()
    killed = killed_in_release(monkeypatch, tmp_path, 2, trainer, **options)
    assert len(killed) > 5
    killed = some_of(killed)
    paid = [num_paid(directory) for directory in killed]
    assert paid == sorted(paid)
    assert {*paid} == {3, 6}
    for done, directory in zip(paid, killed, strict=True):
        assert int(trainer.init_or_restore(PARAMS, directory).step) == done
        seen = []
        state = fit(trainer, directory, callback=seen.append, **options)
        # Steps that were not released are made again with the same key.
        assert same(state, undisturbed)
        assert len(seen) == -(-(7 - done) // 3)
        assert num_paid(directory) == num_of_state(state) == 7
        assert epsilon_of(directory) == trainer.guarantee(state).epsilon == PLANNED
        assert not (directory / "pending").exists()
        steps = [x["step"] for x in runs.read_metrics(directory)]
        assert steps == [1, 2, 3, 4, 5, 6, 7]


def killed_before_and_after_the_record(monkeypatch, tmp_path, **options):
    """Copies with a whole checkpoint that is not released yet."""
    options = {"trainer": fresh_trainer(), "block": 2} | options
    killed = killed_in_release(monkeypatch, tmp_path, **options)
    after = next(x for x in killed if num_paid(x) == 6)
    return killed[killed.index(after) - 1], after


def test_steps_of_a_killed_run_are_made_again_with_fresh_bits(
    tmp_path, monkeypatch, taken
):
    before, after = killed_before_and_after_the_record(monkeypatch, tmp_path)
    torn = copied(after, tmp_path / "torn")  # an incomplete record is free
    file = torn / "ledger.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    for directory, done in ((before, 3), (after, 6), (torn, 3)):
        assert num_paid(directory) == done
        fit(fresh_trainer(), directory)
        assert num_paid(directory) == 7
        assert epsilon_of(directory) == PLANNED
    words = [key for _, _, key in taken]
    assert len(words) == 4 * (7 + 4 + 1 + 4)
    assert len({*words}) == len(words)


def test_a_record_without_its_checkpoint_is_charged(tmp_path, monkeypatch, undisturbed):
    """The only accident that costs more than was planned."""
    trainer, taken = keyed_trainer(), []
    _, directory = killed_before_and_after_the_record(
        monkeypatch, tmp_path, trainer=trainer
    )
    shutil.rmtree(directory / "pending")
    derived = _tickets._derived

    def record(root, step, start, times_made):
        taken.append((step, times_made))
        return derived(root, step, start, times_made)

    monkeypatch.setattr(_tickets, "_derived", record)
    with pytest.warns(
        UserWarning, match=r"paid for steps up to 6, .* after step 3. .* at a new"
    ):
        state = fit(trainer, directory)
    assert num_paid(directory) == 10
    assert num_of_state(state) == 7
    # The noise that was released may not be repeated, not even with a key.
    assert taken == [(3, 1), (4, 1), (5, 1), (6, 0)]
    assert not same(state.params, undisturbed.params)
    epsilon = epsilon_of(directory)
    assert trainer.guarantee(state).epsilon == PLANNED < epsilon


def test_nothing_of_a_lost_step_is_left(tmp_path, monkeypatch, capsys):
    """Its noisy values are in `pending` alone, until the next start."""
    fixed_tickets(monkeypatch)
    trainer, overflowed = fresh_trainer(), []
    run = Programs.run

    def record(self, *args):
        results = run(self, *args)
        overflowed.append(float(results.state.metrics["overflowed"]))
        return results

    monkeypatch.setattr(Programs, "run", record)
    shown = []
    killed, _ = killed_before_and_after_the_record(
        monkeypatch,
        tmp_path,
        hook=lambda: shown.append(capsys.readouterr().err),
        progress=True,
    )
    lost = overflowed[3:6]
    # Shown are the values of the first block, and the numbers of steps.
    (text,) = shown
    assert "step 5/7" in text
    shown_values = {*re.findall(r"overflowed (\S+),", text)}
    assert shown_values == {f"{overflowed[2]:.3g}"}
    facts = (killed / "pending" / "facts.json").read_text()
    assert all(str(x) in facts for x in lost)
    fit(trainer, killed)
    content = b"".join(x.read_bytes() for x in killed.rglob("*") if x.is_file())
    for kept, x in [(True, overflowed[0]), *((False, x) for x in lost)]:
        assert (str(x).encode() in content) == kept


# Exceptions.


def stopped(trainer, directory, error=FailureError, **options):
    with pytest.raises(error) as caught:
        fit(trainer, directory, **options)
    return "".join(getattr(caught.value, "__notes__", []))


def fail():
    raise FailureError


def test_an_exception_of_a_callback_pays_for_what_it_saw(tmp_path):
    trainer = fresh_trainer()
    notes = stopped(trainer, tmp_path, callback=fails_at(6))
    assert "after step 6 of 7" in notes
    assert ranges(tmp_path) == [("released", 0, 3), ("released", 3, 6)]
    assert int(trainer.last_state.step) == 6
    assert same(trainer.init_or_restore(PARAMS, tmp_path), trainer.last_state)
    fit(trainer, tmp_path)
    assert trainer.last_state is None
    assert epsilon_of(tmp_path) == PLANNED


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_exception_of_a_source_pays_for_the_step_of_its_batch(tmp_path, prefetch):
    trainer = fresh_trainer()
    stopped(trainer, None, RuntimeError, data=Source(5, fail), prefetch=prefetch)
    assert int(trainer.last_state.step) == 4
    assert num_of_state(trainer.last_state) == 5
    assert num_of_state(fit(trainer, state=trainer.last_state)) == 8
    options = {"data": Source(5, fail), "prefetch": prefetch}
    notes = stopped(trainer, tmp_path, RuntimeError, **options)
    assert "Its state is saved. Run the same program again" in notes
    assert ranges(tmp_path) == [
        ("released", 0, 3),
        ("charged", 3, 5),
        ("released", 3, 4),
    ]
    assert int(trainer.last_state.step) == 4
    assert num_of_state(trainer.last_state) == num_paid(tmp_path) == 5
    epsilon = MECHANISM.guarantee(5).epsilon
    assert trainer.guarantee(trainer.last_state).epsilon == epsilon
    assert f"with epsilon {accounting.round_up(epsilon)} spent" in notes
    with pytest.warns(UserWarning, match=r"paid for steps up to 5, .* after step 4"):
        fit(trainer, tmp_path)
    assert num_paid(tmp_path) == 8


def test_an_exception_of_a_sensitive_callback_pays_for_its_block(tmp_path):
    trainer, paid = fresh_trainer(), []

    def callback(outputs):
        paid.append(num_paid(tmp_path))
        if len(paid) == 5:
            fail()

    stopped(trainer, tmp_path, sensitive_callback=callback)
    assert paid == [3, 3, 3, 6, 6]
    assert checkpoints(tmp_path) == [3, 5]
    assert num_paid(tmp_path) == 6


def failing_step(number, *, runs_first=False):
    """A `Programs.run` that fails at one call, counted from 1."""
    run, calls = Programs.run, []

    def failing(self, *args):
        calls.append(None)
        if len(calls) < number or runs_first:
            result = run(self, *args)
        if len(calls) == number:
            raise FailureError
        return result

    return failing


@pytest.mark.parametrize(("number", "saved"), [(5, [3, 4]), (1, [])])
def test_an_exception_of_the_program_pays_for_the_step(
    tmp_path, monkeypatch, number, saved
):
    trainer = fresh_trainer()
    monkeypatch.setattr(Programs, "run", failing_step(number))
    stopped(trainer, tmp_path)
    assert checkpoints(tmp_path) == saved
    assert num_paid(tmp_path) == num_of_state(trainer.last_state) == number


def test_a_state_that_the_step_used_up_is_not_kept(tmp_path, monkeypatch):
    trainer = fresh_trainer()
    monkeypatch.setattr(Programs, "run", failing_step(1, runs_first=True))
    assert "the state of the run is lost" in stopped(trainer, tmp_path)
    assert trainer.last_state is None
    assert num_paid(tmp_path) == 1


def test_a_state_that_cannot_be_saved_is_not_lost(tmp_path, monkeypatch):
    def full(*_):
        monkeypatch.undo()
        raise OSError(28, "No space left on device")

    def callback(state):
        if int(state.step) == 3:
            monkeypatch.setattr(os, "fsync", full)

    trainer = fresh_trainer()
    with pytest.raises(OSError, match="No space left") as caught:
        fit(trainer, tmp_path, callback=callback)
    assert "Its state is in trainer.last_state" in "".join(caught.value.__notes__)
    assert int(trainer.last_state.step) == 6
    # Why the disk is full may depend on the steps.
    assert num_of_state(trainer.last_state) == num_paid(tmp_path) == 6
    assert int(fit(trainer, tmp_path, state=trainer.last_state).step) == 7
    assert epsilon_of(tmp_path) == PLANNED


# Going on in other ways.


def test_steps_before_and_beside_the_directory_are_paid_for_once(tmp_path):
    trainer = fresh_trainer()
    state = fit(trainer, stop_at=2)
    state = fit(trainer, tmp_path, state=state, stop_at=4)
    assert ranges(tmp_path)[0] == ("charged", 0, 2)
    state = fit(trainer, state=state)
    assert num_paid(tmp_path) == 4
    for _ in range(2):
        fit(trainer, tmp_path, state=state)
        assert num_paid(tmp_path) == 7
        assert checkpoints(tmp_path) == [3, 4, 7]
    assert epsilon_of(tmp_path) == PLANNED


def test_other_training_at_the_same_cost_goes_on(tmp_path):
    fit(fresh_trainer(), tmp_path, stop_at=3)
    trainer = new_trainer(
        optimizer=optax.sgd(0.5, momentum=0.5),
        loss_fn=lambda params, batch: jnp.mean(batch["x"] @ params["w"]),
        l2_clip_norm=2.0,
        iterations=10,  # more of them are one composition with these
    )
    said = "planned for 7 steps with this mechanism, and now for 10"
    with pytest.warns(UserWarning, match=said):
        state = fit(trainer, tmp_path)
    assert num_paid(tmp_path) == num_of_state(state) == 10
    epsilon = trainer.mechanism.guarantee().epsilon
    assert epsilon_of(tmp_path) == trainer.guarantee(state).epsilon == epsilon


def test_a_changed_mechanism_goes_on_and_its_costs_are_added(tmp_path):
    fit(fresh_trainer(), tmp_path, stop_at=3)
    trainer = noisier_trainer()
    with pytest.warns(UserWarning, match=r"publish trainer.guarantee\(state\)"):
        state = fit(trainer, tmp_path)
    assert num_paid(tmp_path) == num_of_state(state) == 7
    epsilon = epsilon_of(tmp_path)
    apart = [MECHANISM.guarantee(3).epsilon, trainer.mechanism.guarantee(4).epsilon]
    assert epsilon > sum(apart)
    assert trainer.guarantee(state).epsilon == epsilon
    # Anyone may compute it, not only the trainer that made the last steps.
    assert fresh_trainer().guarantee(state).epsilon == epsilon
    epsilon_of_lines = [x.get("epsilon") for x in runs.read_metrics(tmp_path)]
    assert epsilon_of_lines[-1] == epsilon


@ANOTHER_MECHANISM
def test_what_is_said_of_a_cost_that_comes_back_is_what_the_ledger_says(
    tmp_path, monkeypatch
):
    said = []
    epsilon = Account.epsilon

    def record(self, stop):
        said.append(epsilon(self, stop))
        return said[-1]

    one, other = fresh_trainer(), noisier_trainer()
    fit(one, tmp_path, stop_at=1)
    state = fit(other, stop_at=2)  # elsewhere
    monkeypatch.setattr(Account, "epsilon", record)
    fit(one, tmp_path, state=state, progress=True)
    assert max(said) == epsilon_of(tmp_path)


@pytest.mark.parametrize("has_directory", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"num_examples": SIZE + 1},
        {"neighboring_relation": NeighboringRelation.ADD_OR_REMOVE_ONE},
    ],
    ids=["num_examples", "relation"],
)
def test_steps_on_other_people_are_refused(tmp_path, has_directory, fields):
    directory = tmp_path if has_directory else None
    state = fit(fresh_trainer(), directory, stop_at=3)
    trainer = new_trainer(**fields)
    size = trainer.mechanism.num_examples
    data = jax.tree.map(lambda x: np.resize(x, (size, *x.shape[1:])), DATA)
    message = "must go on with the number of examples and the neighbouring relation"
    before = ranges(tmp_path) if has_directory else []
    for start in (state, None) if has_directory else (state,):
        with pytest.raises(ValueError, match=message):
            fit(trainer, directory, state=start, data=data)
    with pytest.raises(ValueError, match=message):
        trainer.guarantee(state)
    assert (ranges(tmp_path) if has_directory else []) == before
    assert not state.params["w"].is_deleted()


def test_an_array_of_the_loss_cannot_be_changed_during_a_run():
    weights = np.ones(3, np.float32)

    def weighted(params, batch):
        return jnp.mean((batch["x"] @ (params["w"] * weights) - batch["y"]) ** 2)

    def change(state):
        weights[:] = 5.0

    trainer = new_trainer(loss_fn=weighted, prng_key=KEY)
    unchanged = fit(trainer)
    weights[:] = 1.0
    assert same(fit(trainer, callback=change), unchanged)


# The budget.


def test_a_budget_stops_the_run_before_it_is_exceeded(tmp_path):
    trainer = fresh_trainer()
    budget = (MECHANISM.guarantee(4).epsilon + MECHANISM.guarantee(5).epsilon) / 2
    with pytest.warns(UserWarning, match="after step 4 of 7"):
        state = fit(trainer, tmp_path, epsilon_budget=budget)
    assert int(state.step) == num_paid(tmp_path) == 4
    with pytest.raises(ValueError, match="must allow a first step"):
        fit(trainer, tmp_path / "other", epsilon_budget=1e-3)
    with pytest.raises(ValueError, match="a budget must be for the delta of all runs"):
        fit(new_trainer(delta=1e-2), tmp_path, epsilon_budget=100.0)
    assert int(fit(trainer, tmp_path, epsilon_budget=100.0).step) == 7


# The place of the directory.


def test_a_program_may_change_its_directory_during_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    fit(fresh_trainer(), "run", callback=lambda _: os.chdir(tmp_path / "elsewhere"))
    assert num_paid(tmp_path / "run") == 7
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "ledger.jsonl", "reserve"])
def test_a_planted_link_is_not_followed(tmp_path, name):
    directory, target, text = tmp_path / "run", tmp_path / "target", "precious"
    directory.mkdir()
    target.write_text(text)
    (directory / name).symlink_to(target)
    with contextlib.suppress(OSError, ValueError):
        fit(fresh_trainer(), directory)
    assert target.read_text() == text


def test_a_planted_link_in_the_place_of_pending_is_removed(tmp_path):
    directory, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    directory.mkdir()
    elsewhere.mkdir()
    (directory / "pending").symlink_to(elsewhere)
    fit(fresh_trainer(), directory)
    assert list(elsewhere.iterdir()) == []


def test_init_or_restore_changes_nothing(tmp_path):
    trainer = fresh_trainer()
    assert trainer.init_or_restore(PARAMS, tmp_path / "none").step == 0
    assert not (tmp_path / "none").exists()
    state = fit(trainer, tmp_path, stop_at=3)
    files = [x for x in tmp_path.rglob("*") if x.is_file() and x.name != "lock"]
    before = {x: x.read_bytes() for x in files}
    restored = trainer.init_or_restore(PARAMS, tmp_path)
    assert same(restored, state)
    np.testing.assert_array_equal(restored.spent, state.spent)
    assert {x: x.read_bytes() for x in files} == before


def test_nothing_is_handed_out_that_the_ledger_could_not_record(tmp_path):
    def callback(state):
        with open(tmp_path / "ledger.jsonl", "ab") as file:
            file.write(b"somebody else")

    trainer = fresh_trainer()
    with pytest.raises(RuntimeError, match="only the run that holds") as caught:
        fit(trainer, tmp_path, data=Source(5, fail), callback=callback)
    assert caught.value.__context__ is caught.value.__cause__ is None
    assert trainer.last_state is None


@pytest.mark.parametrize("name", ["callback", "sensitive_callback"])
def test_a_forked_process_leaves_the_run_to_its_parent(tmp_path, monkeypatch, name):
    """The callback returns in another process, as after a fork."""
    trainer, pid = fresh_trainer(), os.getpid()

    def callback(_):
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)

    with pytest.raises(RuntimeError, match="in the process that began it"):
        fit(trainer, tmp_path, **{name: callback})
    monkeypatch.undo()
    assert trainer.last_state is None
    assert runs.read_metrics(tmp_path) == []
    event = "released" if name == "callback" else "charged"  # by the parent
    assert ranges(tmp_path) == [(event, 0, 3)]


def loss_of_a_typo(params, batch):
    return jnp.mean(batch["x"] @ params["typo"])


def loss_that_fails_on_the_host(params, batch):
    def fail_later(x):
        raise FailureError

    out = jax.ShapeDtypeStruct((), jnp.float32)
    loss = jax.pure_callback(fail_later, out, batch["x"], vmap_method="sequential")
    return loss_fn(params, batch) + jax.lax.stop_gradient(loss)


FAILING = {
    "source": (loss_fn, RuntimeError),
    "trace": (loss_of_a_typo, KeyError),
    "program": (loss_that_fails_on_the_host, Exception),
}


@pytest.fixture(scope="module", params=FAILING)
def failing_run(request):
    """A trainer, a function that makes a source, and the error that comes of them."""
    loss, error = FAILING[request.param]
    of_source = request.param == "source"
    make_source = (lambda: Source(1, fail)) if of_source else (lambda: DATA)
    return new_trainer(loss_fn=loss), make_source, error


@pytest.mark.parametrize("is_own_loop", [False, True])
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_no_variable_is_in_the_frames_of_an_error(tmp_path, failing_run, is_own_loop):
    trainer, make_source, error = failing_run

    def own_loop():
        state, source = trainer.init(PARAMS), make_source()
        trainer.train_step(state, trainer.load_batch(state, source))

    def whole_run():
        fit(trainer, tmp_path, data=make_source())

    with pytest.raises(error) as caught:
        (own_loop if is_own_loop else whole_run)()
    frames, errors = [], [caught.value]
    for x in errors:
        frames += [frame for frame, _ in traceback.walk_tb(x.__traceback__)]
        errors += [y for y in (x.__cause__, x.__context__) if y is not None]
    called = {"fit", "train_step", "load_batch", "own_loop", "whole_run"}
    called.add(frames[0].f_code.co_name)
    inner = [x for x in frames if x.f_code.co_name not in called]
    assert len(inner) > 3
    shown = {x.f_code.co_qualname: [*x.f_locals] for x in inner if x.f_locals}
    assert not shown
