"""The directory of a run, and the order in which a step is released.

A step costs nothing as long as nobody has seen it. So steps are released in blocks:

1. The complete checkpoint is written to `pending`, and reaches the disk.
2. A ledger record with the cost, a nonce and the digest of `pending` reaches the disk.
3. `pending` is renamed. Metrics, callbacks and noisy numbers come after that.

A process that is killed before 2 has released nothing, and its steps are free. After 2
they are paid for, and `RunDirectory.recover` does the rest. docs/proofs.md says why.
"""

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Any

import jax

from dpmp import _validate
from dpmp._processes import are_equal, on_first, random_id
from dpmp._typing import PyTree
from dpmp._warnings import warn
from dpmp.runs import _ledger
from dpmp.runs._checkpoints import Checkpoints
from dpmp.runs._files import open_file, refused, sync, write_at
from dpmp.runs._ledger import Ledger, Record
from dpmp.runs._lock import locked
from dpmp.runs._spent import Segment, Spent

_RESERVE, _RESERVED = "reserve", 8192  # a file, and its bytes


class RunDirectory:
    """The ledger and the checkpoints of runs; made by `opened`."""

    def __init__(self, path: pathlib.Path, delta: float | None):
        self.path, self._delta = path, delta
        self._ledger, self._checkpoints = Ledger(path), Checkpoints(path)

    @property
    def spent(self) -> Spent:
        """All steps that were paid for in this directory."""
        return self._ledger.spent

    def recover(self) -> None:
        """Finishes a release that was interrupted, or removes a pending checkpoint.

        Reserves disk space for one more line of the ledger.
        """
        try:
            with open_file(
                self.path / _RESERVE, os.O_WRONLY | os.O_CREAT
            ) as descriptor:
                write_at(descriptor, bytes(_RESERVED), 0)
                os.fsync(descriptor)
            self._ledger.collect()
            self._checkpoints.check_file_system()
            if self._checkpoints.pending_is_of(self._ledger.last_release()):
                # A process that was killed may not have waited for the disk.
                sync(self.path / _ledger.NAME)
                self._checkpoints.commit()
            else:
                self._checkpoints.discard_pending()
        except OSError as error:
            refused("a run must be able to write into its directory", error)

    def newest(
        self, like: PyTree, made: int = 0
    ) -> tuple[PyTree, dict[str, Any]] | None:
        """The newest checkpoint and its facts; see `Checkpoints.restore`.

        If no checkpoint has more than `made` steps, the run goes on after these.
        """
        try:
            found = self._checkpoints.restore(like, self._ledger)
        except OSError as error:
            refused("a run must be able to read its checkpoints", error)
        step = max(made, found[1]["step"] if found else 0)
        paid = max((x.stop for x in self.spent.segments), default=0)
        if paid > step:
            warn(
                f"the ledger has paid for steps up to {paid}, but the run goes on "
                f"after step {step}. The steps between are made again, at a new cost."
            )
        return found

    def enter(self, spent: Spent) -> None:
        """Records the steps of a state that were made without the directory."""
        known = self.spent
        for segment in spent.segments:
            both = known | Spent((segment,))
            if both.count(segment.cost) > known.count(segment.cost):
                self.charge(segment)

    def check_delta(self) -> None:
        """Raises ValueError unless all runs in the directory have one delta."""
        deltas = {x.delta for x in self._ledger.records if x.delta is not None}
        others = sorted(deltas - {self._delta})
        _validate.require(
            not others,
            "a budget must be for the delta of all runs in the directory",
            delta=self._delta,
            earlier=others,
            fix="Use DPSGD with that delta, and a budget that you planned for it.",
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
        self,
        state: PyTree,
        segment: Segment,
        facts: dict[str, Any],
        *,
        keep: int = 3,
    ) -> None:
        """Releases a state and the steps before it; see the top of this file.

        The newest `keep` checkpoints are kept.
        """
        facts = {"step": segment.stop, "nonce": random_id(), **facts}

        def commit() -> None:
            record = Record(
                event="released",
                segment=segment,
                delta=self._delta,
                nonce=facts["nonce"],
                digest=self._checkpoints.finish_pending(
                    state, facts, self._ledger.copy()
                ),
            )
            self._ledger.append(record)
            self._checkpoints.commit()
            self._checkpoints.remove_all_but(keep)

        try:
            on_first(self._checkpoints.start_pending)
            self._checkpoints.write_arrays(state)
            on_first(commit)
        except OSError as error:
            refused("a checkpoint must be written before its steps are released", error)


@contextlib.contextmanager
def opened(
    directory: str | os.PathLike[str] | None, *, delta: float | None = None
) -> Iterator[RunDirectory | None]:
    """Opens the directory of a run; the first of several processes locks it.

    Records of the ledger say that the run was planned for `delta`.
    """
    if directory is None:
        yield None
        return
    path = checked_path(directory)
    with contextlib.ExitStack() as stack:
        try:
            on_first(lambda: stack.enter_context(locked(path)))
        except OSError as error:
            refused("a run must be able to lock its directory by a file", error)
        lock = path / "lock"
        _validate.require(
            are_equal(lock.read_bytes() if lock.is_file() else b""),
            "all processes must use the same checkpoint_dir, on a disk that they share",
            checkpoint_dir=str(path),
            fix="Pass the same path everywhere, on a shared file system.",
        )
        on_first(lambda: RunDirectory(path, delta).recover())
        yield RunDirectory(path, delta)


def checked_path(directory: Any) -> pathlib.Path:
    """The absolute path of a directory that exists or can be made."""
    is_path = isinstance(directory, str | os.PathLike)
    text = os.fsdecode(directory) if is_path else ""
    _validate.require(
        text != ""
        and text.encode(errors="ignore") == os.fsencode(text)
        and "\0" not in text
        and "://" not in text,
        "checkpoint_dir must be the path of a directory on a local or mounted file "
        "system, which can lock files",
        checkpoint_dir=text if is_path else type(directory).__name__,
        fix='Use "runs/1", for example. Copy finished checkpoints to a bucket.',
    )
    path = pathlib.Path(text).absolute()  # a program may change its directory
    reason = None
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
        reason = None if is_directory else "a file of this name"
    except FileNotFoundError:
        pass
    except OSError as error:
        reason = error.strerror
    _validate.require(
        reason is None,
        "checkpoint_dir must be a directory, or a name for a new one",
        checkpoint_dir=text[:200],
        reason=reason,
        fix="Use another name.",
    )
    return path
