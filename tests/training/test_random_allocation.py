"""Runs whose batches are tied together by random allocation."""

import dataclasses
import warnings

import jax
import numpy as np
import pytest
from small_runs import (
    DELTA,
    MECHANISM,
    SIZE,
    FailureError,
    Source,
    checkpoints,
    epsilon_of,
    fails_at,
    fit,
    new_trainer,
    noisier_trainer,
    ranges,
    recorded_batches,
    records_of,
    without_failures,
)

import dpmp
from dpmp.mechanism import guarantee_of, guarantee_of_stages
from dpmp.runs._ledger import Ledger

EPOCH, STEPS = 4, 11  # two epochs, and three steps of a third one
MECHANISM = dataclasses.replace(
    MECHANISM, sampling="random_allocation", iterations=STEPS
)
GOES_ON_INSIDE = pytest.mark.filterwarnings("ignore:.*inside an epoch of random")


@pytest.fixture(scope="module")
def shared():
    return new_trainer(sampling="random_allocation", iterations=STEPS)


@pytest.fixture
def trainer(shared):
    return without_failures(shared)


@pytest.fixture
def batches(monkeypatch):
    return recorded_batches(monkeypatch)


def costs(*, poisson=0, allocated=0):
    one = dataclasses.replace(MECHANISM, sampling="poisson")
    numbers = {one.step_cost: poisson, MECHANISM.step_cost: allocated}
    return {cost: x for cost, x in numbers.items() if x}


def epsilon(**numbers):
    return guarantee_of(costs(**numbers), delta=DELTA).epsilon


@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_example_takes_part_once_in_every_epoch(trainer, batches, prefetch):
    state = fit(trainer, prefetch=prefetch)
    assert len(batches) == STEPS
    for start in (0, EPOCH):
        epoch = np.concatenate(batches[start : start + EPOCH])
        np.testing.assert_array_equal(np.sort(epoch), np.arange(SIZE))
    last = np.concatenate(batches[2 * EPOCH :])
    assert len({*last}) == len(last)
    fit(trainer, prefetch=prefetch)
    assert not all(map(np.array_equal, batches[:STEPS], batches[STEPS:]))
    assert trainer.guarantee(state).epsilon == epsilon(allocated=12)
    assert trainer.guarantee(state) == MECHANISM.guarantee()


def test_guarantees_count_begun_epochs():
    found = [MECHANISM.guarantee(step).epsilon for step in range(STEPS + 1)]
    assert found[0] == 0 < found[1] == found[EPOCH] < found[EPOCH + 1]
    assert found[2 * EPOCH] < found[2 * EPOCH + 1] == found[STEPS]


def test_sizes_determine_the_steps_of_an_epoch():
    assert MECHANISM.steps_per_epoch == EPOCH
    strategy = MECHANISM.batch_selection_strategy
    limit = strategy.truncated_batch_size
    assert MECHANISM.expected_batch_size < limit < SIZE
    assert strategy == dpmp.batch_selection.RandomAllocation(EPOCH, STEPS, limit)
    uneven = dataclasses.replace(MECHANISM, expected_batch_size=20)
    assert uneven.steps_per_epoch == 3
    assert uneven.sampling_prob == 1 / 3
    given = dataclasses.replace(MECHANISM, sampling_prob=1 / 5)
    assert given.steps_per_epoch == 5
    for fields in ({"sampling_prob": 0.3}, {"sampling": "shuffled"}):
        with pytest.raises(ValueError, match="sampling"):
            dataclasses.replace(MECHANISM, **fields)


def test_a_run_goes_on_inside_an_epoch_by_poisson_steps(trainer, batches, tmp_path):
    fit(trainer, tmp_path, stop_at=6)
    with pytest.warns(match=r"inside an epoch .* step 6 is no multiple of 4"):
        state = fit(trainer, tmp_path)
    assert len(batches) == STEPS
    last = np.concatenate(batches[8:])  # the third epoch is allocated again
    assert len({*last}) == len(last)
    expected = epsilon(poisson=2, allocated=12)
    assert expected > MECHANISM.guarantee().epsilon
    assert epsilon_of(tmp_path) == trainer.guarantee(state).epsilon == expected
    with warnings.catch_warnings(action="error"):
        fit(trainer, tmp_path)  # nothing is left


@GOES_ON_INSIDE
def test_interruptions_in_one_epoch_cost_one_epoch_of_poisson_steps(trainer, tmp_path):
    for stop in (1, 2, 3, 4, 8):
        fit(trainer, tmp_path, stop_at=stop)
    assert epsilon_of(tmp_path) == epsilon(poisson=3, allocated=8)


@GOES_ON_INSIDE
def test_the_rest_of_an_epoch_has_other_batches(trainer, batches, tmp_path):
    with pytest.raises(FailureError):
        fit(trainer, tmp_path, callback=fails_at(9), every=3)
    assert checkpoints(tmp_path)[-1] == 9
    first = batches.copy()
    assert len(first) >= 10  # drawn ahead
    batches.clear()
    fit(trainer, tmp_path)
    assert len({x.segment.id for x in records_of(tmp_path)}) == 2
    assert not any(map(np.array_equal, first[9:], batches))


@GOES_ON_INSIDE
@pytest.mark.filterwarnings("ignore:.*paid for steps up to 6")
def test_started_steps_are_charged_where_they_end_a_run(trainer, tmp_path):
    def fail():
        raise FailureError

    with pytest.raises(RuntimeError, match="could not be loaded"):
        fit(trainer, tmp_path, data=Source(6, fail), every=100, prefetch=0)
    assert max(stop for _, _, stop in ranges(tmp_path)) == 6  # the failed one, too
    fit(trainer, tmp_path)
    assert epsilon_of(tmp_path) == epsilon(poisson=3, allocated=12)


def test_a_budget_ends_with_an_epoch(trainer, tmp_path):
    budget = epsilon(allocated=8)
    with pytest.warns(match="ends the run after step 8 of 11"):
        state = fit(trainer, tmp_path, epsilon_budget=budget)
    assert int(state.step) == 8
    assert epsilon_of(tmp_path) <= budget


@pytest.mark.filterwarnings("ignore:.*steps of another mechanism")
def test_another_cost_is_another_stage(trainer, tmp_path):
    fit(trainer, tmp_path, stop_at=EPOCH)
    other = noisier_trainer()
    fit(other, tmp_path)  # three steps
    stages = [costs(allocated=12), {other.mechanism.step_cost: 3}]
    expected = guarantee_of_stages(stages, delta=DELTA).epsilon
    assert epsilon_of(tmp_path) == expected
    spent = Ledger(tmp_path).spent
    assert spent.guarantee_if_planned(delta=DELTA).epsilon < expected


@GOES_ON_INSIDE
def test_a_run_of_a_key_is_reproducible_up_to_its_interruption(tmp_path):
    """Then its batches are others, so that equal noise would cancel in a difference."""

    trainer = new_trainer(
        sampling="random_allocation", iterations=STEPS, prng_key=jax.random.key(3)
    )
    prepare = type(trainer._programs).prepare

    def used_in(directory, *stops):
        used = {}

        def recorded(self, state, batch, past=None):
            noise = batch.ticket._keys["noise"].tobytes()
            used[batch.ticket.step] = noise, batch.examples["x"].tobytes()
            return prepare(self, state, batch, past)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(trainer._programs), "prepare", recorded)
            for stop in stops:
                fit(trainer, directory, stop_at=stop)
        return used

    whole = used_in(tmp_path / "whole", STEPS)
    parts = used_in(tmp_path / "parts", 6, STEPS)
    assert all(whole[i] == parts[i] for i in range(6))
    assert all(whole[i][0] != parts[i][0] for i in range(6, STEPS))


def test_the_statement_says_how_batches_are_drawn():
    text = " ".join(MECHANISM.statement().split())
    assert "in every epoch of 4 steps, each example is in one batch" in text
    assert "goes on inside an epoch" in text
    assert "with probability" not in text.split("- Sampling:")[1].split("- Steps:")[0]


def test_the_ledger_says_how_batches_were_drawn(trainer, tmp_path):
    fit(trainer, tmp_path, stop_at=4)
    assert ranges(tmp_path)[-1] == ("released", 3, 4)
    spent = Ledger(tmp_path).spent
    (segment,) = spent.segments
    assert segment.cost.sampling == "random_allocation"
    restored = type(spent).from_array(spent.to_array(), num_examples=SIZE)
    assert restored == spent
