"""What a run costs: everything before it, and step by step."""

import bisect
import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np

from dpmp import _processes, _validate, runs
from dpmp._warnings import warn
from dpmp.mechanism import DPSGD
from dpmp.training._state import TrainingState


@dataclasses.dataclass(frozen=True)
class Account:
    """The cost of a run of `fit`, or of steps of `train_step`, under one id.

    Attributes:
      mechanism: makes the steps.
      of_state: what the state has been through before.
      before: this, and everything that was paid for in the directory.
      start: the first step.
      id: a random public id.
    """

    mechanism: DPSGD
    of_state: runs.Spent
    before: runs.Spent
    start: int
    id: str

    @classmethod
    def of(
        cls,
        mechanism: DPSGD,
        state: TrainingState,
        directory: runs.RunDirectory | None,
        failed: runs.Spent,
    ) -> "Account":
        """The account of a run that goes on from a state, in a directory or not.

        The ledger of the directory gets the steps that the state has made elsewhere,
        and those that have failed.
        """
        past = before = past_of(mechanism, state) | failed
        if directory is not None:
            before = directory.spent | past  # in the order of the ledger
            _check_people(before, mechanism)
            directory.enter(past)
        return cls(mechanism, past, before, int(state.step), _processes.random_id())

    def stop_within(self, stop: int, epsilon_budget: float | None) -> int:
        """The step at which to stop: `stop`, or an earlier one within a budget."""
        if self.start > stop:
            warn(
                f"the directory has a state after {self.start} steps, but the run was "
                f"to stop at {stop}. Nothing was trained, and the later state is "
                "returned. To have an earlier one, train in another directory."
            )
        if self.start >= stop:
            return self.start
        if epsilon_budget is None or self.epsilon(stop) <= epsilon_budget:
            return stop
        # A computation may take a second, and epsilon rises with the steps.
        more = range(self.start + 1, stop)
        allowed = bisect.bisect_right(more, epsilon_budget, key=self.epsilon)
        _validate.require(
            allowed > 0,
            "the budget must allow one more step",
            epsilon_budget=epsilon_budget,
            step=self.start,
            fix="The ledger of the directory has all steps that were paid for: "
            "python -m dpmp ledger DIR.",
        )
        warn(
            f"the budget of epsilon {epsilon_budget} allows {self.start + allowed} "
            f"steps of {stop}; the run will stop there."
        )
        return self.start + allowed

    def segment(self, start: int, stop: int) -> runs.Segment:
        """Steps of this run."""
        cost = self.mechanism.step_cost
        left = self.mechanism.iterations - self.start
        return runs.Segment(
            id=self.id,
            start=start,
            stop=stop,
            planned=self.before.count(cost) + left,
            cost=cost,
        )

    def spent(self, stop: int) -> np.ndarray:
        """`TrainingState.spent` after `stop` steps."""
        return self._with_steps(self.of_state, stop).to_array()

    def epsilon(self, stop: int) -> float:
        """The epsilon of everything, after `stop` steps.

        The mechanism must have a delta.
        """
        delta = self.mechanism.delta
        assert delta is not None
        return self._with_steps(self.before, stop).guarantee(delta=delta).epsilon

    def _with_steps(self, spent: runs.Spent, stop: int) -> runs.Spent:
        if stop == self.start:
            return spent
        return spent | runs.Spent((self.segment(self.start, stop),))


class LastStep:
    """The account of the last `train_step` of a trainer, which the next one continues.

    Only the state that this step has returned goes on with its id, once, and in its
    process. So a state that is continued twice, in two threads or by a copy of the
    trainer, has two ids, and both ways count.
    """

    def __init__(self):
        self._ends: set[tuple[int, str, int]] = set()  # the process, the id, the step
        self._failed: dict[str, runs.Segment] = {}  # by their ids

    def __reduce__(self) -> tuple[Any, ...]:
        return LastStep, ()  # a copy has made no step

    def account(self, mechanism: DPSGD, state: TrainingState) -> Account:
        """The account of the next step, with the id of the last one or a fresh one."""
        past, step = past_of(mechanism, state), int(state.step)
        end = [(os.getpid(), x.id, step) for x in past.segments[-1:] if x.stop == step]
        try:
            self._ends.remove(end[0])  # no other thread gets it
            id_ = end[0][1]
        except (IndexError, KeyError):
            id_ = _processes.random_id()
        past |= self.failed
        return Account(mechanism, past, past, step, id_)

    @property
    def failed(self) -> runs.Spent:
        """Steps that have failed, which no state has paid for yet."""
        return runs.Spent(tuple(self._failed.copy().values()))

    def fail(self, segment: runs.Segment) -> None:
        """Lets the next state pay for a step that has failed."""
        self._failed[segment.id] = segment

    def have_paid(self, spent: runs.Spent) -> None:
        """Forgets the failed steps that a state or a ledger has."""
        for segment in spent.segments:
            self._failed.pop(segment.id, None)

    def remember(self, account: Account) -> None:
        """Lets the next step continue an account, which has made its step."""
        self._ends = {(os.getpid(), account.id, account.start + 1)}
        self.have_paid(account.before)

    @contextlib.contextmanager
    def charging(self, mechanism: DPSGD, state: TrainingState) -> Iterator[None]:
        """Lets the next step pay for one that fails, whose error has been seen."""
        past, step = past_of(mechanism, state), int(state.step)
        account = Account(mechanism, past, past, step, secrets.token_hex(16))
        try:
            yield
        except BaseException:
            self.fail(account.segment(step, step + 1))
            raise


def past_of(mechanism: DPSGD, state: TrainingState) -> runs.Spent:
    """The steps that a state has been through."""
    past = runs.Spent.from_array(state.spent, num_examples=mechanism.num_examples)
    _check_people(past, mechanism)
    return past


def _check_people(spent: runs.Spent, mechanism: DPSGD) -> None:
    """Raises ValueError unless past steps can be composed with those of a mechanism."""
    relation = mechanism.neighboring_relation
    for cost in {x.cost for x in spent.segments}:
        _validate.require(
            cost.neighboring_relation is relation
            and cost.num_examples == mechanism.num_examples,
            "a run must go on with the number of examples and the neighbouring "
            "relation of its past steps, so that their epsilons can be composed",
            num_examples=mechanism.num_examples,
            neighboring_relation=relation.name,
            earlier=(cost.num_examples, cost.neighboring_relation.name),
            fix="Use the same dataset. For another one, train in another directory: "
            "`python -m dpmp ledger DIR1 DIR2` adds up runs on the same people.",
        )
