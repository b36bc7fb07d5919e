"""Tells whether a run goes on as it was, from its key, its ledger and its data."""

import hashlib
from collections.abc import Callable

import jax
import numpy as np

from dpmp import _validate, runs
from dpmp.mechanism import DPSGD
from dpmp.runs._checkpoints import Checkpoints, checksums
from dpmp.training._source import Load
from dpmp.training._state import TrainingState

_PROBES = 16  # examples that stand for the data

# What a checkpoint has beside the state: `probe` and `origin_of`, (4,) uint32 each.
NO_FACTS = {"data": np.zeros(4, np.uint32), "origin": np.zeros(4, np.uint32)}


def newest(
    checkpoints: Checkpoints,
    ledger: runs.Ledger,
    state: TrainingState,
    load: Load,
    num_examples: int,
    check_state: Callable[[TrainingState], None],
) -> tuple[TrainingState, np.ndarray]:
    """The given state or that of the newest checkpoint, if that has more steps.

    Returns also the origin that the checkpoint has; see `origin_of`.

    Raises:
      ValueError: if the directory has another run, or if the data have changed.
    """
    saved = checkpoints.restore({"state": state, **NO_FACTS})
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
        return state, NO_FACTS["origin"]
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
    is_newer = int(saved["state"].step) > int(state.step)
    return saved["state"] if is_newer else state, np.asarray(saved["origin"])


def entry_of(
    ledger: runs.Ledger,
    mechanism: DPSGD,
    state: TrainingState,
    beside: dict[str, np.ndarray],
    program: str,
) -> runs.Entry:
    """The entry of a run in the ledger, given its state, data, origin and program."""
    key = state.noise_state.prng_key
    others = (state.sampling_key, jax.random.key_data(state.model_key))
    facts = [np.asarray(x).tobytes() for x in (*others, *beside.values())]
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
    keyed_hash = _hash_with_key_of(state)
    hashes = [keyed_hash(f"probe {i}".encode()) for i in range(_PROBES)]
    indices = sorted({int.from_bytes(x, "little") % num_examples for x in hashes})
    rows = jax.tree_util.tree_leaves_with_path(load(np.array(indices)))
    facts = [f"{path}{x.dtype}{x.shape}".encode() + x.tobytes() for path, x in rows]
    digest = keyed_hash(b"".join(map(keyed_hash, facts)))
    return np.frombuffer(digest, np.uint32)


def origin_of(state: TrainingState, before: np.ndarray) -> np.ndarray:
    """A hash, (4,) uint32, of a state that no step of the run has made.

    Such are the first state, and one that the user has changed. `before` is the origin
    up to there. Two runs with one key and different origins add the same noise to
    different sums, and the ledger must not take one for a repetition of the other.
    """
    decisive = (state.params, state.opt_state, state.clip_norm)
    decisive += (state.scale_state, state.update_key)
    words = np.asarray(checksums(decisive))
    digest = _hash_with_key_of(state)(before.tobytes() + words.tobytes())
    return np.frombuffer(digest, np.uint32)


def _hash_with_key_of(state: TrainingState) -> Callable[[bytes], bytes]:
    key = np.asarray(state.sampling_key).tobytes()
    return lambda content: hashlib.blake2b(content, digest_size=16, key=key).digest()
