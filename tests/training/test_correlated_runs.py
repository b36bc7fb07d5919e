"""Runs whose noise is correlated over steps."""

import dataclasses
import functools
import warnings

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import (
    DATA,
    DELTA,
    KEY,
    MECHANISM,
    PARAMS,
    SIZE,
    FailureError,
    epsilon_of,
    fails_at,
    fit,
    fixed_tickets,
    keyed_trainer,
    new_trainer,
    num_paid,
    recorded_batches,
    same,
    without_failures,
)

import dpmp
from dpmp import accounting
from dpmp.batch_selection import PoissonSampling
from dpmp.strategies import BandedToeplitz, banded_inverse, banded_toeplitz

BANDS, STEPS = 4, 10
STRATEGY = banded_toeplitz(BANDS, iterations=STEPS)
FIELDS = {"strategy": STRATEGY, "iterations": STEPS, "expected_batch_size": 8}
INVERSE = banded_inverse(3, iterations=STEPS, steps_per_epoch=8)
ADAPTIVE = dpmp.AdaptiveClipNorm(initial=1.0)
ADD_OR_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
WAYS = {"bands": FIELDS, "inverse": FIELDS | {"strategy": INVERSE}}
MECHANISM = dataclasses.replace(MECHANISM, **FIELDS)
OF_INVERSE = dataclasses.replace(MECHANISM, strategy=INVERSE)


ENTRIES = 4000
METRICS = dpmp.ReleasedMetrics(largest_loss=2.0, fraction_clipped=True)


@functools.cache
def shared(way):
    """A trainer whose gradients are zero, so that its releases are noise."""
    return new_trainer(
        **WAYS[way],
        loss_fn=lambda params, batch: 0.0 * jnp.sum(params["w"]) * batch["y"][0],
        optimizer=optax.sgd(1.0),
        released_metrics=METRICS,
    )


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def trainer():
    return without_failures(shared("bands"))


def run(trainer, *args, **options):
    state = trainer.init({"w": np.zeros(ENTRIES, np.float32)})
    return fit(trainer, *args, state=state, **options)


@pytest.fixture
def batches(monkeypatch):
    return recorded_batches(monkeypatch)


def test_groups_take_turns(way, batches):
    trainer, groups = without_failures(shared(way)), {"bands": BANDS, "inverse": 8}[way]
    state = run(trainer)
    assert len(batches) == STEPS
    for step, batch in enumerate(batches):
        group = np.arange(SIZE)[step % groups :: groups]
        assert np.all(np.isin(batch, group))
        assert way == "bands" or np.array_equal(np.sort(batch), group)  # all of it
    assert way == "inverse" or 40 < sum(map(len, batches)) < 120  # 80 expected
    assert trainer.guarantee(state) == trainer.mechanism.guarantee()
    of_way = OF_INVERSE if way == "inverse" else MECHANISM
    assert trainer.guarantee(state).epsilon == of_way.guarantee().epsilon


def test_sizes_are_those_of_groups():
    assert MECHANISM.sampling_prob == 1 / 2
    sampling = PoissonSampling(1 / 2, STEPS, 16, BANDS)
    assert MECHANISM.batch_selection_strategy == sampling
    assert MECHANISM.without_privacy().batch_selection_strategy == sampling
    calibrated = MECHANISM.calibrate(epsilon=2.0, delta=DELTA)
    assert calibrated.guarantee().epsilon <= 2.0


@pytest.mark.parametrize(
    ("mechanism", "sampling_prob", "turns"),
    [
        (MECHANISM, 1 / 2, {1: 1, 4: 1, 5: 2, 8: 2, 10: 3}),
        (OF_INVERSE, 1.0, {1: 1, 8: 1, 9: 2, 10: 2}),
    ],
    ids=WAYS,
)
def test_epsilon_is_that_of_the_turns_of_one_group(mechanism, sampling_prob, turns):
    for step, number in turns.items():
        event = accounting.dpsgd_event(1.0, number, sampling_prob=sampling_prob)
        expected = accounting.get_epsilon(event, delta=DELTA * (1 - 1e-4)).epsilon
        assert mechanism.guarantee(step).epsilon == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("fields", [FIELDS, {"sampling": "random_allocation"}])
def test_steps_that_are_tied_together_are_not_made_alone(fields):
    trainer = new_trainer(**fields)
    state, mask = trainer.init(PARAMS), np.zeros(SIZE, bool)
    with pytest.raises(ValueError, match="fit must make them"):
        trainer.load_batch(state, DATA)
    with pytest.raises(ValueError, match="fit must make them"):
        trainer.train_step(state, DATA, mask)


def test_every_example_of_a_group_is_included_with_one_probability():
    bands, num_examples = 3, 7
    sampling = PoissonSampling(0.25, 6000, cycle_length=bands)
    counts = np.zeros((bands, num_examples))
    for step in range(6000):
        batch = sampling.indices(step, num_examples=num_examples, key=1)
        counts[step % bands, batch] += 1
    group = np.arange(num_examples) % bands == np.arange(bands)[:, None]
    number = 6000 / bands
    assert np.all(counts[~group] == 0)
    deviation = np.sqrt(number * 0.25 * 0.75)
    assert np.all(np.abs(counts[group] - number / 4) < 5 * deviation)
    with pytest.raises(ValueError, match="num_examples must be"):
        sampling.indices(0, num_examples=bands - 1, key=1)


@pytest.mark.filterwarnings("error")
def test_one_band_is_the_mechanism_without_a_strategy():
    plain = keyed_trainer()
    one = new_trainer(prng_key=KEY, strategy=BandedToeplitz((1.0,), 7))
    assert one.mechanism.step_cost == plain.mechanism.step_cost
    states = [fit(x) for x in (plain, one)]
    assert same(*states)


def test_noise_of_a_run_is_as_wide_and_correlated_as_the_strategy_needs(
    way, monkeypatch
):
    fixed_tickets(monkeypatch)
    trainer, strategy, runs = shared(way), WAYS[way]["strategy"], 6
    found, metrics = [], []

    def callback(state):
        found.append(np.asarray(state.params["w"]))
        metrics.append([state.metrics[name] for name in ("loss", "clipped")])

    for _ in range(runs):
        run(trainer, callback=callback, every=1)
    inverse, size = strategy.quotient(np.eye(STEPS)), FIELDS["expected_batch_size"]
    sums = np.reshape(found, (runs, STEPS, ENTRIES))
    sums = np.concatenate(sums, axis=-1) / trainer.mechanism.stddev
    x = np.diff(sums, axis=0, prepend=0.0)
    expected = inverse @ inverse.T * strategy.sensitivity**2
    np.testing.assert_allclose(x @ x.T / x.shape[1], expected, atol=0.08)
    assert np.sqrt(np.mean(sums**2)) == pytest.approx(strategy.error(), rel=0.03)
    # Metrics: with an inverse, their noise is correlated as that of gradients.
    text = " ".join(trainer.mechanism.statement().split())
    values = np.reshape(metrics, (runs, STEPS, 2))
    for i, name in enumerate(("loss", "clipped")):
        wanted = METRICS.stddev(name, 1.0, size) * strategy.sensitivity
        noise = values[..., i].T
        widest = np.linalg.norm(inverse[-1]) if way == "inverse" else 1.0
        assert f"{name} (standard deviation {wanted * widest:.2g})" in text
        independent = strategy.product(noise) if way == "inverse" else noise
        assert np.std(independent) == pytest.approx(wanted, rel=0.35)


def test_a_run_goes_on_with_a_new_sequence(trainer, batches, tmp_path):
    with warnings.catch_warnings(action="error"):
        run(trainer, tmp_path, stop_at=3)
    for stop in (6, STEPS):
        with pytest.warns(match="a new sequence of noise"):
            state = run(trainer, tmp_path, stop_at=stop)
    for step, batch in enumerate(batches):
        assert np.all(batch % BANDS == step % BANDS)
    assert num_paid(tmp_path) == STEPS
    assert trainer.guarantee(state).epsilon == MECHANISM.guarantee().epsilon
    assert epsilon_of(tmp_path) == MECHANISM.guarantee().epsilon


def test_every_cycle_that_a_run_begins_is_a_turn():
    """Between two runs, someone may shuffle the dataset."""
    cost = MECHANISM.step_cost
    for ranges, turns in (
        ([range(10)], 3),
        ([range(3), range(3, 10)], 3),
        ([range(3), range(6, 9)], 2),
        ([range(10), range(9, 10)], 4),
        ([range(10), range(2, 4)], 4),
        ([range(5), range(5, 10)], 4),
        ([range(10), range(2)], 4),
    ):
        assert cost.of_runs(ranges) == {cost: turns * BANDS}


def test_nothing_of_the_noise_is_in_a_state_or_on_a_disk(
    trainer, tmp_path, monkeypatch
):
    pasts, run_step = [], type(trainer._programs).run

    def recorded(self, *args):
        results = run_step(self, *args)
        pasts.extend(np.asarray(x) for x in results.past)
        return results

    monkeypatch.setattr(type(trainer._programs), "run", recorded)
    state = run(trainer, tmp_path)
    assert len(pasts) == STEPS
    assert pasts[-1].shape == (BANDS - 1, ENTRIES)
    leaves = [np.asarray(x) for x in jax.tree.leaves(state)]
    content = b"".join(x.tobytes() for x in leaves)
    for path in tmp_path.rglob("*"):
        content += path.read_bytes() if path.is_file() else b""
    assert all(x[:1].tobytes() not in content for x in pasts)


def test_an_error_does_not_lead_to_the_noise(trainer):
    with pytest.raises(FailureError) as caught:
        run(trainer, callback=fails_at(5))
    frames = [x.frame.f_locals for x in caught.traceback]
    (loop,) = [x["loop"] for x in frames if "loop" in x]
    assert loop._past is None


@pytest.mark.parametrize(
    "way", ["inverse", pytest.param("bands", marks=pytest.mark.slow)]
)
def test_devices_share_a_run(way):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    fields = WAYS[way] | {"microbatch_size": 4, "arithmetic": "exact"}
    trainer = new_trainer(**fields, method="per_example", prng_key=jax.random.key(1))
    params = {"w": np.zeros(4, np.float32)}
    data = {"x": np.pad(DATA["x"], ((0, 0), (0, 1))), "y": DATA["y"]}
    alone = trainer.fit(trainer.init(params), data, progress=False)
    placed = jax.device_put(params, sharding)
    shared = trainer.fit(
        trainer.init(placed), data, batch_sharding=sharding, progress=False
    )
    np.testing.assert_allclose(alone.params["w"], shared.params["w"], atol=1e-6)
    assert len(trainer._programs._compiled) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling": "random_allocation"}, 'sampling must be "poisson"'),
        ({"iterations": 11}, "for all iterations"),
        ({"arithmetic": "unproved_float32"}, "arithmetic must have a grid"),
        (
            {"l2_clip_norm": ADAPTIVE, "rescale_to_unit_norm": True},
            "the clip norm must not adapt",
        ),
        (
            {"neighboring_relation": ADD_OR_REMOVE, "method": "per_example"},
            "examples must have fixed places",
        ),
        ({"expected_batch_size": 17}, "at most num_examples over the bands"),
        ({"sampling_prob": 0.5}, "sampling_prob must be left out"),
        ({"strategy": 4}, "banded_toeplitz"),
        (
            {"strategy": INVERSE, "expected_batch_size": 10},
            "num_examples over expected_batch_size, rounded.*Use 6 steps",
        ),
        (
            {"strategy": INVERSE, "truncated_batch_size": 3},
            "at least the size of a group",
        ),
        ({"noise_multiplier": 2000.0, "num_parameters": 9}, "must be at most 2048"),
    ],
)
def test_what_does_not_fit_a_strategy_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MECHANISM, **{"arithmetic": None} | fields)
