"""The checks are checked: what is right passes, and each kind of wrong fails."""

import dataclasses
import functools
import io
import json
import math
import os
import subprocess
import sys
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from scipy import stats

from dpmp import __main__, _selfcheck
from dpmp._selfcheck_measures import (
    Sizes,
    measure_contributions,
    measure_keys,
    measure_noise,
    measure_sensitivity,
    squared_norm,
)
from dpmp._selfcheck_subjects import (
    BatchShape,
    Keys,
    Releases,
    Subjects,
    Sums,
    dpmp_subjects,
    unsafe_releases,
)

SIZES = Sizes(
    num_entries=2000,
    num_leaves=8,
    largest_batch=256,
    num_training=2**20,
    num_test=2**17,
)
# Fine grids take more releases until numbers repeat.
MORE_RELEASES = dataclasses.replace(SIZES, num_training=2**22, num_test=2**18)
DPMP = dpmp_subjects()


def by_name(subjects):
    return pytest.mark.parametrize("subject", subjects, ids=lambda x: x.name)


def passed(results):
    return [x.passed for x in results]


# Sums.


@by_name(DPMP.sums)
def test_the_sums_of_dpmp_pass(subject):
    assert all(passed(measure_contributions(subject, SIZES)))
    assert all(passed(measure_sensitivity(subject, SIZES)))


def sums(summed, *batches):
    """A subject from a function of a clip norm and float32 gradients, (B, n)."""

    def make(l2_clip_norm, microbatch_size):
        del microbatch_size

        def sum_fn(batch, is_padding):
            leaves = [x.reshape(len(x), -1).astype(np.float32) for x in batch]
            return summed(l2_clip_norm, np.concatenate(leaves, axis=1)[~is_padding])

        return sum_fn, Fraction(l2_clip_norm)

    return Sums("broken", True, make, batches or (BatchShape(np.float32, 64),))


def clip(l2_clip_norm, grads, norms):
    return grads * np.minimum(1, l2_clip_norm / np.maximum(norms, 1e-30))[:, None]


def norms_in_float64(grads):
    return np.sqrt(np.sum(np.square(grads, dtype=np.float64), axis=1))


def sum_in_float64(l2_clip_norm, grads):
    clipped = clip(l2_clip_norm, grads, 1.0001 * norms_in_float64(grads))
    return [np.sum(clipped, axis=0)[None]]


def test_a_sum_in_float64_passes():
    subject = sums(sum_in_float64, BatchShape(np.float32, 256))
    assert passed(measure_contributions(subject, SIZES)) == [True, True]
    assert passed(measure_sensitivity(subject, SIZES)) == [True]


def test_norms_in_half_precision_fail():
    def summed(l2_clip_norm, grads):
        narrow = grads.astype(jnp.bfloat16)
        squares = functools.reduce(np.add, np.square(narrow).T)
        norms = np.sqrt(squares.astype(np.float64))
        return [np.sum(clip(l2_clip_norm, grads, norms), axis=0)[None]]

    largest, _ = measure_contributions(sums(summed), SIZES)
    assert not largest.passed
    assert largest.value > 2


def test_a_sum_that_drops_gradients_fails():
    def summed(l2_clip_norm, grads):
        with np.errstate(over="ignore"):
            squares = np.sum(np.square(grads.astype(np.float16)), axis=1)
        return sum_in_float64(l2_clip_norm, grads[np.isfinite(squares)])

    largest, smallest = measure_contributions(sums(summed), SIZES)
    assert largest.passed
    assert not smallest.passed
    assert smallest.value == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_fails(bad):
    largest, _ = measure_contributions(sums(lambda *_: [np.full((1, 3), bad)]), SIZES)
    assert not largest.passed


def test_an_excess_that_float64_cannot_hold_fails():
    def summed(l2_clip_norm, grads):
        del grads
        return [np.array([[l2_clip_norm], [l2_clip_norm * 2.0**-100]])]

    largest, _ = measure_contributions(sums(summed), SIZES)
    assert largest.value == 1
    assert not largest.passed


def test_a_running_float32_sum_fails():
    def summed(l2_clip_norm, grads):
        clipped = clip(l2_clip_norm, grads, norms_in_float64(grads)).astype(np.float32)
        return [functools.reduce(np.add, clipped).astype(np.float64)[None]]

    subject = sums(summed, BatchShape(np.float32, 4096))
    sizes = dataclasses.replace(SIZES, largest_batch=4096)
    (change,) = measure_sensitivity(subject, sizes)
    assert not change.passed
    assert change.value == pytest.approx(1.25)
    assert "stagnating" in change.worst_case


def test_batches_above_the_largest_are_left_out():
    seen = set()

    def summed(l2_clip_norm, grads):
        seen.add(len(grads))
        return sum_in_float64(l2_clip_norm, grads)

    shapes = (BatchShape(np.float32, size) for size in (64, 512))
    measure_sensitivity(sums(summed, *shapes), SIZES)
    assert seen == {64, 63}


def test_norms_are_exact():
    tree = [np.array([[1.0, 3.0], [2.0**-60, 0.0]]), np.array([[2.0**-300]])]
    expected = (1 + Fraction(2) ** -60) ** 2 + 9 + Fraction(2) ** -600
    assert squared_norm(tree) == expected
    assert squared_norm([]) == squared_norm([np.zeros((1, 0))]) == 0


# Noise.


@by_name(DPMP.releases)
def test_the_noise_of_dpmp_passes(subject):
    assert all(passed(measure_noise(subject, MORE_RELEASES)))


def releases(noise, *, largest=1.0):
    """A subject from a function of a generator and a number of draws."""
    rng = np.random.default_rng(0)
    return Releases(
        "broken", True, lambda has_example, num: noise(rng, num) + has_example * largest
    )


def gaussian_on_a_grid(rng, num):
    return (np.round(rng.normal(size=num) * 2**15) / 2**15).astype(np.float32)


def test_rounded_gaussian_noise_passes():
    assert all(passed(measure_noise(releases(gaussian_on_a_grid), SIZES)))


def test_float_noise_fails():
    bits, advantage, *_ = measure_noise(unsafe_releases(), SIZES)
    assert not bits.passed
    assert bits.value > 0.8
    assert not advantage.passed


def test_a_sum_beside_the_grid_of_the_noise_fails():
    subject = releases(gaussian_on_a_grid, largest=np.float32(0.99221))
    bits, advantage, *shape = measure_noise(subject, SIZES)
    assert not bits.passed
    assert not advantage.passed
    assert all(passed(shape))


def test_noise_of_twelve_bits_fails():
    quantiles = stats.norm.ppf((np.arange(2**12) + 0.5) / 2**12).astype(np.float32)
    subject = releases(lambda rng, num: rng.choice(quantiles, num))
    *_, distinct, largest, _ = measure_noise(subject, SIZES)
    assert not distinct.passed
    assert not largest.passed


@pytest.mark.parametrize("factor", [0.97, 1.05])
def test_noise_of_another_scale_fails(factor):
    subject = releases(lambda rng, num: gaussian_on_a_grid(rng, num) * factor)
    assert not measure_noise(subject, SIZES)[-1].passed


def test_noise_that_never_repeats_is_not_taken_for_safe():
    subject = releases(lambda rng, num: rng.normal(size=num))
    bits = measure_noise(subject, SIZES)[0]
    assert math.isnan(bits.value)
    assert not bits.passed


# Keys.


@by_name(DPMP.keys)
def test_the_key_of_dpmp_passes(subject):
    results = measure_keys(subject)
    assert passed(results) == [True, True]
    assert [x.value for x in results] == [128, 128]


def noise_of_words(words):
    return np.random.default_rng(words).normal(size=4)


def words_from_the_system(num):
    return np.frombuffer(os.urandom(4 * num), np.uint32)


@pytest.mark.parametrize("num_words", [1, 3])
def test_short_keys_fail(num_words):
    subject = Keys(
        "broken", True, lambda: words_from_the_system(num_words), noise_of_words
    )
    results = measure_keys(subject)
    assert [x.value for x in results] == [32 * num_words] * 2
    assert passed(results) == [False, False]


def test_keys_from_numpys_generator_fail_once_it_is_seeded():
    def draw():
        return np.random.randint(0, 2**32, 4, np.uint32)

    results = measure_keys(Keys("broken", True, draw, noise_of_words))
    assert [x.value for x in results] == [128, 0]
    assert passed(results) == [True, False]


def test_noise_that_ignores_half_of_its_key_fails():
    subject = Keys(
        "broken",
        True,
        lambda: words_from_the_system(4),
        lambda words: noise_of_words(words[:2]),
    )
    assert [x.value for x in measure_keys(subject)] == [64, 64]


def test_the_state_of_numpys_generator_is_restored():
    np.random.seed(7)
    expected = np.random.random(3)
    np.random.seed(7)
    measure_keys(DPMP.keys[0])
    np.testing.assert_array_equal(np.random.random(3), expected)


# The command.

BROKEN = sums(lambda *_: [np.full((1, 1), math.inf)])
GOOD = sums(sum_in_float64)
NOT_OURS = dataclasses.replace(BROKEN, name="theirs", is_claimed=False)


@pytest.fixture
def selfcheck(monkeypatch, capsys):
    """Runs the command with other subjects; gives exit status and output."""

    def run(subjects, *args):
        monkeypatch.setattr(__main__, "Sizes", lambda: SIZES)
        monkeypatch.setattr(__main__, "all_subjects", lambda **_: subjects)
        status = __main__.main(["selfcheck", *args])
        return status, capsys.readouterr().out

    return run


def test_the_exit_status_is_0_if_all_claims_hold(selfcheck):
    status, output = selfcheck(Subjects(sums=(GOOD, NOT_OURS), remarks=("A remark.",)))
    assert status == 0
    assert "All 3 claims of dpmp hold here." in output
    assert "A remark." in output
    assert "FAIL" in output


def test_the_exit_status_is_1_if_a_claim_is_broken(selfcheck):
    status, output = selfcheck(Subjects(sums=(GOOD, BROKEN)))
    assert status == 1
    assert "2 of 6 claims of dpmp FAIL here: broken." in output


def test_results_are_written_as_json(selfcheck, tmp_path):
    path = tmp_path / "results.json"
    selfcheck(Subjects(sums=(GOOD, NOT_OURS)), "--json", str(path))
    content = json.loads(path.read_text())
    assert set(content) == {"device", "python", "versions", "results"}
    assert {"dpmp", "jax"} <= set(content["versions"])
    largest, smallest, infinite, *_ = content["results"]
    assert largest["passed"] is smallest["passed"] is True
    assert largest["value"] == pytest.approx(1, rel=1e-3)
    assert (infinite["subject"], infinite["value"]) == ("theirs", "inf")
    assert infinite["passed"] is infinite["is_claimed"] is False


def test_a_file_in_no_directory_is_refused_before_anything_is_measured(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["selfcheck", "--json", "/no/such/directory/file"])
    assert "there is no directory" in capsys.readouterr().err


def test_tables_fit_into_80_columns():
    file = io.StringIO()
    console = rich.console.Console(file=file, width=80)
    _selfcheck.run(Subjects(sums=(GOOD, BROKEN)), SIZES, console)
    assert max(map(len, file.getvalue().splitlines())) <= 80


@pytest.mark.parametrize("argv", [[], ["--help"], ["selfcheck", "--help"]])
def test_help_names_the_command(argv, capsys):
    if argv:
        with pytest.raises(SystemExit, match="0"):
            __main__.main(argv)
    else:
        assert __main__.main(argv) == 0
    assert "selfcheck" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "passed", "text"),
    [(0.123456789, True, "0.12346"), (1.00000001, False, "1.00000001")],
)
def test_as_many_digits_are_shown_as_it_takes(value, passed, text):
    result = dataclasses.replace(
        measure_keys(DPMP.keys[0])[0],
        value=value,
        at_least=None,
        at_most=1.0,
        passed=passed,
    )
    assert _selfcheck._measured(result) == text


@pytest.mark.slow
def test_the_whole_command(tmp_path):
    path = tmp_path / "results.json"
    command = ["selfcheck", "--include-unsafe", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "dpmp", *command], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())["results"]
    assert all(x["passed"] for x in results if x["is_claimed"])
    unsafe = [x for x in results if x["subject"] == "dpmp continuous (unsafe)"]
    assert [x["passed"] for x in unsafe[:2]] == [False, False]
