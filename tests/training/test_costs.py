"""Random programs of runs, failures and copies, against a model of what they cost.

The model has a set of steps for every state and directory. A step is one draw of a
batch and of noise, which somebody may have learned something about.
"""

import shutil
import tempfile
from pathlib import Path
from typing import ClassVar, NamedTuple

import hypothesis.stateful
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st
from small_runs import (
    DATA,
    DELTA,
    PARAMS,
    SIZE,
    FailureError,
    Source,
    fails_at,
    fit,
    fresh_trainer,
    new_trainer,
    noisier_trainer,
    without_failures,
)

from dpmp.mechanism import PrivacyCost, guarantee_of, guarantee_of_stages
from dpmp.runs import Spent
from dpmp.runs._ledger import Ledger

END = 7  # iterations
TRAINERS = [fresh_trainer(), new_trainer(), noisier_trainer()]
COSTS = [x.mechanism.step_cost for x in TRAINERS[1:]]


class Step(NamedTuple):
    number: int  # unique
    cost: PrivacyCost


class History(NamedTuple):
    """Steps, and how many were planned, for each of `COSTS`."""

    steps: frozenset[Step] = frozenset()
    plans: tuple[int, ...] = (0,) * len(COSTS)

    def of(self, cost):
        return {x for x in self.steps if x.cost == cost}

    def planned(self, cost):
        return max(len(self.of(cost)), self.plans[COSTS.index(cost)])

    def joined(self, other):
        """Plans add up if both have steps that the other does not know of."""
        plans = []
        for cost in COSTS:
            ours, theirs = self.of(cost), other.of(cost)
            numbers = self.planned(cost), other.planned(cost)
            are_apart = ours - theirs and theirs - ours
            both = sum(numbers) - len(ours & theirs)
            plans.append(both if are_apart else max(numbers))
        return History(self.steps | other.steps, tuple(plans))

    def then(self, other):
        """Steps that knew of these."""
        plans = tuple(map(max, self.plans, other.plans))
        return History(self.steps | other.steps, plans)

    def epsilon(self):
        costs = {x.cost for x in self.steps}
        if len(costs) == 1:
            return guarantee_of(
                {x: len(self.of(x)) for x in costs}, delta=DELTA
            ).epsilon
        planned = {x: self.planned(x) for x in costs}
        stages = [{x: number} for x, number in planned.items()]
        return guarantee_of_stages(stages, delta=DELTA).epsilon


class Known(NamedTuple):
    """A state, and the steps that led to it."""

    state: object
    history: History


class Directory:
    folders: ClassVar[list[str]] = []  # to be removed

    def __init__(self):
        self.folders.append(tempfile.mkdtemp())
        self.path = Path(self.folders[-1]) / "run"
        self.history = History()
        self.newest = 0, History()  # the newest checkpoint

    def copied(self):
        copy = Directory()
        shutil.copytree(self.path, copy.path)
        copy.history, copy.newest = self.history, self.newest
        return copy


def check(spent, history):
    costs = {x.cost for x in history.steps}
    assert spent.planned() == {x: history.planned(x) for x in costs}
    assert all(spent.count(x) == len(history.of(x)) for x in costs)
    result = spent.guarantee(delta=DELTA).epsilon
    assert result == pytest.approx(history.epsilon(), rel=1e-12)


trainers = st.integers(0, len(TRAINERS) - 1)
numbers = st.integers(1, END)


class Programs(hypothesis.stateful.RuleBasedStateMachine):
    states = hypothesis.stateful.Bundle("states")
    directories = hypothesis.stateful.Bundle("directories")

    def __init__(self):
        super().__init__()
        self.number = 0
        self.owed = [History() for _ in TRAINERS]  # failed steps
        for trainer in TRAINERS:
            without_failures(trainer)

    def teardown(self):
        while Directory.folders:
            shutil.rmtree(Directory.folders.pop())

    def draws(self, trainer, before, number, planned):
        """Steps of a run that knows those before it."""
        cost = TRAINERS[trainer].mechanism.step_cost
        self.number += number
        numbers = range(self.number - number, self.number)
        plans = [0] * len(COSTS)
        if number:
            plans[COSTS.index(cost)] = len(before.of(cost)) + planned
        return History(frozenset(Step(i, cost) for i in numbers), tuple(plans))

    def forgive(self, trainer, history):
        owed = self.owed[trainer]
        left = owed.steps - history.steps
        plans = tuple(sum(x.cost == cost for x in left) for cost in COSTS)
        self.owed[trainer] = History(left, plans)

    @hypothesis.stateful.initialize(target=states)
    def init(self):
        return Known(TRAINERS[0].init(PARAMS), History())

    @hypothesis.stateful.rule(target=directories)
    def new_directory(self):
        return Directory()

    @hypothesis.stateful.rule(target=states, trainer=trainers, known=states)
    def own_step(self, trainer, known):
        state = jax.tree.map(jnp.copy, known.state)
        if int(state.step) == END:
            return known
        # A failed step is owed until a state that paid for it comes back.
        self.forgive(trainer, known.history)
        before = known.history.joined(self.owed[trainer])
        steps = before.then(self.draws(trainer, before, 1, END - int(state.step)))
        batch = TRAINERS[trainer].load_batch(state, DATA)
        made = TRAINERS[trainer].train_step(state, batch)
        check(Spent.from_array(made.spent, num_examples=SIZE), steps)
        return Known(made, steps)

    @hypothesis.stateful.rule(trainer=trainers, known=states)
    def fails_to_load(self, trainer, known):
        source = Source(1, fails_at_once)
        if int(known.state.step) == END:
            return
        with pytest.raises(RuntimeError, match="could not be loaded"):
            TRAINERS[trainer].load_batch(known.state, source)
        failed = self.draws(trainer, History(), 1, 1)
        self.owed[trainer] = self.owed[trainer].then(failed)

    @hypothesis.stateful.rule(
        target=states,
        trainer=trainers,
        known=states,
        stop=numbers,
        failure=st.sampled_from(["none", "callback", "source"]),
        directory=st.none() | directories,
        every=st.integers(1, 3),
    )
    def run(self, trainer, known, stop, failure, directory, every):
        start = int(known.state.step)
        past = known.history
        if directory is not None and directory.newest[0] > start:
            start, past = directory.newest
        past = past.joined(self.owed[trainer])
        before = past
        if directory is not None:
            before = directory.history.joined(past.joined(known.history))
        else:
            every = 1  # each step is released as it is made
        ends = [x for x in range(start + 1, stop + 1) if x % every == 0 or x == stop]
        if failure == "callback" and ends:
            made, failed = ends[len(ends) // 2], 0
        elif failure == "source" and ends:
            made, failed = ends[-1] - 1, 1
        else:
            made, failed, failure = max(start, stop), 0, "none"
        # A later state in the directory, and another one of as many steps, stay.
        steps = self.draws(trainer, before, made - start, END - start)
        lost = self.draws(trainer, before, failed, END - start)
        options = {}
        if directory is not None:
            options = {"directory": directory.path, "every": every}
        source = DATA
        if failure == "source":
            source = Source(made - start + 1, fails_at_once)
        if failure == "callback":
            options["callback"] = fails_at(made)
        state = jax.tree.map(jnp.copy, known.state)
        error = None
        try:
            result = fit(
                TRAINERS[trainer], state=state, data=source, stop_at=stop, **options
            )
        except (FailureError, RuntimeError) as raised:
            error, result = raised, TRAINERS[trainer].last_state
        assert (error is None) == (failure == "none"), error
        self.owed[trainer] = History()
        of_state = past.then(steps).then(lost)
        check(Spent.from_array(result.spent, num_examples=SIZE), of_state)
        assert int(result.step) == made
        if directory is not None:
            directory.history = before.then(steps).then(lost)
            check(Ledger(directory.path).spent, directory.history)
            if made > directory.newest[0]:
                directory.newest = made, past.then(steps)
        return Known(result, of_state)

    @hypothesis.stateful.rule(target=directories, directory=directories)
    def copied(self, directory):
        return directory.copied() if directory.path.exists() else directory


def fails_at_once():
    raise FailureError


Programs.TestCase.settings = hypothesis.settings(
    max_examples=40, stateful_step_count=25
)
test_programs_cost_what_the_model_says = pytest.mark.filterwarnings(
    "ignore:the directory has",
    "ignore:there is a state after",
    "ignore:the ledger has paid",
    "ignore:.*steps of another mechanism",
)(Programs.TestCase)
