"""A state goes on under what its past steps were made with, or not at all."""

import dataclasses
import functools
import pickle

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp
from dpmp import loss_scaling
from dpmp.programs._float8 import PER_EXAMPLE
from dpmp.training import _fingerprint

RELATIONS = dp_accounting.NeighboringRelation
DATA = np.ones((64, 3), np.float32)
KEY = jax.random.key(4)
FIELDS = {
    "num_examples": 64,
    "expected_batch_size": 8,
    "iterations": 4,
    "l2_clip_norm": {"w": 1.0},
    "noise_multiplier": 1.0,
    "microbatch_size": 8,
}
POLICY = {"param_dtype": "float32", "compute_dtype": "bfloat16"}
# All trainers that state steps under here have float16, which wants a scale.
SCALE = 1024.0


def linear_loss(params, x):
    return jnp.sum(params["w"] * x)


def make_trainer(*, policy=None, loss_scale=SCALE, **fields):
    return dpmp.DPTrainer(
        mechanism=dpmp.DPSGD(**{**FIELDS, **fields}),
        loss_fn=linear_loss,
        optimizer=optax.sgd(0.1),
        policy=dpmp.Policy(**{**POLICY, **(policy or {})}),
        loss_scale=loss_scale,
    )


@functools.cache
def checkpoint():
    """A state after one step, as arrays of NumPy."""
    trainer = make_trainer()
    state = trainer.init({"w": jnp.zeros(3)}, prng_key=KEY)
    state = trainer.fit(state, DATA, stop_at=1, progress=False)
    keys = [state.noise_state.prng_key, state.model_key]
    state = state._replace(
        noise_state=state.noise_state._replace(prng_key=None), model_key=None
    )
    return pickle.dumps(jax.device_get(state)), keys


def restored():
    saved, (noise_key, model_key) = checkpoint()
    state = jax.tree.map(jnp.asarray, pickle.loads(saved))
    return state._replace(
        noise_state=state.noise_state._replace(prng_key=jnp.copy(noise_key)),
        model_key=jnp.copy(model_key),
    )


CHANGES = {
    "noise_multiplier": {"noise_multiplier": 0.5},
    "num_examples": {"num_examples": 65},
    "expected_batch_size": {"expected_batch_size": 9},
    "sampling_prob": {"sampling_prob": 0.25},
    "l2_clip_norm": {"l2_clip_norm": {"w": 2.0}},
    "truncated_batch_size": {"truncated_batch_size": 16},
    "rescale_to_unit_norm": {"rescale_to_unit_norm": True},
    "arithmetic": {"arithmetic": "float32x2"},
    "num_parameters": {"num_parameters": 100},
    "resolution": {"num_parameters": 10**9},
    "method": {"method": "book_keeping", "arithmetic": "bounded"},
    "released_metrics": {
        "released_metrics": dpmp.ReleasedMetrics(fraction_clipped=True)
    },
    "neighboring_relation": {"neighboring_relation": RELATIONS.REPLACE_ONE},
    "loss_scale": {"loss_scale": 2048.0},
    **{
        f"policy.{name}": {"policy": {name: value}}
        for name, value in {
            "compute_dtype": "float32",
            "matmul_precision": "highest",
            "float32_paths": ("w",),
        }.items()
    },
    "policy.param_dtype": {
        "policy": {"param_dtype": "bfloat16", "stochastic_rounding": True}
    },
    "policy.stochastic_rounding": {
        "policy": {"param_dtype": "bfloat16", "stochastic_rounding": True}
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_of_another_run_is_refused_by_name(name):
    trainer = make_trainer(**CHANGES[name])
    message = rf"made with another (.* and )?{name}\b.*got .*{name}=.*trainer\.init"
    with pytest.raises(ValueError, match=message):
        trainer.fit(restored(), DATA, progress=False)
    size = trainer.mechanism.padded_batch_size
    with pytest.raises(ValueError, match=message):
        trainer.train_step(restored(), np.zeros((size, 3)), np.zeros(size, bool))


@pytest.mark.parametrize(
    "fields",
    [
        {"delta": 1e-5},
        {"iterations": 9},
        {"microbatch_size": 4, "truncated_batch_size": "as it was"},
        {"expected_batch_size": np.float32(8), "l2_clip_norm": {"w": np.float16(1)}},
        {"loss_scale": np.float32(1024)},
    ],
    ids=["delta", "iterations", "microbatch_size", "numpy", "numpy-scale"],
)
def test_what_past_steps_do_not_depend_on_may_change(fields):
    size = make_trainer().mechanism.sampling.truncated_batch_size
    if "truncated_batch_size" in fields:
        fields = fields | {"truncated_batch_size": size}
    state = make_trainer(**fields).fit(restored(), DATA, stop_at=2, progress=False)
    assert state.step == 2


def test_a_refused_state_is_as_it_was():
    state = restored()
    with pytest.raises(ValueError, match="another noise_multiplier"):
        make_trainer(noise_multiplier=2.0).fit(state, DATA, progress=False)
    assert not state.params["w"].is_deleted()


@pytest.mark.parametrize("given", [None, np.zeros((3, 2), np.uint32)])
def test_a_state_without_this_fingerprint_is_refused(given):
    state = restored()._replace(fingerprint=given)
    with pytest.raises(ValueError, match=r"must carry the fingerprint.*trainer\.init"):
        make_trainer().fit(state, DATA, progress=False)


def facts(mechanism=None, policy=None, loss_scale=None):
    return _fingerprint.facts_of(
        mechanism or dpmp.DPSGD(**FIELDS), policy or dpmp.Policy(**POLICY), loss_scale
    )


def test_every_field_counts_but_those_that_may_change():
    names = {field.name for field in dataclasses.fields(dpmp.DPSGD)}
    names -= {"delta", "iterations", "microbatch_size"}
    names |= {f"policy.{field.name}" for field in dataclasses.fields(dpmp.Policy)}
    assert facts().keys() == names | {"resolution", "loss_scale"}


def test_trees_of_clip_norms_differ_by_path_and_value():
    norms = [1.0, {"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 1.0}, {"a": 1.0, "c": 2.0}]
    found = {
        facts(dpmp.DPSGD(**FIELDS | {"l2_clip_norm": x}))["l2_clip_norm"] for x in norms
    }
    assert len(found) == len(norms)


def with_default(loss, scale=2.0):
    return jnp.float32(scale)


def by_name(loss, *, scale):
    return jnp.float32(scale)


def closing_over(scale):
    return lambda loss: jnp.float32(scale)


SCALES = [
    lambda: None,
    lambda: 1024.0,
    lambda: loss_scaling.by_loss(),
    lambda: loss_scaling.by_loss(512.0),
    lambda: loss_scaling.by_loss(largest=512.0),
    lambda: loss_scaling.DynamicScale(),
    lambda: loss_scaling.DynamicScale(growth_interval=7),
    lambda: with_default,
    lambda: functools.partial(by_name, scale=2.0),
    lambda: functools.partial(by_name, scale=4.0),
    lambda: closing_over(2.0),
    lambda: closing_over(4.0),
]


def test_loss_scales_are_told_by_name_and_numbers():
    first, second = (
        [facts(loss_scale=make())["loss_scale"] for make in SCALES] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == len(first)


def test_float8_scales_count():
    scales = (None, PER_EXAMPLE, 1.0, 2.0)
    found = {
        facts(policy=dpmp.Policy(**POLICY, float8_scale=x))["policy.float8_scale"]
        for x in scales
    }
    assert len(found) == len(scales)


def test_a_fingerprint_is_the_same_in_every_process():
    # The first eight bytes of blake2b by hashlib, and the known answer of Threefry-4x32
    # for a key and a counter of zeros; others would orphan all states.
    first = np.array([1397539808, 3717695998]) ^ np.array([0x9C6CA96A, 0xE17EAE66])
    for key in (np.zeros(4, np.uint32), jnp.zeros(4, jnp.uint32)):
        rows = _fingerprint.fingerprint({"a": "1.0", "b": "None"}, key)
        assert rows.dtype == np.uint32
        assert rows.tolist() == [first.tolist(), [3430510269, 3592239926]]


def test_without_the_key_a_fingerprint_says_nothing_about_the_facts():
    # A right guess of the facts is told from a wrong one only with the sampling key.
    trainer = make_trainer()
    first, second = (
        trainer.init({"w": jnp.zeros(3)}, prng_key=jax.random.key(i)) for i in (1, 2)
    )
    assert np.all(first.fingerprint != second.fingerprint)
    assert len(set(np.ravel(first.fingerprint).tolist())) == first.fingerprint.size
    with pytest.raises(ValueError, match=r"made with another .*num_examples"):
        trainer.fit(first._replace(sampling_key=second.sampling_key), DATA)
