"""The self-check: what is right passes, each kind of wrong fails, and the command."""

import functools
import json
import math
import os
import subprocess
import sys
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from environment import environment
from scipy import stats

from dpmp import __main__, clipping, noise_addition, strategies
from dpmp.tools.selfcheck import command
from dpmp.tools.selfcheck._noise import measure_keys, measure_noise
from dpmp.tools.selfcheck._subjects import (
    BatchShape,
    Keys,
    Releases,
    Sizes,
    Subjects,
    Sums,
    dpmp_subjects,
    draw_fn,
    unsafe_releases,
)
from dpmp.tools.selfcheck._sums import measure_contributions, measure_sensitivity

SIZES = Sizes(2000, 8, 256, 2**20, 2**17)


def passed(results):
    return [x.passed for x in results]


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
    (change,) = measure_sensitivity(subject, SIZES._replace(largest_batch=4096))
    assert not change.passed
    assert change.value == pytest.approx(1.25)
    assert "stagnating" in change.worst_case


def measured(noise, *, largest=1.0):
    """The results for noise from a generator, and sums of 0 and `largest`."""
    rng = np.random.default_rng(0)

    def draw(has_example, num):
        return noise(rng, num) + has_example * largest

    return measure_noise(Releases("broken", True, draw), SIZES)


def gaussian_on_a_grid(rng, num):
    return (np.round(rng.normal(size=num) * 2**15) / 2**15).astype(np.float32)


def test_rounded_gaussian_noise_passes():
    assert all(passed(measured(gaussian_on_a_grid)))


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False])
def test_correlated_noise_passes_unless_earlier_noise_is_lost(is_kept):
    strategy = strategies.banded_toeplitz(3, iterations=20)
    privatizer = noise_addition.correlated_gaussian_privatizer(
        stddev=1 / strategy.sensitivity, strategy=strategy
    )

    def update(sums, state):
        noisy, following = privatizer.update(sums, state)
        return noisy, following._replace(past=(following if is_kept else state).past)

    broken = optax.GradientTransformation(privatizer.init, update)
    clip = clipping.clipped_fun(
        lambda x: x, l2_clip_norm=1.0, arithmetic="exact", keep_batch_dim=False
    )
    draw = draw_fn(clip, broken, coefficients=strategy.coefficients)
    results = measure_noise(Releases("correlated", True, draw), SIZES)
    assert all(passed(results)) == is_kept
    assert results[-1].passed == is_kept  # the standard deviation


def test_float_noise_fails():
    bits, advantage, *_ = measure_noise(unsafe_releases(), SIZES)
    assert not bits.passed
    assert bits.value > 0.8
    assert not advantage.passed


def test_a_sum_beside_the_grid_of_the_noise_fails():
    results = measured(gaussian_on_a_grid, largest=np.float32(0.99221))
    assert passed(results) == [False, False, True, True, True]


def test_noise_of_twelve_bits_fails():
    quantiles = stats.norm.ppf((np.arange(2**12) + 0.5) / 2**12).astype(np.float32)
    *_, distinct, largest, _ = measured(lambda rng, num: rng.choice(quantiles, num))
    assert not distinct.passed
    assert not largest.passed


@pytest.mark.parametrize("factor", [0.97, 1.05])
def test_noise_of_another_scale_fails(factor):
    results = measured(lambda rng, num: gaussian_on_a_grid(rng, num) * factor)
    assert not results[-1].passed


def test_noise_that_never_repeats_is_not_taken_for_safe():
    bits = measured(lambda rng, num: rng.normal(size=num))[0]
    assert math.isnan(bits.value)
    assert not bits.passed


def test_the_key_of_dpmp_passes_and_numpys_generator_is_restored():
    np.random.seed(7)
    expected = np.random.random(3)
    np.random.seed(7)
    results = measure_keys(dpmp_subjects().keys[0])
    assert passed(results) == [True, True]
    assert [x.value for x in results] == [128, 128]
    np.testing.assert_array_equal(np.random.random(3), expected)


def words_from_the_system(num):
    return np.frombuffer(os.urandom(4 * num), np.uint32)


@pytest.mark.parametrize(
    ("draw", "num_used", "num_bits"),
    [
        (lambda: words_from_the_system(1), 1, [32, 32]),
        (lambda: words_from_the_system(3), 3, [96, 96]),
        (lambda: words_from_the_system(4), 2, [64, 64]),
        (lambda: np.random.randint(0, 2**32, 4, np.uint32), 4, [128, 0]),
    ],
    ids=["one word", "three words", "half of it ignored", "seeded"],
)
def test_keys_that_can_be_guessed_fail(draw, num_used, num_bits):
    def noise(words):
        return np.random.default_rng(words[:num_used]).normal(size=4)

    results = measure_keys(Keys("broken", True, draw, noise))
    assert [x.value for x in results] == num_bits
    assert passed(results) == [bits == 128 for bits in num_bits]


BROKEN = sums(lambda *_: [np.full((1, 1), math.inf)])
GOOD = sums(sum_in_float64)
NOT_OURS = BROKEN._replace(name="theirs", is_claimed=False)


@pytest.fixture
def selfcheck(monkeypatch, capsys):
    """Runs the command with other subjects; gives exit status and output."""

    def run(subjects, *args):
        monkeypatch.setattr(command, "Sizes", lambda: SIZES)
        monkeypatch.setattr(command, "dpmp_subjects", lambda **_: subjects)
        status = __main__.main(["selfcheck", *args])
        return status, capsys.readouterr().out

    return run


def test_the_exit_status_is_0_if_all_claims_hold(selfcheck):
    status, output = selfcheck(Subjects(sums=(GOOD, NOT_OURS), remarks=("A remark.",)))
    assert status == 0
    assert "FAIL" not in output
    assert "theirs (no claim)" in output
    assert output.endswith("A remark.\nAll 3 claims of dpmp hold here.\n")


def test_the_exit_status_is_1_if_a_claim_is_broken(selfcheck):
    status, output = selfcheck(Subjects(sums=(GOOD, BROKEN)))
    assert status == 1
    assert "2 of 6 claims of dpmp FAIL here: broken." in output


def test_results_are_written_as_json(selfcheck, tmp_path):
    path = tmp_path / "results.json"
    selfcheck(Subjects(sums=(GOOD, NOT_OURS)), "--json", str(path))
    content = json.loads(path.read_text())
    assert set(content) == {"device", "python", "versions", "results"}
    largest, smallest, infinite, *_ = content["results"]
    assert largest["passed"] is smallest["passed"] is True
    assert largest["value"] == pytest.approx(1, rel=1e-3)
    assert (infinite["subject"], infinite["value"]) == ("theirs", "inf")
    assert infinite["passed"] is infinite["is_claimed"] is False


def test_a_file_in_no_directory_is_refused_before_anything_is_measured(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["selfcheck", "--json", "/no/such/directory/file"])
    assert "there is no directory" in capsys.readouterr().err


@pytest.mark.slow
def test_the_claims_of_dpmp_hold(tmp_path):
    path = tmp_path / "results.json"
    command = ["selfcheck", "--include-unsafe", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "dpmp", *command],
        capture_output=True,
        text=True,
        env=environment(xla_flags=""),  # the programs of users
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())["results"]
    claims = [x["passed"] for x in results if x["is_claimed"]]
    assert len(claims) >= 34
    assert all(claims)
    unsafe = [x for x in results if x["subject"] == "dpmp continuous (unsafe)"]
    assert [x["passed"] for x in unsafe[:2]] == [False, False]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")
def test_jax_privacy_is_measured_and_fails():
    pytest.importorskip("jax_privacy")
    from benchmarks import selfcheck_others

    with jax.numpy_dtype_promotion("standard"):
        subjects = selfcheck_others.all_subjects()
        (default,) = (x for x in subjects.sums if x.name == "jax_privacy default")
        largest, _ = measure_contributions(default, SIZES)
        (keys,) = (x for x in subjects.keys if x.name == "jax_privacy")
        assert measure_keys(keys)[0].value < 32
    assert not largest.is_claimed
    assert largest.value > 2
