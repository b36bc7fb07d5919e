"""The directory of a run, and the order in which a step is released.

A step costs nothing as long as nobody has seen it. So steps are released in blocks:

1. The complete checkpoint is written to `pending`, and reaches the disk.
2. A ledger record with the cost, a nonce and the digest of `pending` reaches the disk.
3. `pending` is renamed. Metrics, callbacks and noisy numbers come after that.

A process that is killed before 2 has released nothing, and its steps are free. After 2
they are paid for, and `RunDirectory.recover` does the rest. docs/proofs.md says why.

A checkpoint holds released values alone: the arrays of a state, the noisy metrics of
the steps before it, the privacy cost of these steps, and a copy of the privacy ledger.
It may be published, apart from the times in the ledger, and from the number of examples
if that is protected.
"""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax

from dpmp import _validate
from dpmp._processes import are_equal, on_first, random_id
from dpmp._typing import PyTree
from dpmp._warnings import warn
from dpmp.runs import _arrays, _files, _ledger
from dpmp.runs._files import (
    CHECKPOINTS,
    checked_path,
    digest_of_tree,
    files_required,
    read_if_any,
    sync,
)
from dpmp.runs._ledger import Ledger, Record
from dpmp.runs._spent import Segment, Spent

_FACTS = "facts.json"
_RESERVE, _RESERVED = "reserve", 8192  # a file, and its bytes
_NO_FILE = FileNotFoundError, IsADirectoryError, NotADirectoryError


class RunDirectory:
    """The ledger and the checkpoints of runs; made by `opened`."""

    def __init__(self, path: pathlib.Path, delta: float | None):
        self.path, self._delta, self._ledger = path, delta, Ledger(path)
        self._folder, self._pending = path / CHECKPOINTS, path / "pending"

    @property
    def spent(self) -> Spent:
        """All steps that were paid for in this directory."""
        return self._ledger.spent

    @property
    def _steps(self) -> list[int]:
        """The numbers of steps after which there is a checkpoint, ascending."""
        names = _files.names_in(self._folder)
        return sorted(int(x) for x in names if x.isdecimal() and x == str(int(x)))

    def recover(self) -> None:
        """Finishes a release that was interrupted, or removes a pending checkpoint.

        Reserves disk space for one more line of the ledger.
        """
        flags = os.O_WRONLY | os.O_CREAT
        with files_required("a run must be able to write into its directory"):
            with _files.open_file(self.path / _RESERVE, flags) as descriptor:
                _files.write_at(descriptor, bytes(_RESERVED), 0)
                os.fsync(descriptor)
            self._ledger.collect()
            self._check_file_system()
            newest = next(reversed(self._ledger.releases.values()), None)
            is_folder = self._pending.is_dir() and not self._pending.is_symlink()
            if is_folder and newest and digest_of_tree(self._pending) == newest.digest:
                # A process that was killed may not have waited for the disk.
                sync(self.path / _ledger.NAME)
                self._commit()
            else:
                self._discard_pending()

    def newest(
        self, like: PyTree, made: int = 0
    ) -> tuple[PyTree, dict[str, Any]] | None:
        """Reads the newest whole checkpoint as `like`, and its facts; None without any.

        If it has no more steps than `made`, the run goes on after these.
        """
        with files_required("a run must be able to read its checkpoints"):
            found = self._newest(like)
        step = max(made, found[1]["step"] if found else 0)
        paid = max((x.stop for x in self.spent.segments), default=0)
        if paid > step:
            warn(
                f"the ledger has paid for steps up to {paid}, but the run goes on "
                f"after step {step}. The steps between are made again, at a new cost. "
                "Publish the epsilon of the ledger, which covers both."
            )
        return found

    def enter(self, spent: Spent) -> None:
        """Records the steps of a state that were made without the directory."""
        for segment in spent.without(self.spent).segments:
            self.charge(segment)

    def check_delta(self) -> None:
        """Raises ValueError unless all runs in the directory have one delta."""
        records = self._ledger.records
        deltas = {x.delta for x in records if x.delta is not None} - {self._delta}
        if deltas:
            _validate.fail(
                "a budget must be for the delta of all runs in the directory. Use "
                "DPSGD with that delta, and a budget that you planned for it.",
                delta=self._delta,
                earlier=sorted(deltas),
            )

    def charge(self, segment: Segment) -> None:
        """Records steps before anything that depends on them is seen."""
        record = Record(event="charged", segment=segment, delta=self._delta)
        if jax.process_count() > 1:
            # Processes may be at different steps, and only the first has the lock.
            _ledger.write_charge_file(self.path, record)
            return
        try:
            self._ledger.append(record)
        except OSError:  # the disk is full
            (self.path / _RESERVE).unlink(missing_ok=True)
            self._ledger.append(record)

    def release(
        self, state: PyTree, segment: Segment, facts: dict[str, Any], *, keep: int = 3
    ) -> None:
        """Releases a state and the steps before it; see the top of this file.

        The newest `keep` checkpoints are kept, each with its facts, numbers and texts.
        """
        nonce, types = random_id(), _arrays.types_of(state)
        facts = {"step": segment.stop, "nonce": nonce, **facts, "shapes": types}

        def start() -> None:
            self._discard_pending()
            _files.make_directory(self._pending)

        def commit() -> None:
            text = json.dumps(facts, allow_nan=False)
            (self._pending / _FACTS).write_text(text)
            (self._pending / _ledger.NAME).write_bytes(self._ledger.copy())
            _files.sync_tree(self._pending)
            record = Record(
                event="released",
                segment=segment,
                delta=self._delta,
                nonce=nonce,
                digest=digest_of_tree(self._pending),
            )
            self._ledger.append(record)
            self._commit()
            for step in self._steps[:-keep]:
                shutil.rmtree(self._folder / str(step), ignore_errors=True)

        required = "a checkpoint must be written before its steps are released"
        with files_required(required):
            on_first(start)
            _arrays.write(self._pending, state)
            on_first(commit)

    def _commit(self) -> None:
        """Releases the pending checkpoint by a rename."""
        step = json.loads((self._pending / _FACTS).read_text())["step"]
        _files.make_directory(self._folder)
        # A run never goes on from a step before the newest whole checkpoint. So
        # checkpoints of later steps are damaged.
        for damaged in [self._folder / str(x) for x in self._steps if x >= step]:
            is_folder = damaged.is_dir() and not damaged.is_symlink()
            shutil.rmtree(damaged) if is_folder else damaged.unlink()
        self._pending.rename(self._folder / str(step))
        sync(self._folder)
        sync(self.path)

    def _discard_pending(self) -> None:
        if self._pending.is_dir() and not self._pending.is_symlink():
            shutil.rmtree(self._pending, ignore_errors=True)
        else:
            self._pending.unlink(missing_ok=True)

    def _check_file_system(self) -> None:
        """Raises ValueError unless a pending checkpoint can be renamed at release."""
        folders = [x for x in (self._folder, self.path) if x.exists()]
        if len({x.stat().st_dev for x in folders}) != 1:
            _validate.fail(
                "checkpoints must be on the file system of their directory. Pass a "
                "checkpoint_dir on that file system, and leave its folders to dpmp.",
                checkpoints=str(self._folder.resolve()),
            )

    def _newest(self, like: PyTree) -> tuple[PyTree, dict[str, Any]] | None:
        for step in reversed(self._steps):
            path = self._folder / str(step)
            facts = self._facts_of_whole(path)
            if facts is not None:
                return _arrays.read(path, like, facts["shapes"]), facts
            warn(
                f"the checkpoint after step {step} in {self._folder} is damaged, and "
                "the one before is used instead. Its steps stay in the ledger, and are "
                "made again at a new cost."
            )
        if self._steps:
            _validate.fail(
                "at least one checkpoint must be whole. Restore the directory from a "
                "copy. The steps stay in the ledger.",
                directory=str(self._folder),
                damaged=self._steps,
            )
        return None

    def _facts_of_whole(self, path: pathlib.Path) -> dict[str, Any] | None:
        """The facts of a checkpoint, or None if its files are damaged."""
        facts, copy = _facts_of(path), path / _ledger.NAME
        if facts is None or not copy.is_file():
            return None
        record = self._ledger.releases.get(facts["nonce"])
        if record is not None and digest_of_tree(path) != record.digest:
            return None
        is_whole = record is not None and self._ledger.copy().startswith(
            copy.read_bytes()
        )
        _require_new_ledger(is_whole, path)
        return facts


def ledger_of(directory: pathlib.Path) -> Ledger:
    """Reads the ledger of a directory, which must be as new as its checkpoints."""
    if (directory / _FACTS).exists():
        _validate.fail(
            "a checkpoint has a copy of the ledger, which ends before it. Pass the "
            "directory of the run.",
            directory=str(directory),
        )
    # They are read before the ledger, to which a run may add just now.
    found = [
        (x, read_if_any(x / _ledger.NAME), _facts_of(x))
        for x in sorted((directory / CHECKPOINTS).glob("*"))
    ]
    ledger = Ledger(directory)
    whole, releases = ledger.copy(), ledger.releases
    for path, copy, facts in found:
        is_known = facts is None or facts["nonce"] in releases
        _require_new_ledger(is_known and whole.startswith(copy), path)
    return ledger


def has_files_of(directory: pathlib.Path, record: Record) -> bool | None:
    """Whether a checkpoint has the files that were released; None if it is gone."""
    checkpoint = directory / CHECKPOINTS / str(record.segment.stop)
    return digest_of_tree(checkpoint) == record.digest if checkpoint.is_dir() else None


def _facts_of(checkpoint: pathlib.Path) -> dict[str, Any] | None:
    """The facts of a checkpoint, or None if they are damaged."""
    try:
        facts = json.loads((checkpoint / _FACTS).read_text())
        hash(facts["nonce"])  # TypeError for what no ledger can have
    except (KeyError, RecursionError, TypeError, ValueError, *_NO_FILE):
        return None
    return facts


def _require_new_ledger(is_new: bool, checkpoint: pathlib.Path) -> None:
    if not is_new:
        _validate.fail(
            "the ledger must be as new as the checkpoints, because it is the only "
            "account of what the steps cost. Restore the newest ledger.jsonl. If it "
            "is lost, use another directory, and add up the epsilon of both. If it is "
            "the checkpoint that is damaged, or of another run, remove its folder.",
            checkpoint=str(checkpoint),
            ledger="without the record of this checkpoint, or of steps before it",
        )


@contextlib.contextmanager
def opened(
    directory: str | os.PathLike[str], *, delta: float | None = None
) -> Iterator[RunDirectory]:
    """Opens the directory of a run; the first of several processes locks it.

    Records of the ledger say that the run was planned for `delta`.
    """
    path = checked_path(directory)
    of_run = path.name == CHECKPOINTS and (path.parent / _ledger.NAME).exists()
    if of_run or (path / _FACTS).exists():
        _validate.fail(
            "checkpoint_dir must be the directory of a run, not a folder in it: the "
            "steps in the ledger of the run would not count. Pass the directory that "
            "the run was started with.",
            checkpoint_dir=str(path),
        )
    with contextlib.ExitStack() as stack:
        with files_required("a run must be able to lock its directory by a file"):
            on_first(lambda: stack.enter_context(_files.locked(path)))
        if not are_equal(_files.read_if_any(path / "lock")):
            _validate.fail(
                "all processes must use the same checkpoint_dir, on a disk that they "
                "share. Pass the same path everywhere, on a shared file system.",
                checkpoint_dir=str(path),
            )
        on_first(lambda: RunDirectory(path, delta).recover())
        yield RunDirectory(path, delta)
