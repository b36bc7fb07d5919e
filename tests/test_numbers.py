"""A number means the same, whichever library's scalar it comes in."""

import dataclasses
import math
from fractions import Fraction

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpmp
from dpmp import accounting, loss_scaling, noise_addition
from dpmp._validate import as_number, as_real
from dpmp.batch_selection import PoissonSampling
from dpmp.loss_scaling import DynamicScale
from dpmp.numerics import ExactSums

KEY = jax.random.key(3)


def dpsgd(**fields):
    defaults = {"num_examples": 120, "expected_batch_size": 16, "iterations": 4}
    fields = {"l2_clip_norm": 1.0, "noise_multiplier": 1.0, **fields}
    return dpmp.DPSGD(**{**defaults, **fields})


def guarantee(step=None, delta=1e-5):
    return dpsgd().guarantee(step, delta=delta)


def linear_loss(w, x):
    return jnp.sum(w * x)


def clipped(**options):
    """The largest contribution, and a sum, of a function that clips."""
    fun = dpmp.clipped_grad(linear_loss, **{"l2_clip_norm": 1.0, **options})
    return fun.l2_norm_bound, fun(jnp.ones(2), jnp.ones((4, 2)))


def noise(**options):
    privatizer = noise_addition.gaussian_privatizer(
        **{"stddev": 3.0, "prng_key": KEY, **options}
    )
    return privatizer.update(jnp.zeros(3), privatizer.init(None))[0]


def indices(**arguments):
    arguments = {"step": 1, "num_examples": 100, "key": 7, **arguments}
    return PoissonSampling(0.5, 3).indices(**arguments)


def sampled(noise_multiplier):
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    event = dp_accounting.PoissonSampledDpEvent(0.5, gaussian)
    return accounting.get_epsilon(event, delta=1e-5)


def calibrated(**target):
    target = {"epsilon": 4.0, "delta": 1e-5, **target}
    return dpsgd(num_examples=16).calibrate(**target)


SAMPLING = {"sampling_prob": 0.5, "iterations": 3}
EVENT = {"noise_multiplier": 1.0, **SAMPLING}
TRUNCATED = {**EVENT, "num_examples": 100, "truncated_batch_size": 60}
GAUSSIAN = dp_accounting.GaussianDpEvent(2.0)


def vary(fun, values, **defaults):
    """Functions of one argument each, by name, with a Python number to give it."""
    return {
        f"{fun.__name__}.{name}": (
            lambda x, name=name: fun(**{**defaults, name: x}),
            value,
        )
        for name, value in values.items()
    }


# Each takes a number, given as a Python number here, and returns what can be compared.
INTEGERS = {
    **vary(dpsgd, {"num_examples": 64, "iterations": 64, "truncated_batch_size": 64}),
    **vary(dpsgd, {"microbatch_size": 64, "num_parameters": 64}),
    **vary(guarantee, {"step": 2}),
    **vary(PoissonSampling, {"truncated_batch_size": 3}, **SAMPLING),
    **vary(indices, {"step": 2, "num_examples": 2, "key": 2}),
    **vary(accounting.dpsgd_event, {"iterations": 100}, **EVENT),
    **vary(
        accounting.truncated_dpsgd_event,
        {"iterations": 64, "num_examples": 64, "truncated_batch_size": 64},
        **TRUNCATED,
    ),
    **vary(clipped, {"microbatch_size": 2, "batch_argnums": 1}),
    "ExactSums": (lambda x: clipped(arithmetic=ExactSums(x)), 100),
    **vary(DynamicScale, {"growth_interval": 100}),
}
REALS = {
    **vary(dpsgd, {"expected_batch_size": 1.0, "noise_multiplier": 1.0}),
    **vary(dpsgd, {"l2_clip_norm": 1.0, "sampling_prob": 1.0, "delta": 2.0**-10}),
    "dpsgd.l2_clip_norm.tree": (lambda x: dpsgd(l2_clip_norm={"a": x, "b": 2.0}), 1.0),
    **vary(guarantee, {"delta": 2.0**-10}),
    **vary(calibrated, {"epsilon": 4.0, "delta": 2.0**-10}),
    **vary(PoissonSampling, {"sampling_prob": 0.5}, **SAMPLING),
    **vary(accounting.dpsgd_event, {"noise_multiplier": 0.5}, **EVENT),
    **vary(accounting.truncated_dpsgd_event, {"sampling_prob": 0.5}, **TRUNCATED),
    **vary(accounting.get_epsilon, {"delta": 2.0**-10}, event=GAUSSIAN),
    "get_epsilon.event": (sampled, 2.0),
    **vary(
        accounting.calibrate_noise_multiplier,
        {"epsilon": 2.0},
        make_event=dp_accounting.GaussianDpEvent,
        delta=1e-5,
    ),
    **vary(clipped, {"l2_clip_norm": 0.5, "normalize_by": 3.0}),
    "clip_pytree": (lambda x: dpmp.clip_pytree(jnp.array([3.0, 4.0]), x), 1.0),
    "ScaledLoss": (lambda x: loss_scaling.ScaledLoss(linear_loss, x), 64.0),
    **vary(noise, {"stddev": 3.0, "l2_sensitivity": 3.0}),
    **vary(DynamicScale, {"initial": 64.0, "tolerated": 2.0}),
    **vary(dpmp.ReleasedMetrics, {"norm_share": 0.5}, largest_loss=1.0),
}
CASES = {
    **{f"{name}-integer": case for name, case in INTEGERS.items()},
    **{f"{name}-real": case for name, case in REALS.items()},
}


def same(a, b):
    """Whether two results are equal, in their types too."""
    if isinstance(a, np.ndarray | jax.Array):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if dataclasses.is_dataclass(a):
        fields = [field.name for field in dataclasses.fields(a)]
        return all(same(getattr(a, name), getattr(b, name)) for name in fields)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b and repr(a) == repr(b)


@pytest.mark.parametrize("name", CASES)
def test_a_narrow_scalar_means_what_the_python_number_means(name):
    fun, value = CASES[name]
    is_integer = name.endswith("-integer")
    kinds = (np.int8, jnp.int8) if is_integer else (np.float16, jnp.bfloat16)
    expected = fun(value)
    assert all(same(fun(kind(value)), expected) for kind in kinds)


@pytest.mark.parametrize("name", CASES)
def test_truth_values_are_no_numbers(name):
    fun, _ = CASES[name]
    for truth in (True, np.bool(True), jnp.array(True)):
        with pytest.raises((ValueError, TypeError), match=r"must|positions"):
            fun(truth)


def test_integers_beyond_a_dtype_do_not_overflow():
    mechanism = dpsgd(
        iterations=np.int32(1000), num_parameters=np.int32(2**31 - 1), delta=1e-5
    )
    expected = dpsgd(iterations=1000, num_parameters=2**31 - 1, delta=1e-5)
    assert mechanism == expected
    assert mechanism.guarantee(np.int8(100)) == expected.guarantee(100)


@pytest.mark.parametrize(
    ("kind", "arithmetic"),
    [(np.float16, "float32"), (jnp.float16, "exact"), (jnp.bfloat16, "float32")],
)
def test_noise_is_as_wide_as_that_of_a_python_number(kind, arithmetic):
    # In float16 this standard deviation is zero.
    fields = {"l2_clip_norm": 1e-9, "arithmetic": arithmetic}
    expected = dpsgd(noise_multiplier=1.0, **fields)
    mechanism = dpsgd(noise_multiplier=kind(1.0), **fields)
    assert mechanism.stddev == expected.stddev == 1e-9 / 16
    privatizer = mechanism.privatizer(KEY)
    grad_fn = mechanism.clipped_grad(linear_loss)
    mask = np.zeros(4, bool)
    sums = grad_fn(jnp.zeros(2), np.zeros((4, 2)), is_padding_example=mask)
    assert privatizer.update(sums, privatizer.init(None))[0].any()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float16(0.5), 0.5),
        (np.array(3), 3),
        (jnp.array(3, jnp.uint8), 3),
        (Fraction(1, 2), 0.5),
        (10**400, 10**400),
        (math.inf, math.inf),
    ],
)
def test_numbers_become_python_numbers(value, expected):
    number = as_number(value)
    assert type(number) is type(expected)
    assert number == expected


def test_reals_are_floats_and_what_floats_do_not_reach_is_no_number():
    assert type(as_real(np.int8(3))) is float
    assert as_real(-np.float32(np.inf)) == -math.inf
    for value in (10**400, -(10**400), Fraction(10**400), np.longdouble("1e4000")):
        assert math.isnan(as_real(value))
    with pytest.raises(ValueError, match="every l2_clip_norm must be a number"):
        dpsgd(l2_clip_norm=10**400)


@pytest.mark.parametrize(
    "value",
    [None, "1", True, np.bool(True), np.array(True), 1j, np.ones(1), jnp.ones(2), KEY],
)
def test_what_is_no_number_is_left_alone(value):
    assert as_number(value) is value
    assert as_real(value) is value


def test_traced_numbers_are_left_alone():
    seen = []
    jax.jit(lambda x: seen.append(as_number(x) is x))(1.0)
    assert seen == [True]
