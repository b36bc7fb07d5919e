"""Benchmarks of parts: what they compute from what they measure."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import accountant, growth, largest_batch, parts, precision
from benchmarks.harness import Measured
from benchmarks.models import SUBJECTS


def test_parts_are_differences_and_add_up_to_the_step():
    seconds = {"plain": 1.0, "norms": 0.5, "sum": 1.2, "noise": 1.3, "step": 1.5}
    figures = parts.summarize(Measured({k: [x] * 3 for k, x in seconds.items()}))
    expected = {"norms": 500.0, "sum": 700.0, "noise": 100.0, "step": 200.0}
    assert figures["part_milliseconds"] == pytest.approx(expected)
    assert sum(figures["part_milliseconds"].values()) == pytest.approx(1500.0)
    assert figures["time_over_plain"]["step"] == 1.5


def test_exponents_are_those_of_powers():
    points = [
        {"size": n, "milliseconds": {"linear": 3.0 * n, "square": n**2, "none": 7.0}}
        for n in (2, 4, 8, 32)
    ]
    assert growth.exponents(points) == {"linear": 1.0, "square": 2.0, "none": 0.0}


def test_savings_are_those_over_the_same_step_in_float32():
    seconds = {"float32": [2.0, 20.0, 8.0], "float8": [1.0, 5.0, 4.0]}
    memory = {"float32": 40.0, "float8": 10.0}
    figures = precision.compare(Measured(seconds, memory))
    assert figures["speed_up"] == {"float32": 1.0, "float8": 2.0}
    assert figures["memory_saved"] == {"float32": 0.0, "float8": 0.75}


@pytest.mark.parametrize("per_example", [1e6, 3e6, 90e6])
def test_the_largest_batch_fits_and_one_in_fifty_more_does_not(per_example):
    def bytes_of(size):
        return int(1e7 + per_example * size)

    size = largest_batch.largest(bytes_of, 1e9)
    assert bytes_of(size) <= 1e9 < bytes_of(size + 1 + size // 50)


def test_no_batch_fits_beside_parameters_that_fill_the_memory():
    assert largest_batch.largest(lambda size: 2 * 10**9 + size, 1e9) == 0


@pytest.mark.slow
def test_the_program_of_norms_computes_no_sum():
    engine = parts.ENGINES["book_keeping, bounded"]
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        task = SUBJECTS["tiny"].make(jnp.float32, 16)  # in two microbatches
        functions, args = parts.programs(task, jnp.float32, engine)
        norms, total = (
            jax.jit(functions[name]).lower(*args).compile().as_text().count(" dot(")
            for name in ("norms", "sum")
        )
    assert 0 < norms < total


@pytest.mark.slow
def test_calibration_meets_the_target_by_both_ways(monkeypatch):
    monkeypatch.setattr(accountant, "_TOLERANCE", 0.01)
    setting = accountant.Setting(10, 1.0, 1e-5, 3.0)
    figures = accountant.measure(setting, 1)
    for epsilon in figures["epsilon_of_calibrated"].values():
        assert 0.98 * setting.epsilon < epsilon <= setting.epsilon
    values = figures["values"]
    assert values["epsilon, dpmp"] == pytest.approx(values["epsilon, directly"], 1e-3)
