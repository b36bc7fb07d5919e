"""A state has the types of those that follow it: a run is one program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from small_runs import new_trainer

import dpmp
from dpmp._meshes import colocated, strongly_typed

KEY = jax.random.key(0)
METRICS = dpmp.ReleasedMetrics(
    largest_loss=1.0, fraction_clipped=True, fraction_overflowed=True
)

# A counter that is weakly typed at first, as optimizers have.
WEAK = optax.GradientTransformation(
    lambda params: jnp.asarray(0.0), lambda u, s, p: (u, s + jnp.float32(1))
)
OPTIMIZER = optax.chain(
    WEAK,
    optax.GradientTransformation(lambda _: 1.5, lambda u, s, _: (u, s)),
    optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.cosine_decay_schedule(0.1, 10)
    ),
    optax.adam(0.1, mu_dtype=jnp.bfloat16),
)
CASES = {
    "options": {
        "released_metrics": METRICS,
        "loss_scale": dpmp.loss_scaling.DynamicScale(),
        "optimizer": OPTIMIZER,
        "method": "book_keeping",
        "microbatch_size": 4,
    },
    "bfloat16": {"policy": ("bfloat16", "bfloat16")},
    "x64": {"optimizer": OPTIMIZER, "arithmetic": "float64"},
    "float64-params": {"policy": ("float64", "float32"), "released_metrics": METRICS},
}


def make_trainer(*, policy=("float32", "float32"), **fields):
    return new_trainer(
        expected_batch_size=8,
        iterations=3,
        loss_fn=lambda w, x: jnp.mean((x @ w) ** 2),
        policy=dpmp.Policy(*policy, stochastic_rounding=policy[0] == "bfloat16"),
        **fields,
    )


def types_of(tree):
    """By path: shape, dtype, and whether it gives way to other dtypes."""

    def type_of(x):
        aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
        return aval.shape, str(aval.dtype), bool(getattr(aval, "weak_type", False))

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): type_of(x) for path, x in leaves}


@pytest.mark.parametrize("name", CASES)
def test_a_step_returns_the_types_that_init_gives(name):
    has_x64 = name in ("x64", "float64-params")
    with jax.enable_x64(has_x64), jax.numpy_dtype_promotion("standard"):
        trainer = make_trainer(**CASES[name])
        state = trainer.init(np.ones(4, np.float32))
        size = trainer.mechanism.padded_batch_size
        batch = np.zeros((size, 4), np.float32)
        after = trainer.lower(state, batch).out_info[0]
        before = types_of(state._replace(spent=None))
        assert types_of(after) == before
        assert not any(is_weak for _, _, is_weak in before.values())


def test_metrics_are_released_in_64_bit_mode():
    with jax.enable_x64(True):
        trainer = make_trainer(released_metrics=METRICS, arithmetic="float64")
        state = trainer.init(np.ones(4, np.float32))
        data = np.ones((64, 4), np.float32)
        state = trainer.fit(state, data, progress=False, stop_at=1)
        for value in state.metrics.values():
            assert value.dtype == jnp.float32
            assert np.isfinite(value)


NUM_COMPILED = [0]


def count(event, duration, **_):
    del duration
    NUM_COMPILED[0] += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(count)


def mesh_of(num_devices):
    devices = jax.devices()[:num_devices]
    return jax.make_mesh(
        (num_devices,), ("x",), axis_types=(AxisType.Auto,), devices=devices
    )


def test_a_run_on_sharded_batches_is_compiled_once():
    trainer = make_trainer(truncated_batch_size=8)
    sharding = NamedSharding(mesh_of(2), PartitionSpec("x"))
    state = trainer.init(np.ones(4, np.float32))
    counts = []
    for _ in range(3):
        batch = jax.device_put(np.ones((8, 4), np.float32), sharding)
        state = trainer.train_step(state, batch, np.zeros(8, bool))
        counts.append(NUM_COMPILED[0])
    assert counts[0] == counts[1] == counts[2]


def test_a_run_can_be_moved_to_other_devices():
    trainer = make_trainer()
    state = trainer.init(np.ones(4, np.float32))
    for step, device in enumerate(jax.devices()[1:3], 1):
        state = jax.device_put(state, device)
        data = np.ones((64, 4), np.float32)
        state = trainer.fit(state, data, stop_at=step, progress=False)
        assert state.params.devices() == {device}


def test_arrays_that_have_no_place_follow_those_that_do():
    mesh = mesh_of(2)
    placed = jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec("x")))
    free, key = jnp.ones(3), jax.random.key(0)
    moved = colocated({"placed": placed, "free": free, "key": key})
    assert moved["placed"] is placed
    for name in ("free", "key"):
        assert moved[name].sharding == NamedSharding(mesh, PartitionSpec())
    (moved,) = colocated([free], placed)
    assert moved.sharding == NamedSharding(mesh, PartitionSpec())
    assert colocated([free])[0] is free


def test_weak_types_become_strong():
    tree = strongly_typed({"weak": jnp.asarray(1.0), "number": 2, "key": KEY})
    assert not any(is_weak for _, _, is_weak in types_of(tree).values())
    assert tree["key"] is KEY
