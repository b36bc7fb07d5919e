import tracemalloc

import numpy as np
import pytest
from refusals import refusals
from scipy import stats

from dpmp.batch_selection import PoissonSampling, RandomAllocation, _allocation

KEY = 0x0123456789ABCDEF_FEDCBA9876543210
# With fixed keys nothing flakes; this is for the day on which a key changes.
SMALLEST_P_VALUE = 1e-6


def steps_of(sampling, num_examples, key=KEY, start=0):
    """The steps of each example, a list of sets."""
    steps = [set() for _ in range(num_examples)]
    batches = sampling.batch_iterator(num_examples, key, start=start)
    for step, batch in enumerate(batches, start):
        assert batch.dtype == np.int64
        assert np.all(np.diff(batch) > 0)
        for i in batch:
            steps[i].add(step)
    return steps


def allocation(num_examples, steps, epochs, key=KEY):
    """(num_examples, epochs): the place of each example in each epoch."""
    found = steps_of(RandomAllocation(steps, steps * epochs), num_examples, key)
    return np.array([[x % steps for x in sorted(of_one)] for of_one in found])


def is_uniform(counts):
    return stats.chisquare(counts).pvalue > SMALLEST_P_VALUE


def test_every_example_takes_part_once_in_every_epoch(monkeypatch):
    whole = steps_of(RandomAllocation(7, 21), 1000)
    assert all(sorted(x // 7 for x in of_one) == [0, 1, 2] for of_one in whole)
    # Neither windows nor chunks change anything.
    for kept, at_once in ((2**23, 64), (300, 2**20), (60, 100), (1, 64)):
        monkeypatch.setattr(_allocation, "_KEPT", kept)
        monkeypatch.setattr(_allocation, "_AT_ONCE", at_once)
        assert steps_of(RandomAllocation(7, 21), 1000) == whole


def test_places_are_uniform_and_independent():
    places = allocation(4000, 5, 2)
    others = allocation(4000, 5, 2, KEY + 1)
    assert is_uniform(np.bincount(places[:, 0]))
    pairs = [
        (places[:, 0], places[:, 1]),  # of epochs
        (places[1:, 0], places[:-1, 0]),  # of neighbours
        (places[:, 0], others[:, 0]),  # of keys
    ]
    for first, second in pairs:
        assert is_uniform(np.bincount(5 * first + second, minlength=25))
    assert not is_uniform(np.bincount(np.append(places[:, 0], [0] * 300)))


def test_no_example_moves_another():
    fewer, more = (allocation(n, 5, 3) for n in (300, 301))
    np.testing.assert_array_equal(more[:300], fewer)


def test_unfair_words_are_replaced():
    """Reduced modulo 3 * 2^62, words below 2^62 would be twice as likely as others."""
    steps, quarter = 3 * 2**62, 2**62
    streams = [np.random.Philox(key=x).random_raw for x in (0, 1)]
    places = _allocation._draw_places(30_000, steps, *streams)
    assert is_uniform(np.bincount((places // np.uint64(quarter)).astype(int)))
    biased = np.random.Philox(key=0).random_raw(30_000) % np.uint64(steps)
    assert not is_uniform(np.bincount((biased // np.uint64(quarter)).astype(int)))


def test_a_run_that_goes_on_inside_an_epoch_takes_poisson_steps_to_its_end():
    sampling = RandomAllocation(5, 20, truncated_batch_size=90)
    batches = list(sampling.batch_iterator(300, KEY, start=7))
    poisson = PoissonSampling(1 / 5, 20, truncated_batch_size=90)
    for step in (7, 8, 9):
        expected = poisson.indices(step, num_examples=300, key=KEY)
        np.testing.assert_array_equal(batches[step - 7], expected)
    whole = list(sampling.batch_iterator(300, KEY))
    for step in range(10, 20):
        np.testing.assert_array_equal(batches[step - 7], whole[step])
    assert not np.array_equal(batches[0], whole[7])


def test_an_epoch_has_the_key_of_its_first_step():
    batches = RandomAllocation(3, 6).drawer(100, start=0)
    found = [batches(step, step) for step in range(6)]
    for start in (0, 3):
        alone = RandomAllocation(3, 6).drawer(100, start=start)
        for step in range(start, start + 3):
            np.testing.assert_array_equal(alone(step, start), found[step])


def test_large_batches_are_truncated_uniformly():
    sampling = RandomAllocation(2, 2, truncated_batch_size=10)
    counts = np.zeros(40, int)
    for key in range(400):
        for batch in sampling.batch_iterator(40, key):
            assert len(batch) == 10
            counts[batch] += 1
    assert np.all(np.abs(counts / 400 - 1 / 2) < 6 * 0.5 / 20)


def test_an_epoch_needs_less_memory_than_a_table_of_the_dataset(monkeypatch):
    monkeypatch.setattr(_allocation, "_KEPT", 2**14)
    monkeypatch.setattr(_allocation, "_AT_ONCE", 2**14)
    batches = RandomAllocation(1000, 1000).drawer(2_000_000)
    tracemalloc.start()
    for step in range(5):
        assert 1700 < len(batches(step, KEY)) < 2300
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_batches_are_drawn_in_order():
    draw = RandomAllocation(4, 12).drawer(40, start=2)
    for step in (0, 3, 6):
        with pytest.raises(ValueError, match="must be drawn in order"):
            draw(step, KEY)
    for step in (2, 3, 4):
        draw(step, KEY)
    with pytest.raises(ValueError, match="must be drawn in order"):
        draw(4, KEY)


@refusals(
    ("num_examples", (0, -1, 2.5, "a", True, 2**63), "num_examples must be"),
    ("start", (-3, 1.5, 4), "start must be from 0 to iterations = 3"),
    ("steps_per_epoch", (0, 2**63), "steps_per_epoch must be"),
    ("iterations", (1.5,), "iterations must be"),
    ("truncated_batch_size", (-1,), "truncated_batch_size must be"),
)
def test_numbers_out_of_range_are_refused(wrong, message):
    options = {"steps_per_epoch": 3, "iterations": 3, "num_examples": 10} | wrong
    drawer = {x: options.pop(x) for x in ("num_examples", "start") if x in options}
    with pytest.raises(ValueError, match=message):
        RandomAllocation(**options).drawer(**drawer)


def test_numpy_numbers_are_sizes_and_many_steps_take_no_memory():
    assert len(RandomAllocation(2**62, 2**62).drawer(np.uint8(200))(0, KEY)) == 0


def test_an_epoch_has_no_variables_that_a_report_could_show():
    epoch = _allocation._Epoch(KEY, 0, 3, 12)
    assert not hasattr(epoch, "__dict__")
    assert str(KEY) not in repr(epoch)
