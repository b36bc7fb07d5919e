"""The proof of bounded sums, tried on factors that are made to break it."""

import functools

import jax
import jax.numpy as jnp
import matrix_units
import numpy as np
import pytest
import reference

from dpmp import clipped_grad
from dpmp.engines.book_keeping import _engine, _linalg, _uses
from dpmp.numerics import _bounded
from dpmp.numerics._bounded import (
    ROUNDING_RESERVE,
    BoundedSums,
    Roundings,
    group_size,
    largest_condition_number,
    norm_bound_for_clipping,
)
from dpmp.numerics._grid import LARGEST_RESOLUTION

POSITIONS, LEFT, RIGHT = 32, 12, 20
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def loss(w, batch):
    """Its gradient is the sum over positions of x (x) g, both as they are given."""
    products = (batch["x"] @ w).astype(jnp.float32) * batch["g"].astype(jnp.float32)
    return jnp.sum(products)


def make_cases(size, dtype, seed=0):
    """Batches of factors, (B, T, n) and (B, T, m)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, POSITIONS, LEFT))
    g = rng.normal(size=(size, POSITIONS, RIGHT))
    signs = np.resize([1.0, -1.0], POSITIONS)[:, None]
    nearly = 1 + rng.uniform(-1, 1, size=g.shape) * float(jnp.finfo(dtype).eps) * 2
    scales = np.exp2(rng.integers(-6, 6, size=(size, POSITIONS, 1)))
    # A coefficient for which nearly all products are rounded up.
    upward = 1 + float(jnp.finfo(dtype).eps) * rng.integers(0, 3, size=g.shape)
    cases = {
        "random": (x, g),
        "equal positions": (x[:, :1] + 0 * x, g[:, :1] + 0 * g),
        "cancelling": (x[:, :1] + 0 * x, signs * (g[:, :1] + 0 * g)),
        "nearly cancelling": (x[:, :1] + 0 * x, signs * (g[:, :1] * nearly)),
        "many sizes": (x * scales, g / scales**0.5),
        "one entry": (x * (np.arange(LEFT) == 3), g * (np.arange(RIGHT) == 5)),
        "rounded upward": (np.abs(x[:, :1]) + 0 * x, upward),
        "a spike": (x, g * np.where(np.arange(POSITIONS) == 7, 60.0, 1.0)[:, None]),
        "small": (x * 1e-3, g * 1e-3),
    }
    return {
        name: {"x": np.float32(a).astype(dtype), "g": np.float32(b).astype(dtype)}
        for name, (a, b) in cases.items()
    }


@functools.cache
def make_sum_fn(microbatch_size=None, resolution=LARGEST_RESOLUTION):
    fn = clipped_grad(
        loss,
        l2_clip_norm=1.0,
        method="book_keeping",
        arithmetic=BoundedSums(resolution),
        microbatch_size=microbatch_size,
    )
    return jax.jit(lambda w, batch, empty: fn(w, batch, is_padding_example=empty))


def zeros(dtype):
    return np.zeros((LEFT, RIGHT), dtype)


def largest_change(dtype, microbatch_size, batch, resolution=LARGEST_RESOLUTION):
    """The largest change of the sum by one example, over the clip norm, squared."""
    size = batch["x"].shape[0]
    sum_fn = make_sum_fn(microbatch_size, resolution)

    def total(*empty):
        return sum_fn(zeros(dtype), batch, np.isin(np.arange(size), empty))

    whole, others = total(), set(range(size))
    changes = [reference.exact_squared_distance(whole, total(i)) for i in others]
    alone = [total(*others - {i}) for i in (0, size - 1)]
    return max([*changes, *map(reference.exact_squared_norm, alone)])


@pytest.mark.parametrize(
    ("dtype", "microbatch_size", "resolution"),
    [
        *zip(DTYPES, (1, 2, 4), [LARGEST_RESOLUTION] * 3, strict=True),
        (jnp.float32, 2, BoundedSums.largest_resolution),
    ],
)
def test_one_example_changes_the_sum_by_at_most_the_clip_norm(
    dtype, microbatch_size, resolution
):
    for case, batch in make_cases(4, dtype).items():
        assert largest_change(dtype, microbatch_size, batch, resolution) <= 1, case


@pytest.mark.parametrize("dtype", DTYPES)
def test_little_is_lost_where_positions_do_not_cancel(dtype):
    """The margins are margins, and not the reason why nothing exceeds."""
    for case, batch in make_cases(1, dtype).items():
        norm = np.sqrt(float(largest_change(dtype, 1, batch)))
        if "cancelling" not in case:
            assert norm > 0.9 * min(1, exact_norms(batch)[0]), case


def exact_norms(batch):
    x, g = (np.asarray(batch[k]).astype(np.float64) for k in "xg")
    # Products have at most 48 bits, and sums of 32 of them 53.
    return np.sqrt(np.square(np.einsum("btn,btm->bnm", x, g)).sum((1, 2)))


@functools.cache
def norm_fn():
    fn = clipped_grad(
        loss,
        l2_clip_norm=1e9,
        method="book_keeping",
        arithmetic="bounded",
        return_grad_norms=True,
    )
    return jax.jit(lambda *args: fn(*args)[1].grad_norms)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_off_by_no_more_than_is_proved(dtype):
    for case, batch in make_cases(3, dtype).items():
        x, g = (np.asarray(batch[k]).astype(np.float64) for k in "xg")
        norms = np.asarray(norm_fn()(zeros(dtype), batch), np.float64)
        magnitudes = np.sum(
            np.linalg.norm(x, axis=2) * np.linalg.norm(g, axis=2), axis=1
        )
        error = np.abs(norms**2 - exact_norms(batch) ** 2)
        # gamma(inner), with the roundings of the Gram form.
        assert np.all(error <= 2.0**-24 * 100 * magnitudes**2), case


def test_sums_are_the_same_for_any_number_of_other_microbatches():
    batch = make_cases(8, jnp.bfloat16)["random"]
    sum_fn = make_sum_fn(2)
    empty = np.zeros(8, bool)
    halves = [
        sum_fn(zeros(jnp.bfloat16), jax.tree.map(lambda x, s=s: x[s], batch), empty[s])
        for s in (slice(4), slice(4, 8))
    ]
    whole = sum_fn(zeros(jnp.bfloat16), batch, empty)
    np.testing.assert_array_equal(whole.counts, halves[0].counts + halves[1].counts)


def test_examples_of_large_condition_numbers_are_scaled_down():
    roundings = Roundings(positions=64)
    kappa = largest_condition_number(16, roundings)
    norms, magnitudes = jnp.ones(16), jnp.full(16, (4 * kappa) ** 2)
    bound = norm_bound_for_clipping(
        norms, magnitudes, roundings, group_size=16, num_terms=1, folding_error=0.0
    )
    np.testing.assert_allclose(bound, 4, rtol=1e-5)


def test_a_computed_norm_of_zero_is_bounded_by_what_may_have_cancelled():
    roundings = Roundings(inner=50, product=3, positions=1)
    args = np.zeros(2, np.float32), np.ones(2, np.float32), roundings
    bound = norm_bound_for_clipping(*args, group_size=2, num_terms=1, folding_error=0.0)
    assert np.all(np.float64(bound) >= (50 * 2.0**-24) ** 0.5 + 3 * 2.0**-24)


def test_the_slack_is_what_roundings_of_all_positions_can_add():
    for size, positions in [(1, 1024), (2, 512), (8, 128)]:
        kappa = largest_condition_number(size, Roundings(positions=positions))
        gamma = size * positions * 2.0**-24
        assert gamma * (2 * size - 1) * kappa <= ROUNDING_RESERVE
        assert gamma * (2 * size - 1) * kappa > 0.95 * ROUNDING_RESERVE


def test_the_target_norms_leave_the_reserve_and_the_rounding_to_the_grid():
    sizes, clip_norms = (9, 16), (0.6, 0.8)
    sums = BoundedSums().for_clip_norms(clip_norms, 1.0)
    targets = sums.targets([(x, 1.0) for x in clip_norms], sizes)
    for (target, _), most, size in zip(targets, sums.max_norms, sizes, strict=True):
        assert target * (1 + 2.0**-6) + size**0.5 <= most
        assert target > 0.98 * most


def test_examples_of_too_many_positions_are_refused():
    with pytest.raises(ValueError, match=r"fewer positions.*positions=1048576"):
        norm_bound_for_clipping(
            jnp.ones(1),
            jnp.ones(1),
            Roundings(positions=2**20),
            group_size=1,
            num_terms=1,
            folding_error=0.0,
        )


@pytest.fixture(params=[2, POSITIONS], ids=["inner products", "stored"])
def in_groups_of_four(request, monkeypatch):
    """Sets the size of groups, and gives the batches a number of positions."""
    asked = []

    def four(size, positions):
        asked.append((size, positions))
        return 4

    monkeypatch.setattr(_engine, "group_size", four)
    make_sum_fn.cache_clear()
    yield lambda *args: {
        name: {k: x[:, : request.param] for k, x in batch.items()}
        for name, batch in make_cases(*args).items()
    }
    # A gradient that is stored is one position.
    assert set(asked) == {(8, 2 if request.param == 2 else 1)}
    make_sum_fn.cache_clear()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_one_example_changes_a_sum_of_groups_by_at_most_the_clip_norm(
    dtype, in_groups_of_four
):
    for case, batch in in_groups_of_four(8, dtype).items():
        assert largest_change(dtype, 8, batch) <= 1, case


@pytest.fixture
def on_matrix_units(in_groups_of_four, monkeypatch):
    """Makes matrix units take the products, and gives them small batches."""

    def use(dtype, **unit):
        multiply = functools.partial(matrix_units.contract, **unit)
        monkeypatch.setattr(_linalg, "contract", multiply)
        monkeypatch.setattr(_bounded, "_unit_roundoff", lambda: 2.0**-23)
        make_sum_fn.cache_clear()
        return in_groups_of_four(8, dtype)

    return use


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "at_once"), [(jnp.bfloat16, 4), (jnp.bfloat16, 16), (jnp.float16, 4)]
)
def test_one_example_changes_sums_of_matrix_units_by_at_most_the_clip_norm(
    dtype, at_once, on_matrix_units
):
    for case, batch in on_matrix_units(dtype, at_once=at_once).items():
        assert largest_change(dtype, 8, batch) <= 1, case


@pytest.mark.slow
@pytest.mark.parametrize("in_groups_of_four", [2], indirect=True)
def test_sums_of_units_with_few_bits_would_change_by_more(on_matrix_units):
    # In which case the change is largest depends on the processor.
    cases = on_matrix_units(jnp.bfloat16, fraction_bits=7).values()
    assert max(largest_change(jnp.bfloat16, 8, batch) for batch in cases) > 1.005


def test_sums_of_magnitudes_are_limited_for_the_size_of_groups():
    some = make_cases(128, jnp.float32)["equal positions"]
    batch = {name: x[:, :2] for name, x in some.items()}
    batch["g"] = batch["g"] * np.array([1, 2.0**-6 - 1], np.float32)[:, None]
    size = group_size(128, 2)
    assert size == 64
    kappa = largest_condition_number(size, Roundings(positions=2))
    x, g = (batch[k].astype(np.float64) for k in "xg")
    magnitudes = np.sum(np.linalg.norm(x, axis=2) * np.linalg.norm(g, axis=2), axis=1)
    for i in (0, 70, 127):
        counts = make_sum_fn(128)(zeros(jnp.float32), batch, np.arange(128) != i).counts
        norm = np.linalg.norm(np.asarray(counts, np.float64)) / LARGEST_RESOLUTION
        limited = norm / exact_norms(batch)[i] * magnitudes[i]
        assert 0.9 * kappa < limited < kappa


@pytest.mark.parametrize("entries_at_once", [1, 2**29])
def test_an_example_changes_the_sum_of_its_own_group_alone(
    entries_at_once, in_groups_of_four, monkeypatch
):
    monkeypatch.setattr(_uses, "_ENTRIES_OF_GROUPS", entries_at_once)
    batch = in_groups_of_four(16, jnp.float32)["random"]
    own = np.arange(LEFT) % 4 == np.arange(16)[:, None] // 4  # rows of each group
    batch["x"] = batch["x"] * own[:, None].astype(np.float32)
    sum_fn = make_sum_fn(8)

    def counts(batch, *empty):
        is_empty = np.isin(np.arange(16), empty)
        return np.asarray(sum_fn(zeros(jnp.float32), batch, is_empty).counts)

    whole = counts(batch)
    assert np.all(np.any(whole, axis=1))
    for i in (0, 3, 4, 15):
        factors = np.ones((16, batch["x"].shape[1], 1), np.float32)
        factors[i, 0] = 7
        other = {k: x * factors for k, x in batch.items()}
        for changed in (counts(batch, i), counts(other)):
            np.testing.assert_array_equal(changed[~own[i]], whole[~own[i]])
            assert np.any(changed[own[i]] != whole[own[i]])


def test_accelerators_may_truncate_and_are_charged_for_it(monkeypatch):
    def condition_number(backend):
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        return largest_condition_number(4, Roundings(positions=64))

    assert condition_number("gpu") == pytest.approx(condition_number("cpu") / 2, 1e-4)


def test_groups_are_as_large_as_cuts_no_ordinary_gradient():
    for positions in (1, 16, 128, 1024, 8192):
        size = group_size(2**10, positions)
        roundings = Roundings(positions=positions)
        assert size == 1 or largest_condition_number(size, roundings) >= 8
        assert largest_condition_number(2 * size, roundings) < 8
    assert group_size(64, 128) == 8
    assert group_size(100, 1024) == 4
    assert group_size(37, 128) == group_size(64, 2**20) == 1
