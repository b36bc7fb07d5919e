"""Every process loads the rows of its own devices, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

from dpmp import DPSGD, DPTrainer, _random
from dpmp.sources import _placed

P = jax.P
SIZE = 16


def make_mechanism(**options):
    options = {"microbatch_size": 8, "truncated_batch_size": SIZE} | options
    return DPSGD(
        num_examples=100,
        expected_batch_size=8,
        iterations=2,
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        **options,
    )


def make_trainer(**options):
    return DPTrainer(
        mechanism=make_mechanism(**options),
        loss_fn=lambda params, batch: jnp.mean(batch["x"] @ params),
        optimizer=optax.sgd(0.1),
        policy="float32",
        prng_key=jax.random.key(0),
    )


def make_sharding(size=4):
    mesh = jax.make_mesh(
        (size,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size]
    )
    return NamedSharding(mesh, P("data"))


def load(indices):
    return {"x": np.stack([indices, -indices], axis=1).astype(np.float32)}


def test_microbatches_are_dealt_to_the_devices_in_turn():
    indices = np.arange(11) + 20
    batch, is_padding = _placed.load_shards(
        load, indices, make_mechanism(), make_sharding()
    )
    # Two microbatches of two examples for each of four devices.
    expected = [[20, 21, 28, 29], [22, 23, 30, 0], [24, 25, 0, 0], [26, 27, 0, 0]]
    rows = [shard.data[:, 0].tolist() for shard in batch["x"].addressable_shards]
    assert rows == expected
    np.testing.assert_array_equal(is_padding, batch["x"][:, 0] == 0)
    np.testing.assert_array_equal(batch["x"][:, 1], -batch["x"][:, 0])
    # Without microbatches, examples keep their order.
    whole = make_mechanism(microbatch_size=None)
    batch, _ = _placed.load_shards(load, indices, whole, make_sharding())
    np.testing.assert_array_equal(batch["x"][:11, 0], indices)


def test_arrays_may_be_sharded_along_other_axes_too():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("data"))
    batch, _ = _placed.load_shards(load, np.arange(3) + 1, make_mechanism(), sharding)
    assert {x.data.shape for x in batch["x"].addressable_shards} == {(8, 2)}


def test_a_step_takes_its_arguments_from_any_place():
    """As loops that users write may pass them, from one step to the next."""
    sharding = make_sharding(2)
    replicated = NamedSharding(sharding.mesh, P())
    trainer = make_trainer()
    batch = {"x": np.ones((SIZE, 2), np.float32)}
    is_padding = np.zeros(SIZE, bool)
    results = []
    for place in (sharding, None):
        state = trainer.init(np.ones(2, np.float32))
        mask = is_padding if place is None else jax.device_put(is_padding, place)
        for x in (jax.device_put(batch, sharding), jax.device_put(batch, replicated)):
            state = trainer.train_step(jax.device_put(state, replicated), x, mask)
        results.append(np.asarray(state.params))
    np.testing.assert_array_equal(*results)


def test_a_process_asks_for_the_rows_of_its_own_devices_only(monkeypatch):
    asked = []

    def recorded(indices):
        asked.extend(indices.tolist())
        return load(indices)

    sharding = make_sharding()
    own = dict(list(sharding.devices_indices_map((SIZE,)).items())[1:3])

    def make_array(shape, given, part):
        assert given is sharding
        others = [slice(None)] * (len(shape) - 1)
        return np.concatenate([part((index[0], *others)) for index in own.values()])

    monkeypatch.setattr(jax, "make_array_from_callback", make_array)
    monkeypatch.setattr(
        NamedSharding, "addressable_devices_indices_map", lambda *_: own
    )
    batch, is_padding = _placed.load_shards(
        recorded, np.arange(11) + 20, make_mechanism(), sharding
    )
    assert asked == [22, 23, 30, 24, 25]
    assert batch["x"][:, 0].tolist() == [22, 23, 30, 0, 24, 25, 0, 0]
    assert is_padding.tolist() == [False] * 3 + [True] + [False] * 2 + [True] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatch_size": 2}, "microbatch_size must be a multiple of the 4 parts"),
        (
            {"microbatch_size": None, "truncated_batch_size": 14},
            "padded_batch_size must be a multiple of the 4 parts",
        ),
    ],
)
def test_shardings_that_cannot_divide_a_batch_are_refused(options, message):
    trainer, data = make_trainer(**options), {"x": np.zeros((100, 2), np.float32)}
    state = trainer.init(np.zeros(2, np.float32))
    for call in (trainer.fit, trainer.load_batch):
        with pytest.raises(ValueError, match=message):
            call(state, data, batch_sharding=make_sharding())


@pytest.mark.parametrize("number", [0, 1])
def test_only_the_first_process_reports_progress(number, monkeypatch, capsys):
    trainer = make_trainer()
    state = trainer.init(np.zeros(2, np.float32))
    monkeypatch.setattr(jax, "process_index", lambda: number)
    trainer.fit(state, {"x": np.zeros((100, 2), np.float32)})
    assert bool(capsys.readouterr().err) == (number == 0)


def test_several_processes_need_a_sharding(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="batch_sharding must be given"):
        _placed.check_sharding(None, make_mechanism())


def test_processes_must_have_the_same_key(monkeypatch):
    def set_difference(number):
        def gather(x):
            return np.stack([x, x + number])

        monkeypatch.setattr(_random.multihost_utils, "process_allgather", gather)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    set_difference(0)
    _random.check_shared(jax.random.key(0))
    set_difference(1)
    with pytest.raises(ValueError, match="the same on all processes") as error:
        _random.check_shared(jax.random.key(123456789))
    assert "123456789" not in str(error.value)


def test_the_first_process_draws_the_key(monkeypatch):
    words = np.arange(4, dtype=np.uint32)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        _random.multihost_utils, "broadcast_one_to_all", lambda _: words
    )
    np.testing.assert_array_equal(jax.random.key_data(_random.fresh_key()), words)
