"""Checkpoints of a run: orbax writes them, and checksums show whether they are whole.

A checkpoint holds the keys of the run. Anyone who has the keys can subtract the noise
from what the run released, so only the owner may read the files.
"""

import collections
import contextlib
import functools
import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp._warnings import warn

_FOLDER = "checkpoints"


class _OtherArraysError(Exception):
    """A checkpoint holds other arrays than those to restore."""


class Checkpoints:
    """The checkpoints in a directory of a run, by the number of steps made.

    `save` returns as soon as the arrays are copied to the host, so that the next step
    may overwrite them. A background thread writes the copies to a temporary folder,
    which is renamed when it is complete. So a process that is killed leaves no
    incomplete checkpoint behind.
    """

    def __init__(self, directory: pathlib.Path, *, keep: int = 3):
        """Opens the checkpoints, of which the newest `keep` are kept."""
        # orbax takes half a second to import, and is needed here alone.
        import orbax.checkpoint as ocp

        self._ocp, self._path = ocp, directory.resolve() / _FOLDER
        self._path.mkdir(exist_ok=True)
        self._path.chmod(0o700)  # a copy from elsewhere may have lost its mode
        self._checksums: dict[
            int, np.ndarray
        ] = {}  # of those that are known to be whole
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,
            file_options=ocp.options.FileOptions(path_permission_mode=0o700),
        )
        handler = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(
            self._path, item_handlers=handler, options=options
        )

    @property
    def steps(self) -> list[int]:
        """The numbers of steps after which there is a checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: PyTree) -> None:
        """Starts to save the state after a number of steps, unless it is there.

        Waits for the checkpoint before, if it is still being written. A checkpoint of
        another state after the same number of steps, or a damaged one, is replaced.

        Raises:
          OSError, ValueError: if this checkpoint, or the one before, cannot be written.
            Older ones stay as they are.
        """
        self.wait()
        if self.has(step, state):
            return
        if step in self._manager.all_steps():
            self._manager.delete(step)
        _check_names(state)
        sums = checksums(state)
        tree = {"state": _without_keys(state), "checksums": sums}
        self._manager.save(step, args=self._ocp.args.StandardSave(tree), force=True)
        self._checksums[step] = np.asarray(sums)

    def has(self, step: int, state: PyTree) -> bool:
        """Whether this state was saved here or restored, after this number of steps."""
        known = self._checksums.get(step) if step in self._manager.all_steps() else None
        return known is not None and np.array_equal(known, checksums(state))

    def restore(self, like: PyTree) -> PyTree | None:
        """Reads the newest checkpoint that is whole; None if there are none at all.

        Args:
          like: a state with the structure, shapes, dtypes and shardings to restore.

        Raises:
          ValueError: if all checkpoints are damaged, or hold other arrays.
        """
        self.wait()
        for step in reversed(self.steps):
            try:
                return self._read(step, like)
            except _OtherArraysError as error:
                _validate.fail(
                    "the state must have the arrays of the checkpoint",
                    **error.args[0],
                    fix="Build the model and the trainer as they were, or start "
                    "another run in another directory.",
                )
            except Exception as error:  # orbax raises all kinds, according to the file
                warn(
                    f"the checkpoint after step {step} in {self._path} is damaged "
                    f"({type(error).__name__}), and the one before is used instead."
                )
        _validate.require(
            not self.steps,
            "at least one checkpoint must be whole",
            directory=str(self._path),
            damaged=self.steps,
            fix="Restore the directory from a copy. The steps stay in the ledger.",
        )
        return None

    def _read(self, step: int, like: PyTree) -> PyTree:
        saved = _by_name(self._manager.item_metadata(step).tree["state"])
        arrays = jax.tree_util.tree_map_with_path(
            lambda path, x: _shape_of(x, _name(path), saved), like
        )
        _check_arrays(saved, _by_name(arrays))
        sums = jax.ShapeDtypeStruct((len(saved),), np.uint32)
        shapes = {"state": arrays, "checksums": sums}
        restored = self._manager.restore(
            step, args=self._ocp.args.StandardRestore(shapes)
        )
        if not np.array_equal(restored["checksums"], checksums(restored["state"])):
            raise ValueError("a checksum differs")
        self._checksums[step] = np.asarray(restored["checksums"])
        return jax.tree.map(_as_was, like, restored["state"])

    def wait(self) -> None:
        """Waits until all is written, and raises the error if it could not be."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        if jax.process_index() > 0:
            return
        for folder, _, files in os.walk(self._path):
            _make_private(pathlib.Path(folder), 0o700)
            for name in files:
                _make_private(pathlib.Path(folder, name), 0o600)

    def close(self) -> None:
        """Waits, and ends the background thread."""
        try:
            self.wait()
        finally:
            self._manager.close()


@functools.partial(jax.jit, inline=False)
def checksum(x: jax.Array) -> jax.Array:
    """A uint32 that changes with every change of one 32-bit word of an array.

    It is the sum of all words, each mixed with its place, modulo 2^32. The sum does not
    depend on its order, and so not on the sharding. If two or more words change, it
    stays the same with a probability of about 2^-32.
    """
    words = _words(x)
    index = jnp.zeros((), jnp.uint32)
    for axis in range(words.ndim):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        iota = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index = index + iota * jnp.uint32(stride)
    return jnp.sum(_mixed(words + index * jnp.uint32(0x9E3779B1)), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array of any type, as uint32."""
    if _is_key(x):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_ or _info(x.dtype).bits < 8:
        x = x.astype(jnp.float32)  # has every value of these small types
    bits = min(8 * x.dtype.itemsize, 32)
    return jax.lax.bitcast_convert_type(x, f"uint{bits}").astype(jnp.uint32)


def _info(dtype: Any) -> Any:
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return jnp.finfo(dtype) if is_float else jnp.iinfo(dtype)


def _mixed(words: jax.Array) -> jax.Array:
    """Mixes all bits of each word, and gives different words different results.

    A sum of words times weights would stay the same if all signs of an array changed,
    or if it were doubled. This is the last stage of MurmurHash3
    (https://github.com/aappleby/smhasher).
    """
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


def checksums(tree: PyTree) -> jax.Array:
    """The checksums of all arrays of a tree, (number of arrays,) uint32."""
    return jnp.stack([checksum(x) for x in jax.tree.leaves(tree)])


def _check_names(state: PyTree) -> None:
    """Raises ValueError for two arrays of one name: orbax would save one of them."""
    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    twice = [name for name, number in collections.Counter(names).items() if number > 1]
    _validate.require(
        not twice,
        "every array of a checkpoint must have a name of its own, in which the names "
        "of its containers are joined by dots",
        twice=twice,
        fix='Rename one of them: {"a.b": x} and {"a": {"b": x}} have the same name.',
    )


def _make_private(path: pathlib.Path, mode: int) -> None:
    # orbax may be removing what a killed process has left unfinished.
    with contextlib.suppress(FileNotFoundError):
        path.chmod(mode)


def _check_arrays(saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises _OtherArraysError, naming one array, unless the arrays are the same."""
    for name in sorted({*saved, *wanted}):
        types = [
            f"{x.dtype.name}{list(x.shape)}" if x is not None else None
            for x in (saved.get(name), wanted.get(name))
        ]
        if types[0] != types[1]:
            raise _OtherArraysError(
                {"array": name, "saved": types[0], "wanted": types[1]}
            )


def _by_name(tree: PyTree) -> dict[str, Any]:
    return {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _without_keys(tree: PyTree) -> PyTree:
    """The words of each key, by the name of its generator, in place of the key."""

    def words(x: jax.Array) -> PyTree:
        return {str(jax.random.key_impl(x)): jax.random.key_data(x)}

    return jax.tree.map(lambda x: words(x) if _is_key(x) else x, tree)


def _shape_of(like: jax.Array, name: str, saved: dict[str, Any]) -> PyTree:
    """What to read in the place of an array, or of a key of any generator."""
    sharding = like.sharding if isinstance(like, jax.Array) else None
    if not _is_key(like):
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)
    return {
        found.removeprefix(f"{name}."): jax.ShapeDtypeStruct(x.shape, x.dtype)
        for found, x in saved.items()
        if found.startswith(f"{name}.")
    }


def _as_was(like: jax.Array, restored: PyTree) -> jax.Array:
    """Makes what was read a key, and an array that jax may move, if the other was."""
    is_placed = isinstance(like, jax.Array) and like.committed

    def placed(x: jax.Array) -> jax.Array:
        return jax.device_put(x, like.sharding) if is_placed else jnp.array(np.array(x))

    if not _is_key(like):
        return placed(restored)
    ((generator, words),) = restored.items()
    return jax.random.wrap_key_data(placed(words), impl=generator)
