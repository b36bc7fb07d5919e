import dataclasses
import functools
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from dpmp import DPSGD, accounting
from dpmp.batch_selection import PoissonSampling
from dpmp.mechanism import _privacy_cost
from dpmp.noise_addition import NoiseState

KEY = jax.random.key(5)
RELATIONS = dp_accounting.NeighboringRelation
FIELDS = {
    "num_examples": 1000,
    "expected_batch_size": 50,
    "iterations": 100,
    "l2_clip_norm": 1.0,
}


def make_mechanism(**fields):
    return DPSGD(**{**FIELDS, **fields})


def epsilon_of(mechanism, noise_multiplier):
    changed = dataclasses.replace(mechanism, noise_multiplier=noise_multiplier)
    return changed.guarantee().epsilon


def linear_loss(params, x):
    """A loss whose gradient is the example."""
    return jnp.sum(params * x)


# Calibration, which is quick for much noise.

SMALL = {"num_examples": 100, "iterations": 10}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"neighboring_relation": RELATIONS.REPLACE_ONE},
        {"truncated_batch_size": 60},
        {"expected_batch_size": 100, "iterations": 3},
        {"l2_clip_norm": {"w": 3.0, "b": 4.0}, "arithmetic": "float32"},
    ],
    ids=["plain", "replace-one", "truncated", "whole-dataset", "groups"],
)
def test_calibration_meets_its_target_and_no_more(fields):
    mechanism = make_mechanism(**SMALL | fields).calibrate(epsilon=2.0, delta=1e-5)
    assert 1.99 < mechanism.guarantee().epsilon <= 2.0
    assert mechanism.guarantee().delta == mechanism.delta == 1e-5
    assert epsilon_of(mechanism, 0.99 * mechanism.noise_multiplier) > 2.0


@functools.cache
def calibrated(**fields):
    return make_mechanism(**SMALL, **fields).calibrate(epsilon=2.0, delta=1e-5)


def test_a_delta_that_lets_an_example_be_published_is_warned_of():
    mechanism = make_mechanism(num_examples=200, expected_batch_size=200)
    for delta in (0.5, 1 / 200):
        with pytest.warns(UserWarning, match=f"well below 1 / num_ex.*delta={delta}"):
            mechanism.calibrate(epsilon=1.0, delta=delta)
    mechanism.calibrate(epsilon=1.0, delta=1 / 201)


def test_calibration_changes_nothing_else_and_does_not_depend_on_the_clip_norm():
    fields = {"microbatch_size": 10, "l2_clip_norm": 0.1}
    assert make_mechanism(**SMALL, **fields) == dataclasses.replace(
        calibrated(**fields), noise_multiplier=None, delta=None
    )
    other = calibrated(microbatch_size=10)
    assert calibrated(**fields).noise_multiplier == other.noise_multiplier
    assert other.stddev == pytest.approx(10 * calibrated(**fields).stddev)


def test_epochs_are_turned_into_steps():
    fields = {name: x for name, x in FIELDS.items() if name != "iterations"}
    assert DPSGD.from_epochs(epochs=5, **fields) == make_mechanism(iterations=100)
    assert DPSGD.from_epochs(epochs=0.001, **fields).iterations == 1
    assert DPSGD.from_epochs(epochs=0.127, **fields).iterations == 3


# What is charged.


def test_replacing_an_example_costs_more_than_blanking_or_adding_one():
    epsilon = {
        relation: make_mechanism(
            noise_multiplier=1.0, delta=1e-5, neighboring_relation=relation
        )
        .guarantee()
        .epsilon
        for relation in RELATIONS
    }
    cheaper = epsilon[RELATIONS.REPLACE_SPECIAL]
    assert epsilon[RELATIONS.ADD_OR_REMOVE_ONE] == pytest.approx(cheaper, rel=1e-9)
    assert epsilon[RELATIONS.REPLACE_ONE] > 1.3 * cheaper
    assert make_mechanism().neighboring_relation is RELATIONS.REPLACE_SPECIAL


@pytest.mark.parametrize("given", [60, None])
def test_batches_are_truncated_and_that_is_accounted_for(given):
    mechanism = make_mechanism(noise_multiplier=1.5, truncated_batch_size=given)
    size = given or accounting.choose_truncated_batch_size(1000, 0.05)
    assert mechanism.batch_selection_strategy == PoissonSampling(0.05, 100, size)
    assert mechanism.dp_event == accounting.truncated_dpsgd_event(
        1.5, 100, sampling_prob=0.05, num_examples=1000, truncated_batch_size=size
    )


def test_the_event_is_plain_where_no_batch_can_be_truncated():
    plain = functools.partial(accounting.dpsgd_event, 1.5, 100)
    for fields, sampling_prob in (
        ({"expected_batch_size": 1000}, 1.0),
        ({"truncated_batch_size": 1000}, 0.05),
        ({"truncated_batch_size": 5000}, 0.05),
    ):
        mechanism = make_mechanism(noise_multiplier=1.5, **fields)
        assert mechanism.dp_event == plain(sampling_prob=sampling_prob)
    # One example more still fits.
    fields = {"neighboring_relation": RELATIONS.ADD_OR_REMOVE_ONE}
    mechanism = make_mechanism(expected_batch_size=1000, noise_multiplier=1.5, **fields)
    assert mechanism.batch_selection_strategy.truncated_batch_size == 1001
    assert mechanism.dp_event == plain(sampling_prob=1.0)


def test_batches_are_padded_to_a_multiple_of_the_microbatch():
    for truncated_batch_size in (None, 60, 64, 5000):
        fields = {"truncated_batch_size": truncated_batch_size, "noise_multiplier": 2.0}
        for microbatch_size in (7, 64):
            mechanism = make_mechanism(microbatch_size=microbatch_size, **fields)
            size = mechanism.padded_batch_size
            largest = mechanism.batch_selection_strategy.truncated_batch_size
            assert size % microbatch_size == 0
            assert largest <= size < largest + microbatch_size
            assert largest <= 1000
            # Other devices may go on with the run, in other microbatches.
            assert mechanism.step_cost == make_mechanism(**fields).step_cost
    for size, padded in ((10, 16), (100, 128), (33, 64), (1, 1)):
        chosen = make_mechanism(truncated_batch_size=size)
        assert chosen.padded_batch_size == padded


def test_a_given_sampling_probability_does_not_depend_on_the_sizes():
    given = {"sampling_prob": 0.03, "truncated_batch_size": 80, "noise_multiplier": 1.5}
    given["method"] = "per_example"  # which allows all relations
    mechanism = make_mechanism(**given)
    assert mechanism.batch_selection_strategy == PoissonSampling(0.03, 100, 80)
    assert mechanism.dp_event == accounting.truncated_dpsgd_event(
        1.5, 100, sampling_prob=0.03, num_examples=1000, truncated_batch_size=80
    )
    for sizes in ({"num_examples": 20}, {"expected_batch_size": 4}):
        other = dataclasses.replace(mechanism, **sizes)
        assert (
            other.batch_selection_strategy.sampling_prob == other.sampling_prob == 0.03
        )
    sizes = {"num_examples": 20, "neighboring_relation": RELATIONS.ADD_OR_REMOVE_ONE}
    protected = dataclasses.replace(mechanism, **sizes)
    assert protected.padded_batch_size == 96
    assert protected.dp_event == accounting.dpsgd_event(1.5, 100, sampling_prob=0.03)
    # What adds up the gradients still divides by the expected batch size.
    assert mechanism.stddev == pytest.approx(1.5 / 50)
    fields = {name: x for name, x in FIELDS.items() if name != "iterations"}
    assert DPSGD.from_epochs(epochs=3, **fields, sampling_prob=0.03).iterations == 100


def test_a_computed_sampling_probability_follows_the_sizes():
    mechanism = calibrated()
    assert mechanism.sampling_prob == 0.5
    assert dataclasses.replace(mechanism, num_examples=500).sampling_prob == 0.1
    assert dataclasses.replace(mechanism, sampling_prob=0.01).sampling_prob == 0.01


def truncated_epsilon(larger_size, **fields):
    event = accounting.truncated_dpsgd_event(
        fields["noise_multiplier"],
        fields["iterations"],
        sampling_prob=fields["expected_batch_size"] / fields["num_examples"],
        num_examples=larger_size,
        truncated_batch_size=fields["truncated_batch_size"],
    )
    return accounting.get_epsilon(
        event, delta=1e-5 * (1 - 1e-4), neighboring_relation=RELATIONS.ADD_OR_REMOVE_ONE
    ).epsilon


# One more example costs more where batches are truncated now and then, and less where
# all are.
@pytest.mark.parametrize(
    ("fields", "worst"),
    [
        ({"expected_batch_size": 50, "truncated_batch_size": 60}, 101),
        ({"expected_batch_size": 100, "truncated_batch_size": 80}, 100),
    ],
)
def test_truncation_is_charged_for_the_worse_neighbour(fields, worst):
    fields |= {"num_examples": 100, "iterations": 3, "noise_multiplier": 2.0}
    epsilons = {size: truncated_epsilon(size, **fields) for size in (100, 101)}
    assert max(epsilons, key=epsilons.get) == worst
    assert epsilons[worst] > 1.0001 * min(epsilons.values())
    mechanism = make_mechanism(
        **fields, neighboring_relation=RELATIONS.ADD_OR_REMOVE_ONE
    )
    assert mechanism.guarantee(delta=1e-5).epsilon == epsilons[worst]
    calibrated = mechanism.calibrate(epsilon=3.0, delta=1e-5)
    fields["noise_multiplier"] = calibrated.noise_multiplier
    assert 2.99 < truncated_epsilon(worst, **fields) <= 3.0
    assert truncated_epsilon(201 - worst, **fields) <= 3.0


# Noise and sensitivity.


@pytest.mark.parametrize("rescale_to_unit_norm", [False, True])
@pytest.mark.parametrize("l2_clip_norm", [0.1, 3.0, {"a": 3.0, "b": 4.0}])
def test_the_stddev_is_that_of_the_average(l2_clip_norm, rescale_to_unit_norm):
    mechanism = make_mechanism(
        l2_clip_norm=l2_clip_norm,
        rescale_to_unit_norm=rescale_to_unit_norm,
        noise_multiplier=1.5,
        # The accountant knows that replacing an example moves the sum twice as far.
        neighboring_relation=RELATIONS.REPLACE_ONE,
    )
    norm = 5.0 if isinstance(l2_clip_norm, dict) else l2_clip_norm
    norm = 1.0 if rescale_to_unit_norm else norm
    grad_fn = mechanism.clipped_grad(linear_loss)
    assert mechanism.stddev == pytest.approx(1.5 * norm / 50, rel=1e-12)
    assert mechanism.stddev == pytest.approx(1.5 * grad_fn.sensitivity(), rel=1e-12)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rescale_to_unit_norm": True},
        {"method": "book_keeping", "arithmetic": "bounded"},
    ],
    ids=["plain", "rescaled", "bounded"],
)
def test_the_noise_is_calibrated_for_what_it_is_added_to(fields):
    """Not for the sum where the average is released, nor the other way round."""
    size = 20_000
    mechanism = make_mechanism(noise_multiplier=1.5, l2_clip_norm=3.0, **fields)
    params, batch = np.zeros(size, np.float32), np.zeros((3, size), np.float32)
    batch[1], batch[2, 0] = 1.0, 1e-3

    @jax.jit
    def summed(is_padding_example):
        grad_fn = mechanism.clipped_grad(linear_loss)
        return grad_fn(params, batch, is_padding_example=is_padding_example)

    with_example = summed(np.array([False, False, False]))
    without_example = summed(np.array([False, True, False]))
    difference = np.subtract(with_example.counts, without_example.counts, dtype=float)
    contribution = with_example.unit * np.linalg.norm(difference)

    privatizer = mechanism.privatizer(KEY)
    noisy, _ = privatizer.update(with_example, privatizer.init(params))
    noise = np.asarray(noisy, np.float64) - np.asarray(with_example.to_float())

    def has_multiplier(noise_multiplier):
        stddev = noise_multiplier * contribution
        statistic = np.sum(np.square(noise / stddev))
        tail = min(stats.chi2.cdf(statistic, size), stats.chi2.sf(statistic, size))
        return 2 * tail > 1e-6

    assert has_multiplier(1.5)
    for wrong in (0.7 * 1.5, 0.95 * 1.5, 1.05 * 1.5, 1.3 * 1.5, 1.5 / 50, 1.5 * 50):
        assert not has_multiplier(wrong)


def test_noise_and_models_that_no_grid_fits_are_refused_at_construction():
    fields = {
        "noise_multiplier": 8000.0,
        "num_parameters": 10**9,
        "method": "per_example",
    }
    with pytest.raises(ValueError, match="must cost at most 5% of the clip norm"):
        make_mechanism(**fields)
    with pytest.raises(ValueError, match=r"got cost=.*noise_multiplier=.*Use less noi"):
        make_mechanism().calibrate(epsilon=1e-9, delta=1e-5)
    make_mechanism(noise_multiplier=500.0, method="per_example")
    assert make_mechanism(**fields, arithmetic="float32").resolution is None


def test_a_clip_norm_of_zero_divides_gradients_by_their_norms():
    directions = make_mechanism(l2_clip_norm=0.0, rescale_to_unit_norm=True)
    grad_fn = directions.clipped_grad(linear_loss)
    total = grad_fn(jnp.zeros(3), jnp.ones((2, 3)), is_padding_example=[False, False])
    assert np.all(np.asarray(total.counts))


def test_what_the_sampler_falls_short_of_is_charged_to_delta():
    mechanism = make_mechanism(noise_multiplier=1.0)
    assert mechanism.guarantee(delta=1e-5) == dataclasses.replace(
        accounting.get_epsilon(
            mechanism.dp_event,
            delta=1e-5 * (1 - 1e-4),
            neighboring_relation=RELATIONS.REPLACE_SPECIAL,
        ),
        delta=1e-5,
    )


def test_an_epsilon_that_the_sampler_does_not_support_is_not_claimed():
    mechanism = make_mechanism(noise_multiplier=0.36)
    # 1e-4 delta / (100 steps * 10^7 entries * 2^-109) is exp(34.1) for 1e-5.
    assert mechanism.guarantee(delta=1e-5).epsilon == math.inf
    assert mechanism.guarantee(delta=1e-2).epsilon < 25
    fewer = dataclasses.replace(mechanism, num_parameters=1)
    assert 40 < fewer.guarantee(delta=1e-5).epsilon < 45
    with pytest.raises(ValueError, match=r"epsilon must be at most 34\.1"):
        mechanism.calibrate(epsilon=35.0, delta=1e-5)
    whole = make_mechanism(expected_batch_size=1000)
    assert whole.calibrate(epsilon=34.0, delta=1e-5).guarantee().epsilon <= 34


def test_what_the_batches_fall_short_of_is_charged_to_delta(monkeypatch):
    mechanism = make_mechanism(noise_multiplier=1.0, num_parameters=1)
    before = mechanism.guarantee(delta=1e-5).epsilon
    share = 1e-4 * 1e-5 / 100  # of delta, for each step
    for distance, is_covered in (
        (share / (1 + math.exp(before * 1.01)), True),
        (share / (1 + math.exp(before * 0.99)), False),
    ):
        monkeypatch.setattr(_privacy_cost, "SAMPLING_TOTAL_VARIATION", distance)
        _privacy_cost._guarantee_of.cache_clear()
        epsilon = mechanism.guarantee(delta=1e-5).epsilon
        assert epsilon == (before if is_covered else math.inf)
    _privacy_cost._guarantee_of.cache_clear()


def test_clipping_options_reach_clipped_grad():
    mechanism = make_mechanism(microbatch_size=2, arithmetic="exact")
    grad_fn = mechanism.clipped_grad(
        lambda scale, x, params: jnp.sum(params * x) * scale,
        argnums=2,
        return_grad_norms=True,
    )
    mask = np.zeros(4, bool)
    total, aux = grad_fn(1.0, jnp.ones((4, 2)), jnp.zeros(2), is_padding_example=mask)
    assert type(total).__name__ == "GridArray"
    np.testing.assert_allclose(aux.grad_norms, 2**0.5, rtol=1e-6)
    rows = mechanism.padded_batch_size + 2
    batch, mask = jnp.ones((rows, 2)), np.zeros(rows, bool)
    grad_fn(1.0, batch[:-2], jnp.zeros(2), is_padding_example=mask[:-2])
    with pytest.raises(ValueError, match="must be drawn, and have at most padded"):
        grad_fn(1.0, batch, jnp.zeros(2), is_padding_example=mask)
    with pytest.raises(ValueError, match="must come with is_padding_example"):
        grad_fn(1.0, jnp.ones((4, 2)), jnp.zeros(2))


def test_the_privatizer_is_an_optax_transformation():
    mechanism = make_mechanism(noise_multiplier=1.0)
    optimizer = optax.chain(mechanism.privatizer(KEY), optax.sgd(0.1))
    state = optimizer.init(jnp.zeros(3))
    assert isinstance(state[0], NoiseState)
    sums = mechanism.clipped_grad(lambda w, x: jnp.sum(w * x))(
        jnp.zeros(3), jnp.zeros((2, 3)), is_padding_example=np.zeros(2, bool)
    )
    updates, state = optimizer.update(sums, state)
    assert np.all(updates != 0)
    fresh = [mechanism.privatizer().init(jnp.zeros(3)).prng_key for _ in range(2)]
    assert np.any(jax.random.key_data(fresh[0]) != jax.random.key_data(fresh[1]))


def test_no_update_is_made_after_the_last_step():
    mechanism = make_mechanism(noise_multiplier=1.0, iterations=2)
    grad_fn, privatizer = mechanism.clipped_grad(linear_loss), mechanism.privatizer()
    sums = grad_fn(jnp.zeros(3), jnp.zeros((2, 3)), is_padding_example=[False, False])
    state = privatizer.init(jnp.zeros(3))
    for _ in range(2):
        _, state = privatizer.update(sums, state)
    with pytest.raises(ValueError, match="at most one update for each of the iterat"):
        privatizer.update(sums, state)
    compiled, state = jax.jit(privatizer.update), privatizer.init(jnp.zeros(3))
    for is_covered in (True, True, False):
        noisy, state = compiled(sums, state)
        assert np.isfinite(noisy).all() == is_covered
        assert np.isnan(noisy).all() != is_covered


# Without privacy.


def test_without_privacy_there_is_no_clipping_and_no_noise():
    mechanism = make_mechanism(
        noise_multiplier=1.0, rescale_to_unit_norm=True, l2_clip_norm={"w": 0.1}
    ).without_privacy()
    assert mechanism.stddev == 0
    assert not mechanism.is_private
    grad_fn = mechanism.clipped_grad(lambda params, x: jnp.sum(params["w"] * x))
    batch, mask = jnp.full((3, 2), 100.0), np.zeros(3, bool)
    grad = grad_fn({"w": jnp.zeros(2)}, batch, is_padding_example=mask)
    np.testing.assert_allclose(grad["w"], 3 * 100 / 50, rtol=1e-6)
    noisy, _ = mechanism.privatizer(KEY).update(grad, NoiseState(KEY, jnp.int32(0)))
    np.testing.assert_array_equal(noisy["w"], grad["w"])


def test_without_privacy_bounded_sums_become_floats():
    mechanism = make_mechanism(noise_multiplier=1.0, method="book_keeping")
    baseline = mechanism.without_privacy()
    assert baseline.method == "book_keeping"
    assert baseline.arithmetic == "unproved_float32"
    assert baseline.batch_selection_strategy == mechanism.batch_selection_strategy


UNCLIPPED = {"l2_clip_norm": math.inf, "arithmetic": "float32"}


@pytest.mark.parametrize(
    "mechanism",
    [
        make_mechanism(noise_multiplier=1.0).without_privacy(),
        make_mechanism(noise_multiplier=0.0),
        make_mechanism(noise_multiplier=1.0, **UNCLIPPED),
    ],
)
def test_nothing_private_is_claimed_without_noise_and_clipping(mechanism):
    assert not mechanism.is_private
    assert mechanism.guarantee(delta=1e-5).epsilon == math.inf
    assert mechanism.statement().startswith("No privacy:")
    assert "differentially private" not in mechanism.statement()


def test_noise_and_clipping_are_private():
    directions = {"l2_clip_norm": 0.0, "rescale_to_unit_norm": True}
    assert not make_mechanism().is_private
    assert make_mechanism(noise_multiplier=1.0).is_private
    assert make_mechanism(noise_multiplier=1.0, **directions).is_private
    with pytest.raises(ValueError, match="must clip to be private"):
        make_mechanism(**UNCLIPPED).calibrate(epsilon=1.0, delta=1e-5)


def test_there_is_no_default_clip_norm():
    with pytest.raises(TypeError, match="l2_clip_norm"):
        DPSGD(num_examples=10, expected_batch_size=5, iterations=1)


@pytest.mark.parametrize(
    ("fields", "method", "arithmetic"),
    [
        ({}, "book_keeping", "bounded"),
        ({"method": "per_example"}, "per_example", "exact"),
        ({"arithmetic": "exact"}, "per_example", "exact"),
        ({"arithmetic": "unproved_float32"}, "book_keeping", "unproved_float32"),
        (
            {
                "neighboring_relation": RELATIONS.ADD_OR_REMOVE_ONE,
                "sampling_prob": 0.05,
                "truncated_batch_size": 80,
            },
            "per_example",
            "exact",
        ),
    ],
)
def test_the_default_is_the_fastest_method_with_a_proof(fields, method, arithmetic):
    mechanism = make_mechanism(**fields)
    assert (mechanism.method, mechanism.arithmetic) == (method, arithmetic)
    assert dataclasses.replace(make_mechanism(), **fields) == mechanism
    assert dataclasses.replace(mechanism) == mechanism
