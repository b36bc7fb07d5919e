"""That the example of privacy for people is what it says it is."""

import re

import jax
import numpy as np
import pytest
import user_level as example

import dpmp

CLIP_NORM = 0.5
GRAD_FN = jax.jit(dpmp.clipped_grad(example.loss_fn, l2_clip_norm=CLIP_NORM))


@pytest.fixture
def people():
    return example.one_row_per_person(example.make_records(1, 16), 16)


def sum_of(rows, num_left_out=0):
    """The sum of clipped gradients, at parameters that are wrong for everybody."""
    is_left_out = np.arange(len(rows["y"])) < num_left_out
    size = example.NUM_FEATURES
    weights = np.linspace(-3, 3, size, dtype=np.float32)
    params = {"weights": weights, "bias": np.float32(1)}
    tree = jax.tree.map(
        np.asarray, GRAD_FN(params, rows, is_padding_example=is_left_out)
    )
    return np.append(tree["weights"], tree["bias"])


def test_rows_hold_the_records_of_a_person_in_their_order():
    person = np.array([2, 0, 2, 2, 0])
    x = np.arange(5)[:, None] * np.ones(example.NUM_FEATURES)
    rows = example.one_row_per_person({"person": person, "x": x, "y": person == 2}, 4)
    assert rows["is_record"].sum(axis=1).tolist() == [2, 0, 3, 0]
    assert rows["x"][0, :2, 0].tolist() == [1, 4]
    assert rows["x"][2, :3, 0].tolist() == [0, 2, 3]
    assert rows["y"][2, :3].tolist() == [1, 1, 1]


def test_padding_does_not_change_the_sum(people):
    is_record = people["is_record"]
    assert not is_record.all()
    for padding in (7.0, np.nan, np.inf):
        x = np.where(is_record[..., None], people["x"], np.float32(padding))
        np.testing.assert_array_equal(sum_of(people | {"x": x}), sum_of(people))


def test_clipping_bounds_a_person_and_not_only_a_record(people):
    """One person's records all pull in one direction."""
    x = people["x"].copy()
    x[0] = 100.0
    is_record = people["is_record"].copy()
    is_record[0] = True
    y = people["y"].copy()
    y[0] = 1
    people = {"x": x, "y": y, "is_record": is_record}
    change = sum_of(people) - sum_of(people, 1)
    assert 0.9 * CLIP_NORM < np.linalg.norm(change) < 1.0001 * CLIP_NORM
    records = example.one_row_per_record(people)
    change = sum_of(records) - sum_of(records, example.MOST_RECORDS)
    assert np.linalg.norm(change) > 0.9 * example.MOST_RECORDS * CLIP_NORM


def test_owners_of_more_rows_have_larger_epsilons():
    mechanism = example.make_mechanism(3000, epsilon=2.0, delta=1e-5)
    one, two = (example.epsilon_of_a_person(mechanism, n) for n in (1, 2))
    # dpmp's own accounting also charges for truncated batches.
    assert one == pytest.approx(mechanism.guarantee().epsilon, rel=0.02)
    assert two > 1.8 * one


@pytest.mark.slow
def test_it_learns_and_prints_both_guarantees(run, monkeypatch, capsys):
    monkeypatch.setattr(example, "NUM_PEOPLE", 600)
    flags = ["--epsilon", "8", "--delta", "1e-4", "--runs", "2"]
    run(example, *flags)
    printed = capsys.readouterr().out
    assert "are (8.000, 0.0001)-differentially private" in printed
    rows = re.findall(r"(0\.\d+) \+- \S+ +(\S+) +(\S+)  (one|without)", printed)
    by_person, by_record, without = (tuple(map(float, row[:3])) for row in rows)
    assert min(by_person[0], by_record[0], without[0]) > 0.65
    assert by_person[1:] == (8.0, 8.0)
    assert by_record[1] == 8.0
    assert by_record[2] > 80
    assert without[1:] == (np.inf, np.inf)
