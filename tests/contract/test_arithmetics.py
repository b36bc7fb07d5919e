"""Every arithmetic of `dpmp.numerics` keeps the promises of `Arithmetic`."""

import functools
import itertools
import math
import warnings
from fractions import Fraction

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from refusals import refusals

from dpmp import (
    AdaptiveClipNorm,
    AutomaticClipping,
    GridArray,
    clipped_grad,
)
from dpmp.numerics import UNIT_ROUNDOFF
from dpmp.numerics._arithmetic import ARITHMETICS, parse_arithmetic
from dpmp.numerics._grid import DEFAULT_RESOLUTION, LARGEST_RESOLUTION

_RELATIONS = dp_accounting.NeighboringRelation

NAMES = list(ARITHMETICS)
PROVED = [name for name in NAMES if ARITHMETICS[name].is_proved]
GRIDS = [name for name in NAMES if ARITHMETICS[name].resolution is not None]
FLOATS = [name for name in NAMES if name not in GRIDS]


@pytest.fixture(autouse=True)
def _wide_mode(request):
    """64-bit mode for the arithmetic that needs it."""
    callspec = getattr(request.node, "callspec", None)
    name = callspec.params.get("name", "") if callspec else ""
    with jax.enable_x64(name.endswith("float64")):
        yield


def _parse(name, resolution=None, **options):
    sums = ARITHMETICS[name]
    if resolution is not None:
        return parse_arithmetic(sums.with_resolution(resolution), method=sums.method)
    return parse_arithmetic(name, method=sums.method, **options)


def _loss(w, x):
    """Its gradient is the example, whatever the engine."""
    return jnp.sum(x[None] @ w[:, None])


@functools.cache
def _clipped(name, l2_clip_norm=1.0, resolution=None, **options):
    sums = ARITHMETICS[name]
    return clipped_grad(
        _loss,
        l2_clip_norm=l2_clip_norm,
        keep_batch_dim=False,
        method=sums.method,
        arithmetic=name if resolution is None else sums.with_resolution(resolution),
        **options,
    )


@functools.cache
def _compiled(name, **options):
    fn = _clipped(name, **options)

    def total(x, is_padding):
        return fn(jnp.zeros(x.shape[1:], x.dtype), x, is_padding_example=is_padding)

    return jax.jit(total)


def _sum(name, examples, is_padding=None, **options):
    if is_padding is None:
        is_padding = np.zeros(len(examples), bool)
    if examples.dtype == np.float64:
        examples = examples if jax.config.jax_enable_x64 else np.float32(examples)
    return _compiled(name, **options)(examples, is_padding)


def _assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def _random(size, width=40):
    rng = np.random.default_rng(size)
    scales = np.logspace(-2, 1, size)[:, None]
    return (scales * rng.normal(size=(size, width))).astype(np.float32)


# Neighbouring batches.


def _equal_examples(size):
    return np.full((size, 4), 0.5)


def _alternating_examples(size):
    return _equal_examples(size) * np.resize([1.0, -1.0], size)[:, None]


def _stagnating_examples(size):
    """Half the batch sums to a power of two; the rest are 0.7 units in its last place.

    A running float32 sum rounds each of them up to a whole unit. Without the first
    example it stays below that power, where units are half as large, and gains half as
    much.
    """
    values = np.ones(size)
    values[size // 2 :] = 0.7 * 2 * UNIT_ROUNDOFF * (size // 2)
    return np.repeat(values[:, None], 4, axis=1) / 2


def _random_examples(size):
    return np.random.default_rng(size).normal(0, 1, (size, 4))


def _examples_of_many_sizes(size):
    return _random_examples(size) * np.logspace(-6, 6, size)[:, None]


_BATCHES = (
    _equal_examples,
    _alternating_examples,
    _stagnating_examples,
    _random_examples,
    _examples_of_many_sizes,
)


def _neighbours(examples, i):
    """For each relation: two batches of one shape, as (examples, is_padding)."""
    size = len(examples)
    nobody, only_i, only_last = (np.arange(size) == j for j in (-1, i, size - 1))
    others = np.delete(examples, i, axis=0)
    moved = np.concatenate([others, np.full_like(examples[:1], np.nan)])
    replaced = np.where(only_i[:, None], -examples, examples)
    yield _RELATIONS.REPLACE_SPECIAL, (examples, nobody), (examples, only_i)
    yield _RELATIONS.ADD_OR_REMOVE_ONE, (examples, nobody), (moved, only_last)
    yield _RELATIONS.REPLACE_ONE, (examples, nobody), (replaced, nobody)


def _assert_neighbours_are_within_sensitivity(name, size, dtype, **options):
    fn = _clipped(name, **options)
    for make_batch, i in itertools.product(_BATCHES, {0, size // 2, size - 1}):
        for relation, *batches in _neighbours(make_batch(size).astype(dtype), i):
            if fn.assumes_fixed_slots and relation is _RELATIONS.ADD_OR_REMOVE_ONE:
                continue
            a, b = (_sum(name, *batch, **options) for batch in batches)
            bound = Fraction(fn.sensitivity(relation))
            assert reference.exact_squared_distance(a, b) <= bound**2


@pytest.mark.parametrize("name", PROVED)
@pytest.mark.parametrize(
    ("size", "microbatch_size", "dtype"),
    [(2, None, np.float32), (96, 16, jnp.bfloat16), (128, 1, np.float32)],
)
def test_neighbouring_sums_differ_by_at_most_the_sensitivity(
    size, microbatch_size, dtype, name
):
    _assert_neighbours_are_within_sensitivity(
        name, size, dtype, microbatch_size=microbatch_size
    )


_CLIPPINGS = {
    "automatic": {"l2_clip_norm": AutomaticClipping()},
    "automatic-tiny": {"l2_clip_norm": AutomaticClipping(stability=1e-15)},
    "adaptive": {
        "l2_clip_norm": AdaptiveClipNorm(initial=0.7, norm_share=0.5),
        "rescale_to_unit_norm": True,
    },
}


@pytest.mark.parametrize(
    ("name", "clipping"),
    [
        *zip(PROVED, itertools.cycle(_CLIPPINGS)),
        *zip(PROVED[::-1], _CLIPPINGS, strict=False),
    ],
)
def test_every_clipping_keeps_neighbouring_sums_within_the_sensitivity(name, clipping):
    options = _CLIPPINGS[clipping] | {"microbatch_size": 8}
    assert _clipped(name, **options).l2_norm_bound <= 1.12
    _assert_neighbours_are_within_sensitivity(name, 24, np.float32, **options)


@pytest.mark.parametrize("name", [x for x in PROVED if x != "bounded"])
def test_a_batch_one_example_shorter_is_within_the_sensitivity(name):
    examples = np.full((257, 1), 2, np.float32)
    examples[-1] = -2
    a, b = (_sum(name, x) for x in (examples, examples[:-1]))
    bound = _clipped(name).sensitivity(_RELATIONS.ADD_OR_REMOVE_ONE)
    assert reference.exact_squared_distance(a, b) <= Fraction(bound) ** 2


# The sum.


@pytest.mark.parametrize("name", NAMES)
def test_a_long_gradient_is_clipped_to_the_target_and_not_far_below(name):
    sums = _parse(name).for_clip_norms([1.0], 1.0)
    ((target, _),) = sums.targets([(1.0, 1.0)], [40])
    target /= sums.resolution or 1
    norm = reference.norm(_sum(name, 100 * _random(1)))
    assert target * (1 - 1e-4) <= norm <= 1
    assert 0.97 < target <= 1


@pytest.mark.parametrize("name", GRIDS)
def test_sums_on_a_grid_do_not_depend_on_the_order_of_microbatches(name):
    examples = _random(16)
    order = np.random.default_rng(1).permutation(16)
    actual, expected = (
        _sum(name, x, microbatch_size=1) for x in (examples[order], examples)
    )
    _assert_same(actual, expected)


def test_no_microbatch_size_and_no_padding_changes_a_bit_of_an_exact_sum():
    examples, is_padding = _random(16), np.arange(32) % 2 == 1
    padded = np.repeat(examples, 2, axis=0)
    expected = _sum("exact", examples)
    _assert_same(_sum("exact", examples, microbatch_size=8), expected)
    for size in (1, None):
        _assert_same(_sum("exact", padded, is_padding, microbatch_size=size), expected)


@pytest.mark.parametrize(
    ("name", "microbatch_size"), [*((name, 2) for name in NAMES), ("exact", None)]
)
def test_padding_and_what_is_not_finite_contribute_nothing(name, microbatch_size):
    examples = _random(6)
    is_padding = np.array([False, True, False, False, True, True])
    total = functools.partial(
        _sum, name, is_padding=is_padding, microbatch_size=microbatch_size
    )
    expected = total(np.where(is_padding[:, None], np.float32(0), examples))
    kept = reference.clipped_sum(examples, 1.0, keep=~is_padding)
    difference = reference.exact_values(expected).astype(float) - kept
    assert np.linalg.norm(difference) <= 3 * 0.02
    for value in (3.0, 1e38, np.inf, np.nan):
        padded = np.where(is_padding[:, None], np.float32(value), examples)
        _assert_same(total(padded), expected)
    without = total(examples, is_padding=np.arange(6) == 3)
    # The square of 1e30 overflows in float32 alone.
    for bad in (np.nan, np.inf, -np.inf, *([] if name.endswith("64") else [1e30])):
        examples[3, 1] = bad
        _assert_same(total(examples, is_padding=np.zeros(6, bool)), without)


@pytest.mark.parametrize("name", NAMES)
def test_batches_of_padding_and_empty_batches_give_zero_of_the_right_type(name):
    for microbatch_size in (None, 2):
        total = functools.partial(_sum, name, microbatch_size=microbatch_size)
        of_padding = total(np.full((6, 40), np.nan, np.float32), np.ones(6, bool))
        of_nobody = total(np.zeros((0, 40), np.float32))
        _assert_same(of_nobody, of_padding)
        words = jax.tree.leaves(of_nobody)
        assert not any(map(np.any, words))
        assert isinstance(of_nobody, GridArray if name in GRIDS else jax.Array)
        assert sum(x.dtype.itemsize for x in words) == ARITHMETICS[name].bytes_per_entry
        assert {x.shape for x in words} == {(40,)}


@pytest.mark.parametrize("name", NAMES)
def test_equal_arithmetics_are_one_key_of_a_cache(name):
    # Jitted functions take arithmetics as static arguments.
    first, second = (_parse(name).for_clip_norms([2.0, 1.0], 3.0) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    if name in GRIDS:
        assert first != _parse(name).for_clip_norms([2.0, 1.0], 4.0)


# Checks.


@pytest.mark.parametrize("name", [x for x in NAMES if x.endswith("float64")])
def test_float64_needs_64_bit_mode(name):
    fn = _clipped.__wrapped__(name)
    args = np.zeros(3, np.float32), np.ones((2, 3), np.float32)
    for use in (lambda: _parse(name), lambda: jax.eval_shape(fn.__call__, *args)):
        message = pytest.raises(ValueError, match="float64 sums need 64-bit mode")
        with jax.enable_x64(False), message:
            use()


@pytest.mark.parametrize("name", FLOATS)
def test_float_sums_refuse_batches_whose_rounding_is_not_covered(name):
    sums = _parse(name)
    sums.check_batch(1, 1)
    sums.check_batch(64, 64)
    with pytest.raises(ValueError, match="rounding may cost a sum"):
        sums.check_batch(2**24, 1)


@pytest.mark.parametrize("name", GRIDS)
def test_sums_on_a_grid_warn_of_batches_that_may_wrap_around(name):
    sums = _parse(name, resolution=LARGEST_RESOLUTION).for_clip_norms([1.0], 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums.check_batch(511, 511)
    with pytest.warns(UserWarning, match="can exceed 32 bits.*at most 511"):
        sums.check_batch(512, 512)


@pytest.mark.parametrize("name", NAMES)
def test_each_arithmetic_is_for_one_engine(name):
    mine = ARITHMETICS[name].method
    (other,) = {"per_example", "book_keeping"} - {mine}
    assert parse_arithmetic(name, method=mine) == ARITHMETICS[name]
    match = rf'"{name}" sums must be used with method="{mine}".*"bounded" sums there'
    with pytest.raises(ValueError, match=match):
        clipped_grad(_loss, l2_clip_norm=1.0, method=other, arithmetic=name)


@pytest.mark.parametrize(
    ("dtype", "method", "name"),
    [
        (None, "per_example", "float32"),
        (np.float32, "per_example", "float32"),
        (np.float64, "per_example", "float64"),
        (None, "book_keeping", "bounded"),
    ],
)
def test_a_dtype_names_an_arithmetic(dtype, method, name):
    assert parse_arithmetic(None, dtype=dtype, method=method) == ARITHMETICS[name]


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_that_are_not_those_of_the_sum_are_refused(name):
    for dtype in (np.float32, np.float64):
        if name in FLOATS and dtype == ARITHMETICS[name].dtype:
            assert _parse(name, dtype=dtype) == ARITHMETICS[name]
            continue
        with pytest.raises(ValueError, match="dtype must be that of float sums"):
            _parse(name, dtype=dtype)


# Grids.


@pytest.mark.parametrize("name", FLOATS)
def test_float_sums_have_no_grid_and_need_no_clipping(name):
    sums = _parse(name)
    assert sums.resolution is None
    assert sums.wanted_resolution(10**9) is None
    assert sums.rounding_share(10**9, 1) == 0
    assert _clipped(name, math.inf).sensitivity() == math.inf
    assert sums.with_resolution(100) is sums


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("resolution", [None, np.int32(5000)])
def test_the_resolution_is_the_size_of_the_largest_contribution(name, resolution):
    default = LARGEST_RESOLUTION if name == "bounded" else DEFAULT_RESOLUTION
    total = _sum(name, 100 * _random(1), l2_clip_norm=3.0, resolution=resolution)
    units = resolution or default
    assert 3 * (1 - 2.0**-22) <= total.unit * float(units) <= 3
    norm = math.sqrt(sum(int(x) ** 2 for x in np.asarray(total.counts)))
    assert 0.97 * units <= norm <= units


@pytest.mark.parametrize("name", GRIDS)
@refusals(
    (
        "resolution",
        (0, -1, 2.5, 2**24 + 1, True),
        "resolution must be an integer from 1",
    ),
    ("resolution", (40,), "fine enough to round 5000 entries"),
    ("l2_clip_norm", (math.inf,), "finite clip norm, and nan_safe=True"),
    ("nan_safe", (False,), "finite clip norm, and nan_safe=True"),
)
def test_contributions_without_a_grid_or_a_fine_one_are_refused(name, wrong, message):
    args = np.zeros(5000, np.float32), np.ones((1, 5000), np.float32)
    with pytest.raises(ValueError, match=message):
        _clipped(name, **wrong)(*args)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("size", [100, 10**6, 10**9])
def test_the_wanted_resolution_leaves_most_of_the_clip_norm(name, size):
    sums = _parse(name)
    resolution = math.ceil(max(sums.wanted_resolution(size), DEFAULT_RESOLUTION))
    assert sums.rounding_share(size, resolution) <= 0.01
    # It is the share that clipping leaves, to first order.
    left = sums.max_norm_before_rounding(resolution, size) / resolution
    assert 1 - left == pytest.approx(sums.rounding_share(size, resolution), rel=0.01)


# Statements.


@pytest.mark.parametrize("name", NAMES)
def test_the_statement_says_what_is_not_proved(name):
    sums = ARITHMETICS[name]
    for microbatch_size in (None, 8):
        text = sums.describe(sums.resolution, microbatch_size)
        assert ("NOT PROVED" in text) == (not sums.is_proved)
        assert (f"{sums.resolution} units" in text) == (name in GRIDS)
        assert text.endswith(".")
    assert sums.is_proved == (not name.startswith("unproved"))
    assert sums.needs_norm_bounds == (name == "bounded")
    assert sums.assumption.endswith(".")
