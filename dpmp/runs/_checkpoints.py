"""Checkpoints of a run: written to a pending folder by orbax, and renamed at release.

A checkpoint holds released values alone: the arrays of a state, the noisy metrics of
the steps before it, the privacy cost of these steps, and a copy of the privacy ledger.
It may be published, apart from the times in the ledger, and from the number of examples
if that is protected.
"""

import contextlib
import glob
import json
import logging
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp._warnings import warn
from dpmp.runs import _ledger
from dpmp.runs._files import (
    digest_of_tree,
    make_directory,
    names_in,
    sync,
    sync_tree,
)

_ARRAYS, _FACTS = "arrays", "facts.json"
_NO_FILE = FileNotFoundError, IsADirectoryError, NotADirectoryError


class Checkpoints:
    """The checkpoints in a directory of a run, by the number of steps made."""

    def __init__(self, directory: pathlib.Path):
        self._folder, self._pending = directory / "checkpoints", directory / "pending"

    @property
    def steps(self) -> list[int]:
        """The numbers of steps after which there is a checkpoint, ascending."""
        names = names_in(self._folder)
        return sorted(int(x) for x in names if x.isdecimal() and x == str(int(x)))

    def check_file_system(self) -> None:
        """Raises ValueError unless a pending checkpoint can be renamed at release."""
        folders = [x for x in (self._folder, self._folder.parent) if x.exists()]
        _validate.require(
            len({x.stat().st_dev for x in folders}) == 1,
            "checkpoints must be on the file system of their directory",
            checkpoints=str(self._folder.resolve()),
            fix="Pass a checkpoint_dir on that file system, and leave its folders to "
            "dpmp.",
        )

    def start_pending(self) -> None:
        """Makes an empty folder for a checkpoint that is not released."""
        self.discard_pending()
        make_directory(self._pending)

    def write_arrays(self, state: PyTree) -> None:
        """Writes the arrays of the pending checkpoint; each process writes its part."""
        arrays = {name: _words(x) for name, x in _by_name(state).items() if np.size(x)}
        try:
            with _for_orbax(self._pending) as path, _checkpointer() as (orbax, args):
                orbax.save(path / _ARRAYS, args=args.StandardSave(arrays))
        except Exception as error:  # a page of text, whose end says why
            reason = f"{type(error).__name__} of orbax: ...{str(error)[-160:]}"
        else:
            return
        raise OSError(None, reason, str(self._pending))

    def finish_pending(
        self, state: PyTree, facts: dict[str, Any], ledger: bytes
    ) -> str:
        """Completes the pending checkpoint; returns its digest when the disk has it.

        Args:
          state: the arrays that were written.
          facts: numbers and texts to be saved with them.
          ledger: the ledger without this checkpoint.
        """
        shapes = {name: _describe(x) for name, x in _by_name(state).items()}
        text = json.dumps({**facts, "shapes": shapes}, allow_nan=False)
        (self._pending / _FACTS).write_text(text)
        (self._pending / _ledger.NAME).write_bytes(ledger)
        sync_tree(self._pending)
        return digest_of_tree(self._pending)

    def pending_is_of(self, record: _ledger.Record | None) -> bool:
        """Whether the pending checkpoint is whole and has this record."""
        if record is None or not self._pending.is_dir() or self._pending.is_symlink():
            return False
        return digest_of_tree(self._pending) == record.digest

    def discard_pending(self) -> None:
        """Removes the pending checkpoint, which was not released."""
        if self._pending.is_symlink() or self._pending.is_file():
            self._pending.unlink()
        shutil.rmtree(self._pending, ignore_errors=True)

    def commit(self) -> None:
        """Releases the pending checkpoint by a rename."""
        step = json.loads((self._pending / _FACTS).read_text())["step"]
        make_directory(self._folder)
        # A run never goes on from a step before the newest whole checkpoint. So
        # checkpoints of later steps are damaged.
        for damaged in [x for x in self.steps if x >= step]:
            _remove(self._folder / str(damaged))
        self._pending.rename(self._folder / str(step))
        sync(self._folder)
        sync(self._folder.parent)

    def remove_all_but(self, keep: int) -> None:
        """Removes all checkpoints but the newest."""
        for step in self.steps[:-keep]:
            shutil.rmtree(self._folder / str(step), ignore_errors=True)

    def restore(
        self, like: PyTree, ledger: _ledger.Ledger
    ) -> tuple[PyTree, dict[str, Any]] | None:
        """Reads the newest checkpoint that is whole, with its facts; None without any.

        Args:
          like: a state with the structure, shapes, dtypes and shardings to restore.
          ledger: the ledger, which must have the records of each checkpoint.
        """
        for step in reversed(self.steps):
            facts = self._facts_of_whole(step, ledger)
            if facts is not None:
                return self._read(step, like, facts["shapes"]), facts
            warn(
                f"the checkpoint after step {step} in {self._folder} is damaged, and "
                "the one before is used instead. Its steps stay in the ledger, and are "
                "made again at a new cost."
            )
        _validate.require(
            not self.steps,
            "at least one checkpoint must be whole",
            directory=str(self._folder),
            damaged=self.steps,
            fix="Restore the directory from a copy. The steps stay in the ledger.",
        )
        return None

    def _facts_of_whole(
        self, step: int, ledger: _ledger.Ledger
    ) -> dict[str, Any] | None:
        """The facts of a checkpoint, or None if its files are damaged."""
        path = self._folder / str(step)
        try:
            facts = json.loads((path / _FACTS).read_text())
            record = ledger.released(facts["nonce"])
            copy = (path / _ledger.NAME).read_bytes()
        except (KeyError, RecursionError, TypeError, ValueError, *_NO_FILE):
            return None
        if record is not None and digest_of_tree(path) != record.digest:
            return None
        _validate.require(
            record is not None and ledger.copy().startswith(copy),
            "the ledger must be as new as the checkpoints, because it is the only "
            "account of what the steps cost",
            checkpoint=str(path),
            ledger="without the record of this checkpoint, or of steps before it",
            fix="Restore the newest ledger.jsonl. If it is lost, use another "
            "directory, and add up the epsilon of both. If it is the checkpoint that "
            "is damaged, remove its folder.",
        )
        return facts

    def _read(self, step: int, like: PyTree, saved: dict[str, str]) -> PyTree:
        """Reads the arrays of a checkpoint; `saved` has their names and types."""
        wanted = _by_name(like)
        for name in [*wanted, *saved]:
            type_ = _describe(wanted[name]) if name in wanted else None
            _validate.require(
                saved.get(name) == type_,
                "the state must have the arrays of the checkpoint",
                array=name,
                saved=saved.get(name),
                wanted=type_,
                fix="Build the model and the trainer as they were, or use another "
                "directory, which is charged as well.",
            )
        shapes = {name: _shape_of(x) for name, x in wanted.items() if np.size(x)}
        path = self._folder / str(step)
        with _for_orbax(path) as target, _checkpointer() as (orbax, args):
            found = orbax.restore(target / _ARRAYS, args=args.StandardRestore(shapes))
        leaves = [_as_was(x, found.get(name, x)) for name, x in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _remove(path: pathlib.Path) -> None:
    """Removes a folder, or whatever is in its place."""
    is_folder = path.is_dir() and not path.is_symlink()
    shutil.rmtree(path) if is_folder else path.unlink()


@contextlib.contextmanager
def _checkpointer() -> Iterator[tuple[Any, Any]]:
    # orbax takes half a second to import, and is needed here alone.
    import orbax.checkpoint as ocp

    # If the disk is full, its threads log a hundred lines besides the exception.
    log = logging.getLogger("absl")
    log.addFilter(_is_not_of_orbax)
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            yield checkpointer, ocp.args
    finally:
        log.removeFilter(_is_not_of_orbax)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


@contextlib.contextmanager
def _for_orbax(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The path, or a link to it if orbax would read the path as a pattern."""
    if glob.escape(str(path)) == str(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        link = pathlib.Path(folder, "checkpoint")
        link.symlink_to(path)
        yield link


def _by_name(tree: PyTree) -> dict[str, Any]:
    # A user may have put a Python number there, as a learning rate.
    arrays = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), tree)
    paths = jax.tree_util.tree_leaves_with_path(arrays)
    return {jax.tree_util.keystr(path): x for path, x in paths}


def _describe(x: Any) -> str:
    return f"{x.dtype.name if not _is_key(x) else x.dtype}{list(np.shape(x))}"


def _is_key(x: Any) -> bool:  # an optimizer may have one, for public random numbers
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _words(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    x = _words(x)
    # A checkpoint names the devices that it was written from; these may be gone.
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jnp.asarray(x).sharding)


def _as_was(like: Any, restored: Any) -> jax.Array:
    """Makes a restored array a key or an uncommitted array, if `like` is one."""
    if _is_key(like):
        impl = jax.random.key_impl(like)
        restored = jax.random.wrap_key_data(_as_was(_words(like), restored), impl=impl)
    is_committed = isinstance(like, jax.Array) and like.committed
    return restored if is_committed or _is_key(like) else jnp.array(np.array(restored))
