"""Adapters of a quantised base model, which stays packed in memory (QLoRA)."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lora.subjects import trained
from reference import assert_trees_close
from small_runs import fit, new_trainer

from dpmp import lora

with warnings.catch_warnings(action="ignore"):  # of what qwix imports
    import qwix

LAYERS, WIDTH, VOCABULARY = 2, 32, 40
KEY = jax.random.key(0)


def new_params(dtype, num_layers=LAYERS, width=WIDTH):
    def normal(*shape):
        return jax.random.normal(KEY, shape, dtype) / shape[-2] ** 0.5

    return {
        "embed": normal(VOCABULARY, width),
        "layers": {
            "up": normal(num_layers, width, 2 * width),
            "down": normal(num_layers, 2 * width, width),
        },
        "head": {"kernel": normal(width, VOCABULARY), "bias": jnp.zeros(VOCABULARY)},
    }


def quantised(params, kind):
    """The same parameters with packed matrices, in blocks of 32 inputs."""

    def packed(x):
        if x.ndim == 1:
            return x
        stack = range(x.ndim - 2)
        tiles = {} if kind == "int8" else {x.ndim - 2: 32}
        axes = [*stack, x.ndim - 1]
        if x.shape[0] == VOCABULARY:  # a row for each token
            axes, tiles = [0], {}
        return qwix.quantize(x, kind, channelwise_axes=axes, tiled_axes=tiles)

    return jax.jit(lambda params: jax.tree.map(packed, params))(params)


@functools.cache
def in_8_bits():
    """Parameters with packed matrices."""
    return quantised(new_params(jnp.float32), "int8")


def loss_fn(params, tokens):
    x = params["embed"][tokens]

    def layer(x, p):
        return x + jax.nn.relu(x @ p["up"]) @ p["down"], None

    x = jax.lax.scan(layer, x, params["layers"])[0]
    logits = x @ params["head"]["kernel"] + params["head"]["bias"]
    losses = optax.losses.softmax_cross_entropy_with_integer_labels
    return jnp.mean(losses(logits[..., :-1, :].astype(jnp.float32), tokens[..., 1:]))


TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (16, 12)).astype(np.int32)


def test_the_adapted_function_is_that_of_the_merged_model():
    params = in_8_bits()
    adapters = trained(lora.init(KEY, params, 2, "layers|head/kernel"))
    assert {*adapters.factors} == {"layers/up", "layers/down", "head/kernel"}
    merged = lora.merge(params, adapters)
    assert {x.dtype.name for x in jax.tree.leaves(merged)} == {"float32"}
    adapted = lora.apply(loss_fn, params)
    funs = (
        lambda x: adapted(x, TOKENS),
        lambda x: loss_fn(lora.merge(params, x), TOKENS),
    )
    given, expected = jax.jit(lambda x: [jax.value_and_grad(f)(x) for f in funs])(
        adapters
    )
    assert_trees_close(given, expected, rtol=2e-5)


@pytest.mark.slow
def test_merging_in_float32_adds_the_whole_change():
    packed = quantised(new_params(jnp.bfloat16), "int8")
    adapters = trained(lora.init(KEY, packed, 2, "layers"))
    unchanged = jax.tree.map(jnp.zeros_like, adapters)
    base = lora.merge(packed, unchanged)["layers"]["up"]
    merged = lora.merge(packed, adapters, dtype=jnp.float32)
    assert {x.dtype.name for x in jax.tree.leaves(merged)} == {"float32"}
    a, b = adapters.factors["layers/up"]
    change = merged["layers"]["up"] - base.astype(jnp.float32)
    np.testing.assert_allclose(change, adapters.scale * (a @ b), atol=1e-6)
    with pytest.raises(ValueError, match="dtype must be None or a floating type"):
        lora.merge(packed, adapters, dtype=jnp.int32)


def trainer_of(params, **fields):
    sizes = {"num_examples": len(TOKENS), "expected_batch_size": 8, "iterations": 2}
    return new_trainer(
        loss_fn=lora.apply(loss_fn, params),
        prng_key=KEY,
        truncated_batch_size=8,
        **sizes | fields,
    )


@pytest.mark.slow
def test_steps_are_those_of_the_dequantised_model():
    """The trainer unpacks matrices again in the backward pass."""
    packed = quantised(new_params(jnp.float32), "nf4")
    adapters = trained(lora.init(KEY, packed, 2, "layers"))
    dense = lora.merge(packed, jax.tree.map(jnp.zeros_like, adapters))
    results = []
    for params in (packed, dense):
        trainer = trainer_of(params, method="book_keeping")
        state = trainer.init(adapters.for_base(params))
        state = fit(trainer, state=state, data=TOKENS)
        results.append(state.params.factors)
    assert_trees_close(*results, rtol=1e-5)


@pytest.mark.slow
def test_the_base_model_stays_packed_in_memory():
    params = new_params(jnp.float32, num_layers=8, width=256)
    tokens = jax.ShapeDtypeStruct((8, 4), jnp.int32)
    base_bytes, all_bytes = {}, {}
    for name, base in {"dense": params, "nf4": quantised(params, "nf4")}.items():
        trainer = trainer_of(base)
        state = jax.eval_shape(trainer.init, lora.init(KEY, base, 1, "layers"))
        memory = trainer.lower(state, tokens).compile().memory_analysis()
        base_bytes[name] = memory.argument_size_in_bytes
        all_bytes[name] = base_bytes[name] + memory.temp_size_in_bytes
    assert base_bytes["nf4"] < 0.2 * base_bytes["dense"]
    # Unpacked for the whole backward pass, the base would take more than when dense.
    assert all_bytes["nf4"] < 0.6 * all_bytes["dense"], all_bytes


@jax.tree_util.register_pytree_node_class
class Halves:
    """A quantised array of another library: integers, which are halves."""

    def __init__(self, integers):
        self.integers = integers

    shape = property(lambda self: self.integers.shape)
    dtype = np.dtype("float32")

    def dequantize(self):
        return self.integers.astype(jnp.float32) / 2

    def tree_flatten(self):
        return [self.integers], None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_any_node_that_dequantises_is_an_array():
    params = new_params(jnp.float32)
    params["layers"] = jax.tree.map(
        lambda x: Halves(jnp.round(8 * x).astype(jnp.int8)), params["layers"]
    )
    adapters = trained(lora.init(KEY, params, 2, "layers"))
    given, merged = jax.jit(
        lambda x: (
            lora.apply(loss_fn, params)(x, TOKENS),
            loss_fn(lora.merge(params, x), TOKENS),
        )
    )(adapters)
    np.testing.assert_allclose(given, merged, rtol=1e-5)


def test_layers_that_share_scales_are_refused():
    params = new_params(jnp.float32)
    packed = jax.tree.map(lambda x: qwix.quantize(x, "int8"), params["layers"])
    params["layers"] = packed
    adapters = lora.init(KEY, params, 2, "layers")
    with pytest.raises(ValueError, match=r"must not share the scales.*channelwise"):
        lora.apply(loss_fn, params)(adapters, TOKENS)


def test_names_and_files_are_those_of_the_dense_model(tmp_path):
    packed = in_8_bits()
    initial = lora.init(KEY, packed, 2, ["layers/up"])
    adapters = trained(initial)
    lora.save(tmp_path, adapters, packed, initial=initial)
    loaded = lora.load(tmp_path, packed)
    for x, y in zip(*map(jax.tree.leaves, (loaded, adapters)), strict=True):
        np.testing.assert_array_equal(x, y)
    trainable, frozen = lora.partition(packed, "bias")
    assert len(jax.tree.leaves(trainable)) == 1
    together = lora.combine(trainable, frozen)
    assert jax.tree.structure(together) == jax.tree.structure(packed)
    other = quantised(jax.tree.map(lambda x: 2 * x, new_params(jnp.float32)), "int8")
    with pytest.raises(ValueError, match="made for"):
        lora.load(tmp_path, other)
    with pytest.raises(ValueError, match="trained_on='quantised float32'"):
        lora.load(tmp_path, new_params(jnp.float32))
