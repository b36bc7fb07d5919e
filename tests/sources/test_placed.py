"""Every process loads the rows of its own devices, and no others."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from small_runs import DATA, PARAMS, fit, keyed_trainer, new_trainer

from dpmp import DPSGD, _processes, _random
from dpmp.sources import _batches

P = jax.P
SIZE = 16


def make_mechanism(microbatch_size=8):
    return DPSGD(
        num_examples=100,
        expected_batch_size=8,
        iterations=2,
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        microbatch_size=microbatch_size,
        truncated_batch_size=SIZE,
    )


def make_sharding(*sizes):
    """Divides the first axis of arrays over the first axis of a mesh."""
    names = ("data", "model")[: len(sizes)]
    devices = jax.devices()[: np.prod(sizes)]
    types = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(sizes, names, axis_types=types, devices=devices)
    return NamedSharding(mesh, P("data"))


def load(indices):
    return {"x": np.stack([indices, -indices], axis=1).astype(np.float32)}


def load_shards(num_examples, mechanism, sharding, load=load):
    indices = np.arange(num_examples) + 20
    return _batches.load_shards(load, indices, mechanism, sharding)


def test_microbatches_are_dealt_to_the_devices_in_turn():
    batch, is_padding = load_shards(11, make_mechanism(), make_sharding(4))
    # Two microbatches of two examples for each of four devices.
    expected = [[20, 21, 28, 29], [22, 23, 30, 0], [24, 25, 0, 0], [26, 27, 0, 0]]
    rows = [shard.data[:, 0].tolist() for shard in batch["x"].addressable_shards]
    assert rows == expected
    np.testing.assert_array_equal(is_padding, batch["x"][:, 0] == 0)
    np.testing.assert_array_equal(batch["x"][:, 1], -batch["x"][:, 0])
    # Without microbatches, examples keep their order.
    batch, _ = load_shards(11, make_mechanism(None), make_sharding(4))
    np.testing.assert_array_equal(batch["x"][:11, 0], np.arange(11) + 20)


def test_batches_may_be_replicated_along_another_axis():
    batch, _ = load_shards(3, make_mechanism(), make_sharding(2, 2))
    assert {x.data.shape for x in batch["x"].addressable_shards} == {(8, 2)}


def test_a_spec_may_name_axes_that_labels_do_not_have():
    sharding = NamedSharding(make_sharding(2).mesh, P("data", None))
    batch, is_padding = load_shards(3, make_mechanism(), sharding)
    assert batch["x"].sharding.spec == is_padding.sharding.spec == P("data")


def test_batches_are_for_the_devices_of_the_parameters():
    trainer = keyed_trainer()
    copies = NamedSharding(make_sharding(2).mesh, P())
    state = trainer.init(jax.device_put(PARAMS, copies))
    for undivided in (None, copies):
        with pytest.warns(UserWarning, match="each device may compute the whole step"):
            trainer.load_batch(state, DATA, batch_sharding=undivided)
    with pytest.raises(ValueError, match="must have the mesh of the parameters"):
        fit(trainer, state=state, batch_sharding=make_sharding(4))
    auto = (jax.sharding.AxisType.Auto,)
    other = jax.make_mesh((2,), ("other",), axis_types=auto)
    params = {"w": np.zeros(4, np.float32)}
    state = trainer.init(jax.device_put(params, NamedSharding(other, P("other"))))
    with pytest.raises(ValueError, match=r"of_parameters=.*\{'other': 2\}"):
        fit(trainer, state=state, batch_sharding=make_sharding(2))


def test_a_process_asks_for_the_rows_of_its_own_devices_only(monkeypatch):
    asked = []

    def recorded(indices):
        asked.extend(indices.tolist())
        return load(indices)

    sharding = make_sharding(4)
    own = dict(list(sharding.devices_indices_map((SIZE,)).items())[1:3])

    def make_array(given, rows, shape):
        assert given == sharding
        assert shape == (SIZE, *rows.shape[1:])
        return rows

    monkeypatch.setattr(jax, "make_array_from_process_local_data", make_array)
    monkeypatch.setattr(
        NamedSharding, "addressable_devices_indices_map", lambda *_: own
    )
    batch, is_padding = load_shards(11, make_mechanism(), sharding, recorded)
    assert asked == [22, 23, 30, 24, 25]
    assert batch["x"][:, 0].tolist() == [22, 23, 30, 0, 24, 25, 0, 0]
    assert is_padding.tolist() == [False] * 3 + [True] + [False] * 2 + [True] * 2


@pytest.mark.parametrize(
    ("name", "size"), [("microbatch_size", 10), ("truncated_batch_size", 2)]
)
def test_shardings_that_cannot_divide_a_batch_are_refused(name, size):
    trainer = new_trainer(**{name: size})
    message = f"{name.replace('truncated', 'padded')} must be a multiple of the 4 parts"
    for call in (trainer.fit, trainer.load_batch):
        with pytest.raises(ValueError, match=message):
            call(trainer.init(PARAMS), DATA, batch_sharding=make_sharding(4))


def test_several_processes_need_a_sharding(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="batch_sharding must be given"):
        _batches.check_sharding(None, make_mechanism())


def test_the_first_process_draws_the_key(monkeypatch):
    words = np.arange(4, dtype=np.uint32)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_processes, "broadcast", lambda _: words)
    np.testing.assert_array_equal(jax.random.key_data(_random.fresh_key()), words)
