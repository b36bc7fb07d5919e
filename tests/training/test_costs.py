"""Random programs of runs, failures and copies, against a model of what they cost.

The model has a set of steps for every state and directory. A step is one draw of a
batch and of noise, which somebody may have learned something about.
"""

import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

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
    new_trainer,
    without_failures,
)

from dpmp.mechanism import PrivacyCost, guarantee_of, guarantee_of_stages
from dpmp.runs import Spent
from dpmp.runs._ledger import Ledger

END = 7  # iterations
# No batch is empty: a source is not asked for an empty one, and could not fail.
TRAINERS = [
    new_trainer(noise_multiplier=x, expected_batch_size=SIZE) for x in (1.0, 1.0, 2.0)
]


class Step(NamedTuple):
    number: int  # unique
    cost: PrivacyCost
    planned: int  # steps of this cost, when this one was made


class Known(NamedTuple):
    """A state, and the steps that led to it."""

    state: object
    steps: frozenset[Step]


class Directory:
    def __init__(self):
        self.path = Path(tempfile.mkdtemp()) / "run"
        self.steps = frozenset()
        self.newest = 0, frozenset()  # the steps of the newest checkpoint

    def copied(self):
        copy = Directory()
        shutil.copytree(self.path, copy.path)
        copy.steps, copy.newest = self.steps, self.newest
        return copy


def planned(steps):
    counts = {x.cost: sum(x.cost == y.cost for y in steps) for x in steps}
    return {
        cost: max(count, *(x.planned for x in steps if x.cost == cost))
        for cost, count in counts.items()
    }


def epsilon(steps):
    counts = {x.cost: sum(x.cost == y.cost for y in steps) for x in steps}
    if len(counts) == 1:
        return guarantee_of(counts, delta=DELTA).epsilon
    return guarantee_of_stages(planned(steps), delta=DELTA).epsilon


def check(spent, steps):
    assert spent.planned() == planned(steps)
    for cost in {x.cost for x in steps}:
        assert spent.count(cost) == sum(x.cost == cost for x in steps)
    result = spent.guarantee(delta=DELTA).epsilon
    assert result == pytest.approx(epsilon(steps), rel=1e-12)


trainers = st.integers(0, len(TRAINERS) - 1)
numbers = st.integers(1, END)


class Programs(hypothesis.stateful.RuleBasedStateMachine):
    states = hypothesis.stateful.Bundle("states")
    directories = hypothesis.stateful.Bundle("directories")

    def __init__(self):
        super().__init__()
        self.number = 0
        self.owed = [frozenset() for _ in TRAINERS]  # failed steps
        for trainer in TRAINERS:
            without_failures(trainer)

    def draws(self, trainer, before, start, number):
        cost = TRAINERS[trainer].mechanism.step_cost
        plan = sum(x.cost == cost for x in before) + END - start
        self.number += number
        numbers = range(self.number - number, self.number)
        return frozenset(Step(i, cost, plan) for i in numbers)

    @hypothesis.stateful.initialize(target=states)
    def init(self):
        return Known(TRAINERS[0].init(PARAMS), frozenset())

    @hypothesis.stateful.rule(target=directories)
    def new_directory(self):
        return Directory()

    @hypothesis.stateful.rule(target=states, trainer=trainers, known=states)
    def own_step(self, trainer, known):
        state = jax.tree.map(jnp.copy, known.state)
        if int(state.step) == END:
            return known
        # A failed step is owed until a state that paid for it comes back.
        self.owed[trainer] -= known.steps
        before = known.steps | self.owed[trainer]
        steps = before | self.draws(trainer, before, int(state.step), 1)
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
        failed = self.draws(trainer, known.steps, int(known.state.step), 1)
        self.owed[trainer] |= failed

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
        if stop < start:
            return known
        past = known.steps
        if directory is not None and directory.newest[0] > start:
            start, past = directory.newest
        past |= self.owed[trainer]
        before = past
        if directory is not None:
            before |= directory.steps | known.steps
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
        steps = self.draws(trainer, before, start, made - start)
        lost = self.draws(trainer, before, start, failed)
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
        self.owed[trainer] = frozenset()
        of_state = past | steps | lost
        check(Spent.from_array(result.spent, num_examples=SIZE), of_state)
        assert int(result.step) == made
        if directory is not None:
            directory.steps = before | steps | lost
            check(Ledger(directory.path).spent, directory.steps)
            if made > directory.newest[0]:
                directory.newest = made, past | steps
        return Known(result, of_state)

    @hypothesis.stateful.rule(target=directories, directory=directories)
    def copied(self, directory):
        return directory.copied() if directory.path.exists() else directory


def fails_at_once():
    raise FailureError


Programs.TestCase.settings = hypothesis.settings(
    max_examples=100, stateful_step_count=25
)
test_programs_cost_what_the_model_says = pytest.mark.filterwarnings(
    "ignore:the directory has", "ignore:the ledger has paid"
)(Programs.TestCase)
