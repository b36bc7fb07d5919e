"""A small run that tests of training share, so that its step is compiled once."""

import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp
from dpmp.runs import Spent
from dpmp.runs._ledger import Ledger, Record
from dpmp.training import _tickets

SIZE = 64  # an empty batch, for which no source is asked, has probability 1e-8
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(SIZE, 3)).astype(np.float32),
    "y": RNG.normal(size=SIZE).astype(np.float32),
}
PARAMS = {"w": np.zeros(3, np.float32)}
KEY = jax.random.key(5)
DELTA = 1e-3
CHANGES = ("fsync", "ftruncate", "mkdir", "pwrite", "rename", "rmdir", "unlink")
MECHANISM = dpmp.DPSGD(
    num_examples=SIZE,
    expected_batch_size=16,
    iterations=7,
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    delta=DELTA,
)
ANOTHER_MECHANISM = pytest.mark.filterwarnings("ignore:.*steps of another mechanism")


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def new_trainer(
    *,
    loss_fn=loss_fn,
    optimizer=None,
    policy="float32",
    uses_prng_key=False,
    is_private=True,
    prng_key=None,
    loss_scale=None,
    **fields,
):
    mechanism = dataclasses.replace(MECHANISM, **{"arithmetic": None} | fields)
    return dpmp.DPTrainer(
        mechanism=mechanism if is_private else mechanism.without_privacy(),
        loss_fn=loss_fn,
        optimizer=optimizer or optax.sgd(0.1, momentum=0.9),
        policy=policy,
        uses_prng_key=uses_prng_key,
        loss_scale=loss_scale,
        prng_key=prng_key,
    )


def without_failures(trainer):
    """The trainer, whose next run does not pay for what failed in another test."""
    trainer._last_step._failed.clear()
    return trainer


def fresh_trainer():
    """Draws fresh bits for every step; made once."""
    return without_failures(_fresh_trainer())


@functools.cache
def _fresh_trainer():
    return new_trainer()


@functools.cache
def _noisier_trainer():
    return new_trainer(noise_multiplier=2.0)


def noisier_trainer():
    """Its steps have another cost; made once."""
    return without_failures(_noisier_trainer())


def keyed_trainer():
    """Its runs are reproducible; made once."""
    return without_failures(_keyed_trainer())


@functools.cache
def _keyed_trainer():
    return new_trainer(prng_key=KEY)


def fit(trainer, directory=None, *, state=None, data=DATA, **options):
    """A run from its beginning, or from a state, in blocks of three steps."""
    state = trainer.init(PARAMS) if state is None else state
    if directory is not None:
        options = {"checkpoint_dir": directory, "every": 3} | options
    return trainer.fit(state, data, **{"progress": False} | options)


class FailureError(Exception):
    """Raised by callbacks and sources of tests."""


def fails_at(num_steps, error=FailureError):
    """A callback."""

    def callback(state):
        if int(state.step) == num_steps:
            raise error

    return callback


class Source:
    """Gives the data, and acts before its batch with a number, counted from 1."""

    def __init__(self, number, action):
        self.number, self.action, self.calls = number, action, -1  # 0 is a probe

    def __len__(self):
        return SIZE

    def __getitem__(self, indices):
        if isinstance(indices, int):
            raise TypeError("an array, please")
        self.calls += 1
        if self.calls == self.number and self.action is not None:
            self.action()
        return {name: x[indices] for name, x in DATA.items()}


def recorded_batches(monkeypatch):
    """A list of the indices of all batches that are drawn from now on."""
    batches, load_shards = [], _tickets.load_shards

    def recorded(load, indices, *args):
        batches.append(indices)
        return load_shards(load, indices, *args)

    monkeypatch.setattr(_tickets, "load_shards", recorded)
    return batches


def same(a, b):
    """Whether two trees have the same bits, without the public ids of their steps."""
    trees = [x._replace(spent=None) if hasattr(x, "spent") else x for x in (a, b)]
    (one, other), arrays = map(jax.tree.structure, trees), map(_arrays_of, trees)
    pairs = zip(*arrays, strict=True)
    return one == other and all(
        x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs
    )


def _arrays_of(tree):
    return map(np.asarray, jax.tree.leaves(tree))


def records_of(directory) -> list[Record]:
    return Ledger(pathlib.Path(directory)).records


def ranges(directory):
    """The events and steps of a ledger."""
    return [(x.event, x.segment.start, x.segment.stop) for x in records_of(directory)]


def num_paid(directory):
    """The number of steps that are paid for."""
    spent = Ledger(pathlib.Path(directory)).spent
    return sum(x.stop - x.start for x in spent.segments)


def epsilon_of(directory):
    return Ledger(pathlib.Path(directory)).spent.guarantee(delta=DELTA).epsilon


def num_of_state(state):
    """The number of steps that a state says it has been through."""
    spent = Spent.from_array(state.spent, num_examples=SIZE)
    return sum(x.stop - x.start for x in spent.segments)


def checkpoints(directory):
    folder = pathlib.Path(directory) / "checkpoints"
    return sorted(int(x.name) for x in folder.glob("*"))


def copied(directory, target):
    """What a process leaves that is killed now."""
    return pathlib.Path(shutil.copytree(directory, target, dirs_exist_ok=True))


@contextlib.contextmanager
def killed_copies(directory, target):
    """A list of copies of a directory: what a kill leaves, at every instant.

    It is copied before and after every change of files by Python in this thread.
    """
    contents, copies = [], []

    def copy_now():
        if len(contents) > len(copies) or threading.current_thread() is not here:
            return  # a copy changes files as well
        copy = target / f"killed-{len(copies)}"
        try:
            files = [x for x in sorted(directory.rglob("*")) if x.is_file()]
            content = [(str(x), x.read_bytes()) for x in files]
            if content not in contents:
                contents.append(content)
                copies.append(copied(directory, copy))
        except (FileNotFoundError, shutil.Error):  # a thread of orbax renamed a file
            shutil.rmtree(copy, ignore_errors=True)
        del contents[len(copies) :]

    def changing(function):
        def change(*args, **kwargs):
            copy_now()
            result = function(*args, **kwargs)
            copy_now()
            return result

        return change

    here = threading.current_thread()
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, changing(getattr(os, name)))
        yield copies
        copy_now()


def known_bits(monkeypatch):
    """Replaces the bits of the operating system by those of a list."""
    rng, drawn = np.random.default_rng(1), []

    def urandom(size):
        drawn.append(rng.bytes(size))
        return drawn[-1]

    fake = types.SimpleNamespace(urandom=urandom, getpid=os.getpid)
    monkeypatch.setattr(_tickets, "os", fake)
    return drawn


def fixed_tickets(monkeypatch):
    """The n-th fresh ticket of a step has the same keys whenever a test runs."""
    made, real = collections.Counter(), _tickets.Ticket

    def ticket(step, words=None):
        if words is None:
            rng = np.random.default_rng([step, made[step]])
            words = rng.integers(2**32, size=16, dtype=np.uint32)
            made[step] += 1
        return real(step, words)

    monkeypatch.setattr(_tickets, "Ticket", ticket)


def places_of_keys(words, content):
    """The names of contents that have a word of a key, in any form."""
    forms = [x for x in _forms_of(words) if len(x) >= 8]
    return {name for name, x in content.items() if any(form in x for form in forms)}


def _forms_of(words):
    """How a key may be written: as bytes, and as decimal and hexadecimal digits."""
    for drawn in words:
        yield from (drawn[i : i + 8] for i in range(0, len(drawn), 8))
        for x in np.frombuffer(drawn, "<u4"):
            yield from (str(x).encode(), f"{x:08x}".encode(), f"{x:08X}".encode())
            yield str(x.view(np.int32)).encode()
