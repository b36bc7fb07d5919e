"""Faults that attackers have found, and which no longer work."""

import contextlib
import dataclasses
import errno
import functools
import os
import signal
import sys
import time
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import (
    ANOTHER_MECHANISM,
    DATA,
    DELTA,
    MECHANISM,
    PARAMS,
    SIZE,
    FailureError,
    Source,
    checkpoints,
    epsilon_of,
    fails_at,
    fit,
    fresh_trainer,
    keyed_trainer,
    new_trainer,
    num_of_state,
    num_paid,
    same,
)

import dpmp
from dpmp import _processes
from dpmp.batch_selection import PoissonSampling
from dpmp.programs import losses
from dpmp.runs import Spent, _files, _ledger, opened, read_metrics
from dpmp.runs._ledger import Ledger, Record
from dpmp.sources import check_source
from dpmp.training import _agreement
from dpmp.training._account import Account, LastStep
from dpmp.training._loop import Loop
from dpmp.training._programs import Programs
from dpmp.training._stops import Signals
from dpmp.training._tickets import Ticket


def own_steps(trainer, state, number=1):
    for _ in range(number):
        state = trainer.train_step(state, trainer.load_batch(state, DATA))
    return state


def raises(error):
    def fail(*_, **__):
        raise error

    return fail


def average(first, second):
    return jax.tree.map(lambda x, y: ((x + y) / 2).astype(x.dtype), first, second)


def state_with_more_steps_than_it_has_spent(state, _):
    first = fresh_trainer().init(PARAMS)
    return first._replace(step=state.step, params=state.params)


@pytest.mark.parametrize("make", [average, state_with_more_steps_than_it_has_spent])
def test_a_state_that_hides_steps_is_refused(make):
    trainer = fresh_trainer()
    state = make(fit(trainer, stop_at=3), fit(trainer, stop_at=3))
    with pytest.raises(ValueError, match="spent must"):
        trainer.guarantee(state)
    with pytest.raises(ValueError, match="spent must"):
        fit(trainer, state=state)


class NoNoteError(Exception):
    def add_note(self, note):
        raise TypeError


class NotEqualError(Exception):
    def __eq__(self, other):
        raise ValueError

    __hash__ = None


@pytest.mark.parametrize("kind", [NotEqualError, NoNoteError])
def test_an_odd_error_is_raised_and_the_state_is_saved(tmp_path, kind):
    def fail_twice(state):
        try:
            fails_at(2, kind())(state)
        except kind:
            raise kind from None

    trainer = fresh_trainer()
    with pytest.raises(kind):
        fit(trainer, tmp_path, callback=fail_twice, every=1)
    assert int(trainer.last_state.step) == 2
    assert checkpoints(tmp_path) == [1, 2]


def test_a_whole_checkpoint_stays_if_it_cannot_be_read(tmp_path, monkeypatch):
    trainer = fresh_trainer()
    fit(trainer, tmp_path, stop_at=6)

    for error in (TimeoutError, OSError(24, "too many files")):
        with monkeypatch.context() as patch:
            patch.setattr("dpmp.runs._arrays._checkpointer", raises(error))
            with pytest.raises((TimeoutError, OSError)):
                fit(trainer, tmp_path)
    assert checkpoints(tmp_path) == [3, 6]
    fit(trainer, tmp_path)
    assert num_paid(tmp_path) == 7


def test_a_source_that_hangs_at_the_first_line_can_be_interrupted(ctrl_c):
    waited = []

    def interrupt():
        signal.raise_signal(signal.SIGINT)
        waited.append(True)

    trainer = new_trainer()
    params = {"w": np.zeros(3, np.float32), "v": np.zeros(2**17, np.float32)}
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(trainer.init(params), Source(0, interrupt))
    assert not waited


@pytest.fixture
def usual_handlers(ctrl_c):
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_handlers_of_signals_return_if_restoring_one_fails(monkeypatch, usual_handlers):
    signals, real, failed = Signals(sigterm=True), signal.signal, []

    def fail_once(number, handler):
        real(number, handler)
        if getattr(handler, "__self__", None) is not signals and not failed:
            failed.append(number)
            raise FailureError

    monkeypatch.setattr(signal, "signal", fail_once)
    with pytest.raises(FailureError), signals:
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_in_a_second_try_pays_for_no_other_step(tmp_path, ctrl_c):
    data = Source(3, lambda: signal.raise_signal(signal.SIGINT))
    try:
        raise FailureError
    except FailureError:
        with pytest.raises(KeyboardInterrupt):
            fit(fresh_trainer(), tmp_path, data=data, prefetch=0)
    assert num_paid(tmp_path) == 2


def test_a_failure_in_another_thread_is_not_forgotten():
    trainer = new_trainer()
    state = trainer.init(PARAMS)
    steps, segment = trainer._last_step, None
    account = steps.account(trainer.mechanism, state)
    with pytest.raises(FailureError), steps.charging(trainer.mechanism, state):
        raise FailureError  # in between
    steps.remember(account, state)
    (segment,) = steps.failed.segments
    assert (segment.start, segment.stop) == (0, 1)


def test_a_checkpoint_may_be_replaced_by_a_link(tmp_path):
    trainer = fresh_trainer()
    fit(trainer, tmp_path / "run", stop_at=6)
    newest = tmp_path / "run" / "checkpoints" / "6"
    newest.rename(tmp_path / "moved")
    (tmp_path / "moved" / "facts.json").write_text("damaged")
    newest.symlink_to(tmp_path / "moved")
    (newest.parent / "007").mkdir()
    with pytest.warns(UserWarning, match="damaged|at a new cost"):
        assert int(fit(trainer, tmp_path / "run").step) == 7
    assert int(fit(trainer, tmp_path / "run").step) == 7


@pytest.mark.parametrize("in_fit", [True, False])
def test_ctrl_c_beside_an_error_of_a_source_does_not_show_it(monkeypatch, in_fit):
    error = ValueError("record of patient 4711 is broken")
    monkeypatch.setattr(traceback, "extract_tb", raises(KeyboardInterrupt))
    trainer, source = fresh_trainer(), Source(1, raises(error))
    load = functools.partial(trainer.load_batch, trainer.init(PARAMS), source)
    if in_fit:
        load = functools.partial(fit, trainer, data=source, prefetch=0)
    with pytest.raises(KeyboardInterrupt) as caught:
        load()
    assert "4711" not in "".join(traceback.format_exception(caught.value))


def test_a_signal_after_a_durable_record_leaves_whole_records(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path)
    segment = Account.of(MECHANISM, fresh_trainer().init(PARAMS), Spent()).segment
    record = Record(event="charged", segment=segment(0, 1), delta=DELTA)
    ledger.append(record)
    file = tmp_path / "ledger.jsonl"
    before = file.read_bytes()

    with monkeypatch.context() as patch:
        patch.setattr(_ledger, "_Whole", raises(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ledger.append(record)
    assert file.read_bytes() == before.rstrip()  # a newline may be missing
    ledger.append(record)
    assert len(Ledger(tmp_path).records) == 2


@pytest.mark.parametrize("is_restored", [True, False])
def test_metrics_of_a_checkpoint_reach_the_file(tmp_path, is_restored):
    trainer = fresh_trainer()
    fit(trainer, tmp_path)
    (tmp_path / "metrics.jsonl").unlink()  # killed after the last checkpoint
    state = trainer.init(PARAMS)
    state = trainer.init_or_restore(PARAMS, tmp_path) if is_restored else state
    fit(trainer, tmp_path, state=state)
    assert [x["step"] for x in read_metrics(tmp_path)] == [7]


@ANOTHER_MECHANISM
def test_a_checkpoint_without_steps_costs_nothing(tmp_path):
    trainer, other = fresh_trainer(), new_trainer(noise_multiplier=0.7, iterations=30)
    fit(other, tmp_path, state=fit(trainer, stop_at=5), stop_at=5)
    fit(trainer, tmp_path)
    assert epsilon_of(tmp_path) == MECHANISM.guarantee().epsilon


def test_a_run_of_infinite_epsilon_is_saved(tmp_path):
    trainer = new_trainer(noise_multiplier=0.1)
    assert trainer.mechanism.guarantee().epsilon == np.inf
    assert fit(trainer, tmp_path).step == 7
    assert {x.get("epsilon") for x in read_metrics(tmp_path)} == {None}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_state_of_elsewhere_is_saved_before_its_first_new_step(tmp_path, error):
    trainer, source = fresh_trainer(), Source(1, raises(error))
    state = fit(trainer, stop_at=5)
    with pytest.raises((RuntimeError, KeyboardInterrupt)) as caught:
        fit(trainer, tmp_path, state=state, data=source, prefetch=0)
    assert "is saved" in caught.value.__notes__[-1]
    assert checkpoints(tmp_path) == [5]


def test_another_state_of_as_many_steps_is_not_said_to_be_saved(tmp_path, capsys):
    trainer = fresh_trainer()
    saved = jax.tree.map(jnp.copy, fit(trainer, tmp_path, stop_at=5).params)
    other = fit(trainer, stop_at=5)
    with pytest.warns(UserWarning, match="another state after 5 steps"):
        fit(trainer, tmp_path, state=other, stop_at=5, progress=True)
    assert "saved in" not in capsys.readouterr().err
    assert same(trainer.init_or_restore(PARAMS, tmp_path).params, saved)


@pytest.mark.parametrize(
    ("fields", "differs"),
    [
        ({"l2_clip_norm": dpmp.AdaptiveClipNorm(initial=0.5)}, "clip_norm"),
        ({"optimizer": optax.adam(0.1)}, "opt_state"),
    ],
)
def test_the_state_of_a_trainer_of_another_kind_is_refused(tmp_path, fields, differs):
    trainer, state = new_trainer(**fields), fresh_trainer().init(PARAMS)
    with pytest.raises(ValueError, match=rf"differs=\['{differs}'"):
        fit(trainer, tmp_path / "run", state=state)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=rf"differs=\['{differs}'"):
        trainer.train_step(state, trainer.load_batch(state, DATA))


@pytest.mark.parametrize("name", ["sync_tree", "digest_of_tree", "names_in"])
def test_a_directory_that_cannot_be_read_is_not_empty(tmp_path, monkeypatch, name):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(PermissionError):
        getattr(_files, name)(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, FailureError])
def test_an_interrupted_step_leaves_no_values_in_variables(monkeypatch, error):
    trainer = fresh_trainer()
    state = trainer.init(PARAMS)
    batch = trainer.load_batch(state, DATA)
    monkeypatch.setattr(trainer._last_step, "remember", raises(error))
    with pytest.raises(error) as caught:
        trainer.train_step(state, batch)
    frames = [x for x, _ in traceback.walk_tb(caught.value.__traceback__)]
    values = [x for frame in frames[1:] for x in frame.f_locals.values()]
    leaves = [x for x in jax.tree.leaves(values) if isinstance(x, jax.Array)]
    given = [*jax.tree.leaves((state, batch.examples, batch.is_padding_example))]
    assert all(any(x is y for y in given) for x in leaves)
    assert len(trainer._last_step.failed.segments) == 1


@pytest.mark.parametrize("in_fit", [True, False])
def test_too_little_memory_for_a_batch_does_not_show_its_size(monkeypatch, in_fit):
    text = "Unable to allocate an array with shape (99984,)"
    monkeypatch.setattr(PoissonSampling, "indices", raises(MemoryError(text)))
    trainer = fresh_trainer()
    with pytest.raises(MemoryError, match="there must be enough memory") as caught:
        fit(trainer) if in_fit else trainer.load_batch(trainer.init(PARAMS), DATA)
    assert "99984" not in "".join(traceback.format_exception(caught.value))


def test_a_folder_of_temporary_files_that_is_a_pattern_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", f"{tmp_path}/[1]")
    with pytest.raises(ValueError, match="the folder of temporary files must"):
        fit(fresh_trainer(), tmp_path)


def test_a_failed_step_is_owed_until_a_state_is_returned(monkeypatch):
    trainer = fresh_trainer()
    state = trainer.init(PARAMS)
    copy = jax.tree.map(jnp.copy, state)
    with pytest.raises(RuntimeError, match="could not be loaded"):
        trainer.load_batch(state, Source(1, raises(FailureError)))
    with monkeypatch.context() as patch:
        patch.setattr(Account, "spent", raises(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            own_steps(trainer, state)
    assert num_of_state(own_steps(trainer, copy)) == 3


def test_a_state_stays_until_it_is_returned(monkeypatch):
    trainer = fresh_trainer()
    monkeypatch.setattr(Loop, "end", raises(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fit(trainer)
    assert int(trainer.last_state.step) == 7


def test_a_lost_run_is_owed_until_a_state_pays_for_all_of_it(monkeypatch):
    trainer, kept = fresh_trainer(), []

    def keep(state):
        kept.append(jax.tree.map(jnp.copy, state))
        fails_at(3, SystemExit)(state)

    state = trainer.init(PARAMS)
    monkeypatch.setattr(Loop, "stopped", lambda *_: None)
    with pytest.raises(SystemExit):
        fit(trainer, state=state, callback=keep)
    assert trainer.last_state is None
    assert num_of_state(own_steps(trainer, kept[1])) == 4


def test_a_refused_run_keeps_the_last_state(tmp_path):
    trainer = fresh_trainer()
    with pytest.raises(FailureError):
        fit(trainer, callback=fails_at(2))
    with opened(tmp_path), pytest.raises(RuntimeError, match="only one run at a time"):
        fit(trainer, tmp_path, state=trainer.last_state)
    assert int(trainer.last_state.step) == 2


def test_a_second_error_does_not_forget_a_failed_step(monkeypatch):
    trainer = fresh_trainer()
    state = trainer.init(PARAMS)
    fail = LastStep.fail

    def interrupted(self, segment):
        if sys.exc_info()[0] is not None:
            raise KeyboardInterrupt
        fail(self, segment)

    with monkeypatch.context() as patch:
        patch.setattr(LastStep, "fail", interrupted)
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            trainer.load_batch(state, Source(1, raises(FailureError)))
    assert num_of_state(own_steps(trainer, state)) == 2


def test_no_report_of_variables_shows_a_key_for_reproducible_runs():
    trainer = new_trainer(prng_key=jax.random.key(123456789))
    with pytest.raises(FailureError) as caught:
        fit(trainer, callback=fails_at(2))
    names, shown = set(), []
    for frame, _ in traceback.walk_tb(caught.value.__traceback__):
        for name, value in frame.f_locals.items():
            names.add(name)
            with contextlib.suppress(RuntimeError):  # arrays of a donated state
                shown.append(repr(value))
    assert "options" in names
    assert not [x for x in shown if "123456789" in x]


@pytest.mark.parametrize("name", ["pending", "charged-1.json"])
def test_a_planted_pipe_does_not_block_a_run(tmp_path, name):
    fit(fresh_trainer(), tmp_path, stop_at=3)
    os.mkfifo(tmp_path / name)
    assert int(fit(fresh_trainer(), tmp_path).step) == 7


def test_the_clip_norms_of_a_mechanism_are_those_of_its_noise():
    params = {"w": np.zeros(3, np.float32), "v": np.zeros(3, np.float32)}
    norms = {"w": 1.0, "v": 1.0}
    mechanism = dataclasses.replace(MECHANISM, l2_clip_norm=norms)
    statement = mechanism.statement()
    norms["w"] = 100.0
    mechanism.l2_clip_norm["w"] = 100.0

    def loss(params, batch):
        return jnp.mean(batch["x"] @ (1000 * params["w"] + params["v"]))

    grad_fn = mechanism.clipped_grad(loss)
    assert grad_fn.sensitivity() == mechanism.stddev  # its noise multiplier is 1
    batch, mask = {"x": np.ones((1, 3), np.float32)}, np.zeros(1, bool)
    total = grad_fn(params, batch, is_padding_example=mask)
    norm = np.linalg.norm(np.asarray(total["w"].to_float(), np.float64))
    assert norm <= 1 / mechanism.expected_batch_size
    assert mechanism.statement() == statement


def test_workers_of_a_killed_process_do_not_keep_a_directory_locked(tmp_path):
    read_end, write_end = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # of threads
        if not (process := os.fork()):
            with _files.locked(tmp_path):
                if not os.fork():  # a worker, which lives on
                    os.read(read_end, 1)
                os._exit(0)  # as SIGKILL would
    os.waitpid(process, 0)
    try:
        with _files.locked(tmp_path):
            pass
    finally:
        os.write(write_end, b".")


def test_a_forked_process_ends_by_a_signal_as_usual():
    with Signals(sigterm=True), warnings.catch_warnings(action="ignore"):
        if not (process := os.fork()):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
            os._exit(1)
        _, status = os.waitpid(process, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_a_batch_after_the_last_step_costs_nothing():
    trainer = fresh_trainer()
    state = fit(trainer)
    with pytest.raises(ValueError, match="must be below iterations"):
        trainer.load_batch(state, DATA)
    assert not trainer._last_step.failed.segments


def test_processes_must_agree_on_past_steps(monkeypatch):
    trainer = fresh_trainer()
    state = trainer.init(PARAMS)
    monkeypatch.setattr(_processes, "random_id", lambda: 32 * "e")
    with pytest.raises(RuntimeError, match="could not be loaded"):
        trainer.load_batch(state, Source(1, raises(FailureError)))
    assert [x.id for x in trainer._last_step.failed.segments] == [32 * "e"]
    monkeypatch.setattr(_agreement, "are_equal", lambda *_: False)
    with pytest.raises(RuntimeError, match="must have the same past steps"):
        trainer.load_batch(state, DATA)
    with pytest.raises(RuntimeError, match="must have the same past steps"):
        fit(trainer, state=state)


def test_a_foreign_function_is_taken_for_one_that_shows_values():
    def call(x):
        spec = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.ffi.ffi_call("shows_values", spec)(x)

    assert losses.calls_host(jax.make_jaxpr(call)(1.0).jaxpr)


def test_a_step_that_is_made_again_has_other_keys_although_they_are_reproducible(
    monkeypatch,
):
    def keys_of_a_run():
        trainer, keys = keyed_trainer(), []
        take = Ticket.take

        def recorded(self, *uses):
            found = take(self, *uses)
            keys.extend(x.tobytes() for x in found)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(Ticket, "take", recorded)
            state = own_steps(trainer, trainer.init(PARAMS))
            for _ in range(2):
                with pytest.raises(RuntimeError, match="could not be loaded"):
                    trainer.load_batch(state, Source(1, raises(FailureError)))
            with patch.context() as inner:
                inner.setattr(Programs, "prepare", raises(FailureError))
                with pytest.raises(FailureError):
                    own_steps(trainer, state)
            own_steps(trainer, state)
        assert len({*keys}) == len(keys) >= 10
        return keys

    assert keys_of_a_run() == keys_of_a_run()


def test_a_run_returns_its_own_state(monkeypatch):
    trainer = fresh_trainer()

    def another_thread_begins_a_run(_):
        trainer.last_state = None

    monkeypatch.setattr(Loop, "end", another_thread_begins_a_run)
    assert int(fit(trainer).step) == 7


@pytest.mark.parametrize(
    "as_mask",
    [
        lambda mask: mask.astype(object),
        lambda mask: mask.astype(str),
        lambda mask: np.repeat(mask[:, None], 2, axis=1),
        lambda mask: (mask, mask),
        lambda mask: np.ma.masked_array(mask, mask),
    ],
)
def test_a_mask_of_another_kind_is_refused_without_being_shown(as_mask):
    trainer, size = fresh_trainer(), MECHANISM.padded_batch_size
    batch = jax.tree.map(lambda x: x[:size], DATA)
    mask = np.arange(size) >= 5
    with pytest.raises(ValueError, match="is_padding_example") as caught:
        trainer.train_step(trainer.init(PARAMS), batch, as_mask(mask))
    assert "False False" not in str(caught.value).replace("'", "")


def test_an_optimizer_that_changes_the_types_of_its_state_is_refused(tmp_path):
    def update(updates, state, params=None):
        return updates, state.astype(jnp.float32)

    optimizer = optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)
    trainer = new_trainer(optimizer=optimizer)
    with pytest.raises(ValueError, match=r"opt_state.*int32.*float32"):
        fit(trainer, tmp_path)


def test_a_callback_that_uses_up_its_state_is_refused(tmp_path):
    trainer = fresh_trainer()

    def callback(state):
        own_steps(trainer, state)

    with pytest.raises(ValueError, match="a callback must leave"):
        fit(trainer, tmp_path, callback=callback)
    assert num_paid(tmp_path) == 3
    assert num_of_state(fit(fresh_trainer(), tmp_path)) == 7


def test_references_in_a_loss_need_per_example_gradients():
    def loss(w, x):
        total = jax.new_ref(jnp.zeros(()))
        total[...] = jnp.sum(w * x)
        return total[...]

    def clip(method):
        options = {"l2_clip_norm": 1.0, "keep_batch_dim": False, "method": method}
        return dpmp.clipped_grad(loss, **options)(jnp.ones(3), jnp.ones((2, 3)))

    assert clip("per_example").shape == (3,)
    with pytest.raises(ValueError, match=r"must not use jax\.new_ref"):
        clip("book_keeping")


class Scaled:
    """A source that computes with jax."""

    def __len__(self):
        return SIZE

    def __getitem__(self, indices):
        rows = {name: jnp.asarray(x)[indices] for name, x in DATA.items()}
        return rows | {"x": jnp.nan_to_num(rows["x"] * jnp.inf * 0)}


def test_jax_is_not_asked_whether_the_rows_of_a_source_are_finite():
    with jax.debug_nans(True):
        fit(fresh_trainer(), data=Scaled())
        check_source(Scaled())
