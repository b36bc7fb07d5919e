"""Parameters of other libraries are taken, and their errors explained."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import equinox as eqx
import flax.core
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx

import dpmp

DATA = np.ones((8, 3), np.float32)
MECHANISM = dpmp.DPSGD(
    num_examples=8,
    expected_batch_size=4,
    iterations=1,
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
)


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # as the libraries need it
        yield


def fit(params, loss_fn, policy="float32"):
    trainer = dpmp.DPTrainer(
        mechanism=MECHANISM,
        loss_fn=loss_fn,
        optimizer=optax.adam(0.1),
        policy=policy,
    )
    return trainer.fit(trainer.init(params), DATA, progress=False).params


def nnx_state():
    graphdef, params = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Param)
    return params, lambda params, x: jnp.mean(nnx.merge(graphdef, params)(x))


def frozen_dict():
    params = flax.core.freeze({"w": jnp.ones((3, 1))})
    return params, lambda params, x: jnp.mean(x @ params["w"])


def equinox_module():
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return params, lambda p, x: jnp.mean(jax.vmap(eqx.combine(p, static))(x))


@pytest.mark.parametrize("make", [nnx_state, frozen_dict, equinox_module])
def test_params_keep_their_tree(make):
    params, loss_fn = make()
    before = jax.tree.map(np.array, params)
    after = fit(params, loss_fn)
    assert jax.tree.structure(after) == jax.tree.structure(params)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.any(x != y)


def test_variables_of_keras_become_arrays():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.build((None, 3))
    after = fit(
        model.trainable_variables,
        lambda p, x: jnp.mean(model.stateless_call(p, [], x, training=True)[0]),
    )
    assert [type(x) for x in after] == [type(jnp.ones(1))] * 2


def test_a_whole_module_of_equinox_is_refused_with_the_two_calls_to_make():
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"\.activation.*eqx\.partition.*eqx\.combine"):
        fit(model, lambda model, x: jnp.mean(jax.vmap(model)(x)))


def keras_model_itself():
    model = keras.Sequential([keras.layers.BatchNormalization()])
    model.build((None, 3))
    values = [x.value for x in model.trainable_variables]
    return values, lambda p, x: jnp.mean(model(x, training=False))


def equinox_batch_norm():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    params, static = eqx.partition(norm, eqx.is_inexact_array)

    def loss_fn(params, x):
        net = jax.vmap(eqx.combine(params, static), in_axes=(0, None))
        return jnp.mean(net(x, state)[0])

    return params, loss_fn


def equinox_dropout():
    params = {"w": jnp.ones(3)}
    return params, lambda p, x: jnp.mean(eqx.nn.Dropout(0.5)(x) @ p["w"])


def haiku_dropout():
    net = hk.transform(
        lambda x: jnp.mean(hk.dropout(hk.next_rng_key(), 0.5, hk.Linear(1)(x)))
    )
    params = net.init(jax.random.key(0), DATA[:1])
    return params, lambda params, x: net.apply(params, None, x)


def haiku_batch_norm():
    def net(x):
        return jnp.mean(hk.BatchNorm(True, True, 0.9)(x, is_training=True))

    params, _ = hk.transform_with_state(net).init(jax.random.key(0), DATA[:1])
    apply = hk.without_apply_rng(hk.transform(net)).apply
    return params, apply


def nnx_dropout():
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def loss_fn(p, x):
        return jnp.mean(model(x) @ p["w"])

    return {"w": jnp.ones(3)}, loss_fn


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (keras_model_itself, r"model\.stateless_call\(params"),
        (equinox_batch_norm, "use GroupNorm or LayerNorm"),
        (haiku_batch_norm, "use GroupNorm or LayerNorm"),
        (equinox_dropout, r"uses_prng_key=True.*net\(x, key=key\)"),
        (haiku_dropout, r"uses_prng_key=True.*net\.apply\(params, key"),
        (nnx_dropout, r"nnx\.merge\(\.\.\., copy=True\).*nnx\.reseed"),
    ],
)
def test_errors_are_explained_with_a_way_out(make, hint):
    params, loss_fn = make()
    with pytest.raises(Exception, match=hint) as caught:
        fit(params, loss_fn)
    assert "docs/recipes.md" in "\n".join([str(caught.value), *caught.value.__notes__])


def test_a_copied_dropout_of_nnx_without_a_key_is_warned_of():
    model = nnx.Sequential(
        nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    )
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    with pytest.warns(UserWarning, match="uses_prng_key=True"):
        fit(params, lambda p, x: jnp.mean(nnx.merge(graphdef, p, rest, copy=True)(x)))


def test_a_keras_dropout_without_a_key_is_warned_of():
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    model.build((None, 3))
    fixed = [x.value for x in model.non_trainable_variables]
    with pytest.warns(UserWarning, match="uses_prng_key=True"):
        fit(
            model.trainable_variables,
            lambda p, x: jnp.mean(model.stateless_call(p, fixed, x, training=True)[0]),
        )


def nnx_norms(train):
    model = nnx.BatchNorm(3, use_running_average=not train, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return params, lambda p, x: jnp.mean(nnx.merge(graphdef, p, rest, copy=True)(x))


def linen_norms(train):
    net = nn.BatchNorm(use_running_average=not train)
    variables = net.init(jax.random.key(0), DATA[:1])

    def loss_fn(params, x):
        given = {**variables, "params": params}
        return jnp.mean(net.apply(given, x, mutable=["batch_stats"])[0])

    return variables["params"], loss_fn


def scanned_linen_norms(train):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x)), None

    net = nn.scan(
        Block,
        variable_axes={"params": 0, "batch_stats": 0},
        split_rngs={"params": True},
        length=2,
    )()
    variables = net.init(jax.random.key(0), DATA[:1], None)

    def loss_fn(params, x):
        given = {**variables, "params": params}
        return jnp.mean(net.apply(given, x, None, mutable=["batch_stats"])[0][0])

    return variables["params"], loss_fn


def keras_norms(train):
    model = keras.Sequential([keras.layers.BatchNormalization()])
    model.build((None, 3))
    fixed = [x.value for x in model.non_trainable_variables]
    return model.trainable_variables, lambda p, x: jnp.mean(
        model.stateless_call(p, fixed, x, training=train)[0]
    )


def haiku_norms(train):
    net = hk.without_apply_rng(
        hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(x, train))
    )
    params, state = net.init(jax.random.key(0), DATA[:1])
    return params, lambda p, x: jnp.mean(net.apply(p, state, x)[0])


def equinox_norms(train):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    params, static = eqx.partition(norm, eqx.is_inexact_array)

    def loss_fn(params, x):
        net = eqx.nn.inference_mode(eqx.combine(params, static), not train)
        apply = jax.vmap(net, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        return jnp.mean(apply(x, state)[0])

    return params, loss_fn


NORMS = [
    nnx_norms,
    linen_norms,
    scanned_linen_norms,
    keras_norms,
    haiku_norms,
    equinox_norms,
]


@pytest.mark.parametrize("make", NORMS)
def test_averages_of_batch_norm_that_are_dropped_are_warned_of(make):
    said = r"new values of 2 arrays .*drops them.*use GroupNorm or LayerNorm.*recipes"
    with pytest.warns(UserWarning, match=said):
        fit(*make(train=True))


@pytest.mark.parametrize("make", [x for x in NORMS if x is not haiku_norms])
def test_frozen_averages_of_batch_norm_are_no_reason_to_warn(make):
    fit(*make(train=False))


def keras_dense(**options):
    model = keras.Sequential([keras.layers.Dense(1, **options)])
    model.build((None, 3))
    return model.trainable_variables, lambda p, x: jnp.mean(
        model.stateless_call(p, [], x, training=True)[0]
    )


def test_a_keras_model_that_computes_in_float32_under_another_policy_is_warned_of():
    said = r"no product in bfloat16.*keras\.config\.set_dtype_policy"
    with pytest.warns(UserWarning, match=said):
        fit(*keras_dense(), policy="mixed_bfloat16")


@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_keras_model_that_computes_in_16_bits_is_welcome(is_autocast):
    params, loss_fn = keras_dense(**{} if is_autocast else {"dtype": "mixed_bfloat16"})
    loss_fn = dpmp.autocast(loss_fn) if is_autocast else loss_fn
    fit(params, loss_fn, policy="mixed_bfloat16")
