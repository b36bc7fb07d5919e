"""Sums that are right pass, and each kind of wrong fails."""

import dataclasses
import functools
import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from subjects import (
    DPMP,
    SIZES,
    by_name,
    clip,
    norms_in_float64,
    passed,
    sum_in_float64,
    sums,
)

from dpmp.tools.selfcheck._subjects import BatchShape
from dpmp.tools.selfcheck._sums import (
    measure_contributions,
    measure_sensitivity,
    squared_norm,
)


@pytest.mark.slow
@by_name(DPMP.sums)
def test_the_sums_of_dpmp_pass(subject):
    assert all(passed(measure_contributions(subject, SIZES)))
    assert all(passed(measure_sensitivity(subject, SIZES)))


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
