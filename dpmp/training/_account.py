"""What a run costs: everything before it, and step by step."""

import dataclasses

import numpy as np

from dpmp import _processes, runs
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
    ) -> "Account":
        """The account of a run that goes on from a state, in a directory or not.

        The ledger of the directory gets the steps that the state has made elsewhere.

        Raises:
          ValueError: if earlier steps were about other people.
        """
        past = past_of(mechanism, state)
        before = past
        if directory is not None:
            before = past | directory.spent
            runs.check_people(before, mechanism)
            directory.enter(past, mechanism.delta)
        return cls(mechanism, past, before, int(state.step), _processes.random_id())

    def stop_at_least(self, stop: int) -> int:
        """The number of steps after which to stop, if it is not behind the state."""
        if self.start > stop:
            warn(
                f"the directory has a state after {self.start} steps, but the run was "
                f"to stop at {stop}. Nothing was trained, and the later state is "
                "returned. To have an earlier one, train in another directory."
            )
        return max(self.start, stop)

    def stop_within(self, epsilon_budget: float, stop: int) -> int:
        """The last step, up to `stop`, within a budget; see `runs.steps_within`."""
        if stop <= self.start:
            return stop
        return runs.steps_within(epsilon_budget, self.epsilon, self.start, stop)

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

    def times_paid(self, step: int) -> int:
        """How often a step was paid for before."""
        return self.before.times_made(step)

    def words(self, stop: int) -> np.ndarray:
        """`TrainingState.spent` after `stop` steps."""
        return self._with_steps(self.of_state, stop).to_words()

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


def past_of(mechanism: DPSGD, state: TrainingState) -> runs.Spent:
    """The steps that a state has been through.

    Raises:
      ValueError: if they were about other people than those of the mechanism.
    """
    past = runs.Spent.from_words(state.spent, num_examples=mechanism.num_examples)
    runs.check_people(past, mechanism)
    return past
