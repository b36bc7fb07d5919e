"""The privacy cost of a run, with all steps before it."""

import bisect
import contextlib
import dataclasses
import math
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dpmp import _processes, _validate, runs
from dpmp._warnings import warn
from dpmp.accounting import round_up
from dpmp.mechanism import DPSGD
from dpmp.training._agreement import check_same_past
from dpmp.training._state import TrainingState
from dpmp.training._stops import clear_frames

_SEE_THE_LEDGER = "`python -m dpmp ledger DIR` shows all steps that were paid for."


@dataclasses.dataclass(frozen=True)
class Account:
    """The cost of a run of `fit`, or of steps of `train_step`, under one id."""

    mechanism: DPSGD
    of_state: runs.Spent  # the steps that led to the state
    before: runs.Spent  # these, and all steps that were paid for in the directory
    start: int  # the first step
    end: int  # the step after the last one, as planned now
    id: str  # random and public

    @classmethod
    def of(
        cls,
        mechanism: DPSGD,
        state: TrainingState,
        failed: runs.Spent,
        directory: runs.RunDirectory | None = None,
        others: runs.Spent | None = None,
    ) -> "Account":
        """The account of steps after a state, under a new id.

        The steps that led to the state, the failed steps, and `others`, which someone
        has seen too, are added to the ledger of the directory.
        """
        past = past_of(mechanism, state).beside(failed)
        seen = before = past.beside(others or past)
        check_same_past(seen)
        if directory is not None:
            before = directory.spent.beside(seen)
            _check_people(before, mechanism)
            directory.enter(before)
        start, id_ = int(state.step), _processes.random_id()
        return cls(mechanism, past, before, start, mechanism.iterations, id_)

    def within(self, stop: int, epsilon_budget: float | None) -> "Account":
        """The account of a run that is to `stop`, and is planned within a budget."""
        if self.start > stop:
            warn(
                f"there is a state after {self.start} steps, but the run was to stop "
                f"at {stop}. Nothing was trained, and the later state is returned. To "
                "have an earlier one, train anew, in another directory."
            )
        if self.start >= stop or epsilon_budget is None:
            self._warn_of_longer_plan(stop)
            return self
        if self.epsilon(self.end) <= epsilon_budget:
            return self

        def epsilon_until(end: int) -> float:
            return dataclasses.replace(self, end=end).epsilon(end)

        # By bisection: epsilon rises with the steps, and may take a second to compute.
        ends = range(self.start + 1, self.end + 1)
        end = self.start + bisect.bisect_right(ends, epsilon_budget, key=epsilon_until)
        if not end > 0:
            _validate.fail(
                f"the budget must allow a first step. {_SEE_THE_LEDGER}",
                epsilon_budget=epsilon_budget,
            )
        if end < stop:
            spent = round_up(epsilon_until(end))
            warn(
                f"the budget of epsilon {epsilon_budget} ends the run after step {end} "
                f"of {stop}, with epsilon {spent} spent. {_SEE_THE_LEDGER}"
            )
        return dataclasses.replace(self, end=end)

    def _warn_of_longer_plan(self, stop: int) -> None:
        """Warns if a run is to make more steps than were planned."""
        cost = self.mechanism.step_cost
        # Without those that failed after the state, and are made again.
        made = [x for x in self.of_state.segments if x.stop <= self.start]
        before = max((x.planned for x in made if x.cost == cost), default=math.inf)
        now = runs.Spent(tuple(made)).count(cost) + self.end - self.start
        if before < now and self.start < stop:
            warn(
                f"the run was planned for {before} steps with this mechanism, and now "
                f"for {now}. If the results of its steps had a part in that, epsilon "
                "of all steps may not be claimed: claim an epsilon_budget that you had "
                "fixed before the first step. docs/guarantees.md has the reason."
            )

    def segment(self, start: int, stop: int) -> runs.Segment:
        """Steps of this run."""
        cost = self.mechanism.step_cost
        planned = self.before.count(cost) + self.end - self.start
        return runs.Segment(
            id=self.id, start=start, stop=stop, planned=planned, cost=cost
        )

    def spent(self, stop: int) -> np.ndarray:
        """`TrainingState.spent` after `stop` steps."""
        return self._with_steps(self.of_state, stop).to_array()

    def epsilon(self, stop: int) -> float:
        """The epsilon of this run and everything before it, after `stop` steps."""
        delta = self.mechanism.delta
        assert delta is not None
        return self._with_steps(self.before, stop).guarantee(delta=delta).epsilon

    def _with_steps(self, spent: runs.Spent, stop: int) -> runs.Spent:
        if stop == self.start:
            return spent
        return spent | runs.Spent((self.segment(self.start, stop),))


class LastStep:
    """The last `train_step` of a trainer, whose id the next one continues.

    The id is continued only by the state that this step has returned, once, and in the
    same process. So a state that is continued twice, in two threads or by a copy of the
    trainer, gets two ids, and both ways count. The next state also pays for failed
    steps, because their errors have been seen.
    """

    def __init__(self):
        self._ends: dict[Any, str] = {}  # an id, by the process, the id and the step
        self._failed: dict[str, runs.Segment] = {}  # by their ids
        self._running: dict[str, int] = {}  # the threads of those that may succeed
        self._returned: list[weakref.ref[Any]] = []  # the arrays of the last state

    def __reduce__(self) -> tuple[Any, ...]:
        return LastStep, ()  # a copy has made no step

    def account(self, mechanism: DPSGD, state: TrainingState) -> Account:
        """The account of the next step, with the id of the last step or a new id."""
        self.have_paid(past_of(mechanism, state))  # by a state that was returned
        account = Account.of(mechanism, state, self.failed)
        segments, step = account.of_state.segments, account.start
        ends = [(os.getpid(), x.id, step) for x in segments if x.stop == step]
        ids = [self._ends.pop(x, None) for x in ends]  # no other thread gets it
        return dataclasses.replace(account, id=next(filter(None, ids), account.id))

    @property
    def failed(self) -> runs.Spent:
        """Failed steps that no state has paid for yet."""
        # A thread that asks has no step under way: a second error has ended it.
        others = {None, threading.get_ident()}
        segments = self._failed.copy().values()
        return runs.Spent(
            tuple(x for x in segments if self._running.get(x.id) in others)
        )

    def fail(self, segment: runs.Segment) -> None:
        """Lets the next state pay for a step that has failed."""
        self._failed[segment.id] = segment

    def have_paid(self, spent: runs.Spent) -> None:
        """Forgets the failed steps that a state or a ledger has paid for."""
        for segment in self.failed.segments:
            if not runs.Spent((segment,)).without(spent).segments:
                self._failed.pop(segment.id, None)

    def remember(self, account: Account, state: TrainingState) -> None:
        """Lets the next step continue an account, which has made its step."""
        self._ends = {(os.getpid(), account.id, account.start + 1): account.id}
        self._returned = list(map(weakref.ref, _arrays_of(state)))

    def has_returned(self, state: TrainingState) -> bool:
        """Whether a state has the arrays that the last step has returned."""
        arrays, known = _arrays_of(state), self._returned
        pairs = zip(arrays, known, strict=False)
        return len(arrays) == len(known) and all(x is ref() for x, ref in pairs)

    @contextlib.contextmanager
    def charging(self, mechanism: DPSGD, state: TrainingState) -> Iterator[None]:
        """Charges a step that fails in the block, and clears the error's variables."""
        id_, step, cost = _processes.random_id(), int(state.step), mechanism.step_cost
        self._running[id_] = threading.get_ident()
        # It is charged before, so that no second error can prevent that. No state has
        # it: it was planned alone, beside the steps of every state.
        self.fail(runs.Segment(id=id_, start=step, stop=step + 1, planned=1, cost=cost))
        try:
            yield
        except BaseException as error:
            clear_frames(error)
            self._running.pop(id_)
            raise
        self._failed.pop(id_, None)
        self._running.pop(id_)


def _arrays_of(state: TrainingState) -> list[Any]:
    return jax.tree.leaves(state._replace(spent=None))


def past_of(mechanism: DPSGD, state: TrainingState) -> runs.Spent:
    """The steps that led to a state."""
    past = runs.Spent.from_array(state.spent, num_examples=mechanism.num_examples)
    if not int(state.step) <= sum(x.stop - x.start for x in past.segments):
        _validate.fail(
            "state.spent must say what all steps of the state cost. Save and restore "
            "it with the other fields of the state.",
            step=int(state.step),
        )
    _check_people(past, mechanism)
    return past


def newest(
    state: TrainingState, directory: runs.RunDirectory | None
) -> tuple[TrainingState, list[dict[str, Any]], int | None]:
    """The state, or the newest checkpoint if it has more steps.

    Returns:
      The state, the metrics of its checkpoint, and the number of steps of the newest
      checkpoint, 0 without any. The number is None if this checkpoint has another state
      of as many steps.
    """
    step = int(state.step)
    found = directory and directory.newest(state._replace(spent=None), step)
    if not found:
        return state, [], 0
    saved, facts = found
    saved_step = int(saved.step)
    if saved_step < step:
        return state, [], saved_step
    spent = np.frombuffer(facts["spent"].encode(), np.uint8)
    if saved_step > step:
        return saved._replace(spent=spent), facts["lines"], saved_step
    is_same = np.array_equal(spent, np.asarray(state.spent))
    return state, facts["lines"], step if is_same else None


def _check_people(spent: runs.Spent, mechanism: DPSGD) -> None:
    """Raises ValueError unless past steps can be composed with those of a mechanism."""
    people = mechanism.num_examples, mechanism.neighboring_relation
    for cost in {x.cost for x in spent.segments}:
        if people != (cost.num_examples, cost.neighboring_relation):
            _validate.fail(
                "a run must go on with the number of examples and the neighbouring "
                "relation of its past steps, so that their epsilons can be composed. "
                "Use the same dataset. For another one, train in another directory: "
                "`python -m dpmp ledger DIR1 DIR2` adds up runs on the same people.",
                num_examples=people[0],
                neighboring_relation=people[1].name,
                earlier=(cost.num_examples, cost.neighboring_relation.name),
            )
