"""Tells whether a run goes on as it was, from its key, its ledger and its data."""

import hashlib
from collections.abc import Callable

import jax
import numpy as np

from dpmp import _validate, runs
from dpmp.mechanism import DPSGD
from dpmp.runs._checkpoints import Checkpoints
from dpmp.training._source import Load
from dpmp.training._state import TrainingState

_PROBES = 16  # examples that stand for the data

# In the place of `probe`, to say what a checkpoint has.
NO_PROBE = np.zeros(4, np.uint32)


def newest(
    checkpoints: Checkpoints,
    ledger: runs.Ledger,
    state: TrainingState,
    load: Load,
    num_examples: int,
    check_state: Callable[[TrainingState], None],
) -> TrainingState:
    """The given state or that of the newest checkpoint, if that has more steps.

    Raises:
      ValueError: if the directory has another run, or if the data have changed.
    """
    saved = checkpoints.restore({"state": state, "data": NO_PROBE})
    keys = {run.key for run in ledger.runs}
    _validate.require(
        not keys or runs.key_fingerprint(state.noise_state.prng_key) in keys,
        "a directory must belong to one run, and this one has a run with another key",
        prng_key="another one",
        fix="To go on, use trainer.init_or_restore(params, checkpoint_dir). A new run "
        "needs another directory, and is charged as well.",
    )
    if saved is None:
        _validate.require(
            not keys,
            "a run that has begun must have a checkpoint to go on from",
            checkpoints=0,
            fix="Restore the checkpoints from a copy. Or start a new run in another "
            "directory, which is charged as well.",
        )
        return state
    check_state(saved["state"])
    _validate.require(
        bool(keys) or int(saved["state"].step) == 0,
        "a run that has begun must have its ledger",
        ledger=None,
        fix="Restore the file ledger.jsonl from a copy: it is the only account of the "
        "steps that were begun.",
    )
    _validate.require(
        np.array_equal(saved["data"], probe(load, num_examples, saved["state"])),
        "a run must go on with its data",
        data="other examples than those of the checkpoint",
        fix="Use the same data in the same order. Other data need a new run in another "
        "directory, which is charged as well.",
    )
    return saved["state"] if int(saved["state"].step) > int(state.step) else state


def entry_of(
    ledger: runs.Ledger,
    mechanism: DPSGD,
    state: TrainingState,
    data: np.ndarray,
    program: str,
) -> runs.Entry:
    """The entry of a run in the ledger, given its state, data and program."""
    key = state.noise_state.prng_key
    others = (state.sampling_key, jax.random.key_data(state.model_key), data)
    facts = [np.asarray(x).tobytes() for x in others]
    return ledger.entry(
        mechanism,
        key_fingerprint=runs.key_fingerprint(key),
        data_tag=runs.data_tag(key, *facts, program.encode()),
    )


def probe(load: Load, num_examples: int, state: TrainingState) -> np.ndarray:
    """A hash of a few examples, (4,) uint32, which notices that data were exchanged.

    It depends on the secret key of the run, so that nobody else can confirm a guess of
    the examples.
    """
    key = np.asarray(state.sampling_key).tobytes()

    def keyed_hash(content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=16, key=key).digest()

    hashes = [keyed_hash(f"probe {i}".encode()) for i in range(_PROBES)]
    indices = sorted({int.from_bytes(x, "little") % num_examples for x in hashes})
    rows = jax.tree_util.tree_leaves_with_path(load(np.array(indices)))
    facts = [f"{path}{x.dtype}{x.shape}".encode() + x.tobytes() for path, x in rows]
    digest = keyed_hash(b"".join(map(keyed_hash, facts)))
    return np.frombuffer(digest, np.uint32)
