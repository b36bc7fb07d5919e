"""Random bits are used once and stored nowhere, whatever a program does with a run."""

import contextlib
import copy
import dataclasses
import itertools
import logging
import os
import pickle
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import (
    DATA,
    KEY,
    PARAMS,
    SIZE,
    fit,
    fresh_trainer,
    keyed_trainer,
    known_bits,
    new_trainer,
    num_of_state,
    places_of_keys,
    same,
)

from dpmp.runs import Spent
from dpmp.training import _tickets
from dpmp.training._tickets import draw_tickets

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


def all_differ(taken):
    words = [key for _, _, key in taken]
    return len({*words}) == len(words) > 0


def copied(state):
    return jax.tree.map(jnp.copy, state)._replace(spent=state.spent)


def start(trainer):
    state = trainer.init(PARAMS)
    return state, trainer.load_batch(state, DATA)


# Copies.


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_trainer_draws_other_bits(name, taken):
    trainer = fresh_trainer()
    fit(trainer, stop_at=1)
    other = None
    with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError):
        other = COPIES[name](trainer)  # it may be refused
    assert (other is not None) >= (name != "pickle")
    states = [fit(x, stop_at=2) for x in (trainer, other) if x is not None]
    assert all_differ(taken)
    union = [Spent.from_array(x.spent, num_examples=SIZE) for x in states]
    assert len({x.id for spent in union for x in spent.segments}) == len(states)


def test_a_state_that_a_trainer_and_its_copy_continue_has_two_ways_to_pay_for():
    trainer = fresh_trainer()
    state = trainer.train_step(*start(trainer))
    spent = Spent()
    for x, before in ((copy.deepcopy(trainer), copied(state)), (trainer, state)):
        after = x.train_step(before, x.load_batch(before, DATA))
        spent |= Spent.from_array(after.spent, num_examples=SIZE)
    assert sum(x.stop - x.start for x in spent.segments) == 3


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_ticket_or_a_key_is_refused_and_none_is_shown(name):
    _, batch = start(fresh_trainer())
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        COPIES[name](batch.ticket)
    with pytest.raises(TypeError, match="prng_key cannot be copied or pickled"):
        COPIES[name](keyed_trainer())
    if name != "copy":  # which has the same ticket
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            COPIES[name](batch)
    assert "array" not in repr(batch)
    assert "0." not in repr(batch.ticket)


@pytest.mark.parametrize("again", ["itself", "copy", "replace", "of another trainer"])
def test_a_batch_is_used_once(again, taken):
    trainer = fresh_trainer()
    state, batch = start(trainer)
    other = copied(state)
    trainer.train_step(state, batch)
    second = {
        "copy": copy.copy,
        "replace": lambda x: dataclasses.replace(x, examples=DATA),
    }.get(again, lambda x: x)(batch)
    trainer = keyed_trainer() if again == "of another trainer" else trainer
    with pytest.raises(RuntimeError, match="must be used once"):
        trainer.train_step(other, second)
    assert not other.params["w"].is_deleted()
    assert all_differ(taken)
    assert trainer.train_step(other, trainer.load_batch(other, DATA)).step == 1


def test_a_batch_is_refused_in_a_forked_process():
    _, batch = start(fresh_trainer())
    with warnings.catch_warnings(action="ignore"):  # jax warns of any fork
        child = os.fork()
    if child == 0:
        status = 1
        try:
            batch.ticket.take("noise")
        except RuntimeError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(batch.ticket.take("noise")) == 1


def in_threads(function, items):
    """Calls a function for each item at once; returns results, and exceptions."""
    barrier, found = threading.Barrier(len(items)), ([], [])

    def call(item):
        try:
            barrier.wait(30)
            found[0].append(function(item))
        except Exception as error:
            found[1].append(error)

    threads = [threading.Thread(target=call, args=(x,)) for x in items]
    for x in threads:
        x.start()
    for x in threads:
        x.join(60)
    return found


def test_a_state_that_goes_on_in_several_threads_is_paid_for_in_each(taken):
    trainer = fresh_trainer()
    state, batch = start(trainer)
    state = trainer.train_step(state, batch)
    results, errors = in_threads(
        lambda x: trainer.train_step(x, trainer.load_batch(x, DATA)),
        [copied(state) for _ in range(4)],
    )
    assert not errors
    assert all_differ(taken)
    total = Spent()
    for x in results:
        assert num_of_state(x) == 2
        total |= Spent.from_array(x.spent, num_examples=SIZE)
    assert sum(x.stop - x.start for x in total.segments) == 5
    assert len(total.segments) == 4  # one of the threads has gone on with the first


def test_threads_that_share_a_state_use_it_once(taken):
    """The others find its arrays used up, before they see anything."""
    trainer = fresh_trainer()
    state, _ = start(trainer)
    batches = [trainer.load_batch(state, DATA) for _ in range(4)]
    results, _ = in_threads(lambda x: trainer.train_step(state, x), batches)
    assert len(results) == 1
    assert all_differ(taken)


def test_a_callback_may_make_steps_while_batches_are_prefetched(taken):
    trainer, steps = fresh_trainer(), []

    def callback(state):
        if state.step < 7:
            state = copied(state)
            batch = trainer.load_batch(state, DATA)
            steps.append(int(trainer.train_step(state, batch).step))

    state = fit(trainer, callback=callback, prefetch=3)
    assert steps == [2, 3, 4, 5, 6, 7]
    assert all_differ(taken)
    assert len(taken) == 4 * (7 + 6)
    assert num_of_state(state) == 7


# Transformations.


def in_grad(step, state, batch):
    def loss(params):
        return step(state._replace(params=params), batch).params["w"].sum()

    return jax.grad(loss)(state.params)


def in_vmap(step, state, batch):
    states = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    return jax.vmap(lambda state: step(state, batch))(states)


TRANSFORMED = {
    "jit": lambda step, *args: jax.jit(step)(*args),
    "jit of nothing": lambda step, *args: jax.jit(lambda: step(*args))(),
    "vmap": in_vmap,
    "grad": in_grad,
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_steps_inside_transformations_are_refused(name, taken):
    trainer = fresh_trainer()
    batch = {name: x.copy() for name, x in DATA.items()}

    def step(state, batch):
        return trainer.train_step(state, batch, np.zeros(SIZE, bool))

    def run(state, batch):
        return fit(trainer, state=state)

    def load(state, batch):
        return trainer.load_batch(state, DATA).examples

    for inner in (step, run, load):
        with pytest.raises(ValueError, match=r"outside of jax\.jit"):
            TRANSFORMED[name](inner, trainer.init(PARAMS), batch)
    assert not taken


# Reproducible runs.


def test_a_key_makes_a_run_reproducible(taken):
    one = fit(keyed_trainer())
    first = taken.copy()
    two = fit(new_trainer(prng_key=KEY))
    assert same(one, two)
    assert sorted(taken[len(first) :]) == sorted(first)
    assert all_differ(first)
    assert len(first) == 4 * 7
    others = [fit(new_trainer(prng_key=jax.random.key(6)))]
    others += [fit(fresh_trainer()), fit(fresh_trainer())]
    for x, y in itertools.combinations([one, *others], 2):
        assert not same(x.params, y.params)
    assert all_differ(first + taken[2 * len(first) :])


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_tickets_of_a_key_are_a_function_of_key_step_and_attempt(impl):
    def words(seed=0, step=0, attempt=0):
        root = _tickets.root_of(jax.random.key(seed, impl=impl))
        (ticket,) = draw_tickets([step], root, lambda _: attempt)
        keys = ticket.take("batch", "noise", "model", "update")
        return np.concatenate(keys).tolist()

    assert words() == words()
    cases = [{}, {"seed": 1}, {"step": 1}, {"attempt": 1}, {"step": 2**32}]
    found = [tuple(words(**x)) for x in cases]
    assert len({*found}) == len(found)
    assert len({y for x in found for y in x}) == 16 * len(found)


def test_several_processes_share_the_bits_of_the_first(monkeypatch):
    """Drawn at once for many steps, because processes wait for each other."""
    calls = []

    def broadcast(words):
        calls.append(words.size)
        return np.arange(words.size, dtype=np.uint32)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_tickets._processes, "broadcast", broadcast)
    tickets = list(draw_tickets(range(300), None))
    assert len(calls) == 2
    first = [x.take("batch", "noise", "model", "update") for x in tickets[:256]]
    assert np.array_equal(np.ravel(first), np.arange(256 * 16))


# Nothing stores a key.


def test_no_key_is_printed_or_pickled(tmp_path, monkeypatch, capfd, caplog):
    caplog.set_level(logging.DEBUG)
    words, trainer = known_bits(monkeypatch), fresh_trainer()
    with jax.log_compiles(True):
        state = fit(trainer, tmp_path, progress=True, stop_at=5)
        state = trainer.train_step(state, trainer.load_batch(state, DATA))
    batch = trainer.load_batch(state, DATA)
    print(state, trainer, batch, batch.ticket, vars(trainer))
    output = capfd.readouterr()
    content = {
        "output": (output.out + output.err).encode(),
        "log": caplog.text.encode(),
        "pickle": pickle.dumps(jax.tree.map(np.asarray, state)),
    }
    restored = trainer.init_or_restore(PARAMS, tmp_path)
    for name, tree in (("state", state), ("checkpoint", restored)):
        arrays = map(np.asarray, jax.tree.leaves(tree))
        content[name] = b"".join(x.tobytes() for x in arrays)
    content |= {str(x): x.read_bytes() for x in tmp_path.rglob("*") if x.is_file()}
    assert len(words) == 6 * 4 + 1  # four keys for a step, and one for a batch
    assert b"TrainingState" in content["output"]
    assert places_of_keys(words, content) == set()


def test_no_key_is_a_constant_of_a_program(tmp_path):
    """The cache of programs on a disk would hold it: so it has one for all keys."""
    before = jax.config.jax_compilation_cache_dir
    compilation_cache = pytest.importorskip("jax.experimental.compilation_cache")
    cache, files = compilation_cache.compilation_cache, []
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        cache.reset_cache()
        for key in (None, jax.random.key(0)):
            trainer = new_trainer(prng_key=key)
            state = fit(trainer, stop_at=1)
            state = trainer.train_step(state, trainer.load_batch(state, DATA))
            steps = [x.name for x in tmp_path.rglob("*") if "step_on_mesh" in x.name]
            files.append(sorted(x for x in steps if not x.endswith("-atime")))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        cache.reset_cache()
    assert len(files[0]) == 1
    assert files[0] == files[1]


def test_a_trainer_cannot_be_changed():
    """Its step would keep the noise that it was compiled with."""
    for name in ("mechanism", "loss_fn", "optimizer", "policy"):
        with pytest.raises(AttributeError):
            setattr(fresh_trainer(), name, getattr(fresh_trainer(), name))


@pytest.mark.parametrize("field", [{"sampling_prob": 0.5}, {"truncated_batch_size": 9}])
def test_a_batch_of_another_mechanism_is_refused(field):
    size = fresh_trainer().mechanism.padded_batch_size
    other = new_trainer(**{"truncated_batch_size": size} | field)
    state = fresh_trainer().init(PARAMS)
    with pytest.raises(ValueError, match="must be drawn by the mechanism"):
        fresh_trainer().train_step(state, other.load_batch(state, DATA))
