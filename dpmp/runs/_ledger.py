"""The privacy ledger of a directory: what was begun, what it cost, what may follow."""

import datetime
import os
import pathlib
from collections.abc import Callable

from dpmp import _validate, accounting
from dpmp.mechanism import DPSGD
from dpmp.runs import _files
from dpmp.runs._budget import most_steps
from dpmp.runs._environment import version
from dpmp.runs._history import History, Run, gaps, guarantee
from dpmp.runs._records import Record


class Ledger:
    """Records all steps of all runs in a directory before they begin.

    >>> import tempfile
    >>> from dpmp import runs
    >>> mechanism = DPSGD(
    ...     num_examples=6000, expected_batch_size=60, iterations=500, l2_clip_norm=1.0
    ... ).calibrate(epsilon=4.0, delta=1e-6)
    >>> key = jax.random.key(0)
    >>> with runs.locked(tempfile.mkdtemp()) as directory:
    ...     ledger = runs.Ledger.open(directory)
    ...     entry = ledger.entry(
    ...         mechanism,
    ...         key_fingerprint=runs.key_fingerprint(key),
    ...         data_tag=runs.data_tag(key, b"patients of 2019"),
    ...     )
    ...     entry.begin(0, 100)
    >>> print(f"{ledger.guarantee(delta=1e-6).epsilon:.3f}")
    2.804

    Guarantees:
      When `Entry.begin` returns, the disk has the record of the steps. A process that
      is killed at any instant, or a machine that loses power, leaves a file that
      states all steps that were begun, and perhaps some that were not. The next record
      removes an incomplete last line. A file that was damaged in any other place is
      refused.

      The file has no secret keys, and nothing that was computed from private data. It
      states `num_examples`, which is protected under ADD_OR_REMOVE_ONE.
    """

    def __init__(self, directory: pathlib.Path):
        self._directory = directory
        self._file = _files.read(directory)
        self._history = History(self._file.records if self._file else [])

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> "Ledger":
        """Reads the ledger of a directory, or starts one.

        Hold the lock of the directory (`runs.locked`) from here to the last record.

        Raises:
          ValueError: if the file is damaged.
        """
        return cls(pathlib.Path(directory))

    @property
    def runs(self) -> list[Run]:
        """All runs that were begun, in the order of their first records."""
        return self._history.runs

    def guarantee(self, *, delta: float) -> accounting.PrivacyGuarantee:
        """The guarantee of all steps of all runs together.

        Raises:
          ValueError: if `delta` is out of range.
        """
        return guarantee(self.runs, delta=delta)

    def entry(
        self, mechanism: DPSGD, *, key_fingerprint: str, data_tag: str
    ) -> "Entry":
        """Prepares the records of one run.

        Args:
          mechanism: the mechanism of the run. It must have its noise.
          key_fingerprint: identifies the root key of the noise; see
            `runs.key_fingerprint`.
          data_tag: identifies everything else that decides what a step releases; see
            `runs.data_tag`.

        Raises:
          ValueError: if an earlier run has another neighbouring relation.
        """
        relation = mechanism.neighboring_relation
        others = {run.cost.neighboring_relation for run in self.runs} - {relation}
        _validate.require(
            not others,
            "all runs in a directory must have one neighbouring relation, so that "
            "their epsilons can be composed",
            neighboring_relation=relation.name,
            earlier=[other.name for other in others],
            fix="Use the relation of the earlier runs, or another directory.",
        )
        return Entry(self, mechanism, key_fingerprint, data_tag)

    def _append(self, record: Record) -> None:
        self._file = _files.append(self._directory, self._file, record)
        self._history.add(record)


class Entry:
    """One run in a ledger, made by `Ledger.entry`."""

    def __init__(self, ledger: Ledger, mechanism: DPSGD, key: str, data: str):
        self._ledger, self._delta = ledger, mechanism.delta
        self._identity = key, data, mechanism.step_cost
        self._last_begun = range(0)

    def begin(self, start: int, stop: int) -> None:
        """Records that the steps from `start` to before `stop` are about to begin.

        Returns as soon as the disk has the record.

        Raises:
          ValueError: if the range is empty, or if one of the steps was begun with the
            same key but other data or another cost. Its noise would be used twice.
          OSError: if the record cannot be written, for example on a full disk.
          RuntimeError: if somebody else has written into the file.
        """
        steps = _check_range(start, stop)
        self._runs_after(steps)
        self._write("begin", steps)
        self._last_begun = steps

    def stop_before(self, step: int) -> None:
        """Records that a run was stopped before `step`, in the last steps of `begin`.

        `step` and those after it have not begun, and cost nothing.

        Raises:
          OSError, RuntimeError: see `begin`.
        """
        if step in self._last_begun:
            self._write("not begun", range(step, self._last_begun.stop))
            self._last_begun = range(self._last_begun.start, step)

    def enter(self, step: int) -> None:
        """Records that the run has its key from `step` on, without beginning a step.

        Raises:
          ValueError, OSError, RuntimeError: see `begin`.
        """
        self.begin(step, step + 1)
        self.stop_before(step)

    def _write(self, event: str, steps: range) -> None:
        key, data, cost = self._identity
        now = datetime.datetime.now(datetime.UTC)
        record = Record(
            event=event,
            time=now.isoformat(timespec="seconds"),
            dpmp=version("dpmp"),
            jax=version("jax"),
            key=key,
            data=data,
            start=steps.start,
            stop=steps.stop,
            delta=self._delta,
            cost=cost,
        )
        self._ledger._append(record)

    def steps_within(
        self, epsilon_budget: float, *, delta: float, start: int, stop: int
    ) -> int:
        """How many of the next steps may begin within a budget for the directory.

        Args:
          epsilon_budget: the largest epsilon that all runs together may reach.
          delta: the delta for which epsilon is computed.
          start: the next step.
          stop: the step after the last one that is wanted.

        Returns:
          The largest number of steps from `start` on, up to `stop - start`, after which
          the epsilon of the whole ledger is within the budget. Steps that were begun
          before cost nothing when they are repeated.

        Raises:
          ValueError: for an argument out of range, or for steps that `begin` refuses.
        """
        budget = _validate.positive(
            epsilon_budget=epsilon_budget, fix="Use 8, for example."
        )
        steps = _check_range(start, stop)

        def epsilon(number: int) -> float:
            return guarantee(self._runs_after(steps[:number]), delta=delta).epsilon

        return most_steps(epsilon, budget, len(steps))

    def epsilon_after(self, start: int, *, delta: float) -> Callable[[int], float]:
        """Returns a function from a later step to the epsilon of the whole ledger then.

        The steps from `start` to the later one count, and everything that is in the
        ledger now.
        """
        history = self._ledger._history
        run = history.run(*self._identity)

        def epsilon(step: int) -> float:
            after = run.with_steps(range(start, step))
            return guarantee(history.with_run(after), delta=delta).epsilon

        return epsilon

    def repeats_noise(self, start: int, stop: int) -> bool:
        """Whether a step was begun with the same key and other data or another cost.

        `begin` refuses such steps: the noise would cancel in the difference.
        """
        run, runs = self._after(_check_range(start, stop))
        return any(run.repeats_noise_of(other) for other in runs)

    def were_begun(self, start: int, stop: int) -> bool:
        """Whether a step was begun with the same key, whatever it was added to."""
        steps = _check_range(start, stop)
        same_key = [run for run in self._ledger.runs if run.key == self._identity[0]]
        return sum(map(len, gaps(same_key, steps))) < len(steps)

    def gaps(self, stop: int) -> list[range]:
        """The steps before `stop` of this run that the ledger does not have.

        Steps before the first one with the key of the run may have been made with
        another key, which the run had before it got a fresh one. If the first one did
        not begin after all, it still tells from where on the run has its key.
        """
        same_key = [run for run in self._ledger.runs if run.key == self._identity[0]]
        recorded = (x for run in same_key for x in (*run.steps, run.last))
        first = min([stop, *(x.start for x in recorded)])
        before = gaps(self._ledger.runs, range(first))
        return before + gaps(same_key, range(first, stop))

    def _runs_after(self, steps: range) -> list[Run]:
        """All runs after these steps; ValueError if they would repeat noise."""
        run, runs = self._after(steps)
        _validate.require(
            not any(run.repeats_noise_of(other) for other in runs),
            "no step may be repeated with the same key and other data, another loss or "
            "another mechanism, because the noise would cancel in the difference",
            start=steps.start,
            stop=steps.stop,
            fix="Continue the run as it was. Or start another run with a fresh key.",
        )
        return runs

    def _after(self, steps: range) -> tuple[Run, list[Run]]:
        history = self._ledger._history
        run = history.run(*self._identity).with_steps(steps)
        return run, history.with_run(run)


def _check_range(start: int, stop: int) -> range:
    steps = range(
        _validate.nonnegative_integer(start=start, fix="Count the steps from 0."),
        _validate.nonnegative_integer(stop=stop, fix="Count the steps from 0."),
    )
    _validate.require(
        bool(steps),
        "stop must be above start",
        start=start,
        stop=stop,
        fix="Record steps only if there are some to begin.",
    )
    return steps
