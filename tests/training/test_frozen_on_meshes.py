"""Frozen arrays on the devices of a mesh, in losses with loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from small_runs import PARAMS, SIZE, new_trainer

from dpmp import lora


def looped_loss(base, params, batch):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    x = jax.lax.scan(layer, batch["x"], base["layers"])[0]
    return jnp.mean(x**2) + jnp.sum(params["w"]) * jnp.mean(batch["x"])


@pytest.mark.parametrize(
    "axis_type",
    [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)],
)
def test_a_frozen_model_of_many_devices_may_have_a_loop(axis_type):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)
    place = functools.partial(jax.NamedSharding, mesh)
    layers = np.ones((3, 8, 8), np.float32) / 8
    base = {"layers": jax.device_put(layers, place(jax.P(None, None, "model")))}
    options = {"batch_sharding": place(jax.P("data")), "progress": False, "stop_at": 1}
    data = {"x": np.ones((SIZE, 8), np.float32)}

    adapted = lora.apply(lambda base, batch: looped_loss(base, PARAMS, batch), base)
    trainer = new_trainer(loss_fn=adapted, microbatch_size=4)
    adapters = lora.init(jax.random.key(0), base, 2, "layers")
    state = trainer.init(jax.device_put(adapters, place(jax.P())))
    assert int(trainer.fit(state, data, **options).step) == 1

    closed_over = functools.partial(looped_loss, base)
    trainer = new_trainer(loss_fn=closed_over, microbatch_size=4)
    state = trainer.init(jax.device_put(PARAMS, place(jax.P())))
    if axis_type == AxisType.Auto:
        assert int(trainer.fit(state, data, **options).step) == 1
    else:
        with pytest.raises(ValueError, match="must be on auto axes"):
            trainer.fit(state, data, **options)


@pytest.mark.parametrize(("dtype", "num_devices"), [("bfloat16", 1), ("uint4", 4)])
def test_a_frozen_model_that_was_put_on_devices_is_compiled_once(dtype, num_devices):
    mesh = jax.make_mesh((num_devices,), ("data",), axis_types=(AxisType.Auto,))
    where = jax.NamedSharding(mesh, jax.P(None, "data"))
    where = where if num_devices > 1 else jax.devices()[0]
    base = jax.device_put(jnp.ones((8, 8), dtype), where)
    num_updates = []

    def loss(params, batch):
        return jnp.mean((batch["x"] @ (base.astype(jnp.float32) + params["w"])) ** 2)

    def update(*args):
        num_updates.append(None)
        return optax.sgd(0.1).update(*args)

    optimizer = optax.GradientTransformation(optax.sgd(0.1).init, update)
    trainer = new_trainer(loss_fn=loss, optimizer=optimizer, microbatch_size=4)
    data = {"x": np.ones((SIZE, 8), np.float32)}
    state = trainer.fit(trainer.init({"w": jnp.ones((8, 8))}), data, progress=False)
    assert int(state.step) == 7
    assert len(num_updates) == 1


def test_a_loss_may_contain_a_key():
    key = jax.random.key(1)  # as the dropout of NNX does

    def loss(params, batch):
        bits = jax.random.key_data(key).astype(jnp.float32)
        return jnp.mean((batch["x"] - params["w"]) ** 2) + jnp.sum(bits)

    data = {"x": np.ones((SIZE, 2), np.float32)}
    trainer = new_trainer(loss_fn=loss, microbatch_size=4)
    state = trainer.init({"w": jnp.ones(2)})
    assert int(trainer.fit(state, data, progress=False, stop_at=1).step) == 1


def test_arrays_of_one_device_are_copied_to_those_of_the_batch():
    """Even if the user has set the mesh, which jax would keep in the program."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    here = functools.partial(jax.device_put, device=jax.devices()[0])
    base = here(jnp.ones((3, 3)))

    def loss(params, batch):
        return jnp.mean((batch["x"] @ base @ params["w"] + params["b"]) ** 2)

    trainer = new_trainer(loss_fn=loss, microbatch_size=4)
    sharded = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P("data")))
    trainer.init({"b": sharded, "w": here(jnp.ones(3))})  # is on all of them too
    state = trainer.init({"b": jnp.zeros(()), "w": here(jnp.ones(3))})
    data = {"x": np.ones((SIZE, 3), np.float32)}
    options = {"batch_sharding": jax.NamedSharding(mesh, jax.P("data"))}
    with jax.set_mesh(mesh):
        state = trainer.fit(state, data, progress=False, stop_at=1, **options)
    assert len(state.params["w"].sharding.device_set) == 4
