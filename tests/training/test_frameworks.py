"""Parameters of other libraries are taken, and their errors explained.

Each maker imports its library, so that collecting the tests is quick.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp

os.environ.setdefault("KERAS_BACKEND", "jax")

DATA = np.ones((8, 3), np.float32)
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # as the libraries need it
        yield


def trainer_of(loss_fn, policy="float32"):
    return dpmp.DPTrainer(
        mechanism=dpmp.DPSGD(
            num_examples=8,
            expected_batch_size=4,
            iterations=1,
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
            arithmetic="float32",
        ),
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.1),
        policy=policy,
    )


def trace(params, loss_fn, policy="float32"):
    """Traces a step, in which errors and warnings come up."""
    trainer = trainer_of(loss_fn, policy)
    state = trainer.init(params)
    trainer.lower(state, DATA)
    return state.params


def nnx_split(make):
    """Parameters of a module of nnx, and the loss that merges a copy with them."""
    from flax import nnx

    graphdef, params, rest = nnx.split(make(nnx, nnx.Rngs(0)), nnx.Param, ...)
    return params, lambda p, x: jnp.mean(nnx.merge(graphdef, p, rest, copy=True)(x))


def nnx_linear():
    return nnx_split(lambda nnx, rngs: nnx.Linear(3, 1, rngs=rngs))


def nnx_module():
    from flax import nnx

    return nnx.Linear(3, 1, rngs=nnx.Rngs(0)), lambda module, x: jnp.mean(module(x))


def frozen_dict():
    import flax.core

    params = flax.core.freeze({"w": np.ones((3, 1), np.float32)})
    return params, lambda params, x: jnp.mean(x @ params["w"])


def equinox_module():
    import equinox as eqx

    model = eqx.nn.MLP(3, 1, 4, 1, key=KEY)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return params, lambda p, x: jnp.mean(jax.vmap(eqx.combine(p, static))(x))


@pytest.mark.parametrize("make", [nnx_linear, nnx_module, frozen_dict, equinox_module])
def test_params_keep_their_tree(make):
    params, loss_fn = make()
    trainer = trainer_of(loss_fn)
    after = trainer.lower(trainer.init(params), DATA).out_info[0].params
    assert jax.tree.structure(after) == jax.tree.structure(params)
    pairs = zip(*map(jax.tree.leaves, (after, params)), strict=True)
    assert all(x.shape == y.shape for x, y in pairs)


def test_a_whole_module_of_equinox_is_refused_with_the_two_calls_to_make():
    import equinox as eqx

    model = eqx.nn.MLP(3, 1, 4, 1, key=KEY)
    with pytest.raises(ValueError, match=r"\.activation.*eqx\.partition.*eqx\.combine"):
        trace(model, lambda model, x: jnp.mean(jax.vmap(model)(x)))


# Errors and warnings.


def keras_model(make, train=True):
    """Variables of a model of Keras, and a loss that drops its other values."""
    import keras

    model = keras.Sequential(make(keras.layers))
    model.build((None, 3))
    fixed = [x.value for x in model.non_trainable_variables]

    def loss_fn(params, x):
        return jnp.mean(model.stateless_call(params, fixed, x, training=train)[0])

    return model, loss_fn


def keras_model_itself():
    model, _ = keras_model(lambda layers: [layers.BatchNormalization()])
    values = [x.value for x in model.trainable_variables]
    return values, lambda p, x: jnp.mean(model(x, training=False))


def equinox_norms(train=None):
    """A BatchNorm; without `train`, it is not told how averages are taken."""
    import equinox as eqx

    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    params, static = eqx.partition(norm, eqx.is_inexact_array)
    axes = {} if train is None else {"out_axes": (0, None), "axis_name": "batch"}

    def loss_fn(params, x):
        net = eqx.nn.inference_mode(eqx.combine(params, static), train is False)
        return jnp.mean(jax.vmap(net, in_axes=(0, None), **axes)(x, state)[0])

    return params, loss_fn


def equinox_dropout():
    import equinox as eqx

    params = {"w": jnp.ones(3)}
    return params, lambda p, x: jnp.mean(eqx.nn.Dropout(0.5)(x) @ p["w"])


def haiku_dropout():
    import haiku as hk

    net = hk.transform(
        lambda x: jnp.mean(hk.dropout(hk.next_rng_key(), 0.5, hk.Linear(1)(x)))
    )
    return net.init(KEY, DATA[:1]), lambda params, x: net.apply(params, None, x)


def haiku_norms(train=None):
    import haiku as hk

    def net(x):
        return jnp.mean(hk.BatchNorm(True, True, 0.9)(x, train is not False))

    pure = hk.without_apply_rng(hk.transform_with_state(net))
    params, state = pure.init(KEY, DATA[:1])
    if train is None:
        return params, hk.without_apply_rng(hk.transform(net)).apply
    return params, lambda p, x: pure.apply(p, state, x)[0]


def nnx_dropout():
    from flax import nnx

    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    return {"w": jnp.ones(3)}, lambda p, x: jnp.mean(model(x) @ p["w"])


def linen_dropout():
    import flax.linen as nn

    model = nn.Dropout(0.5, deterministic=False)
    return {"w": jnp.ones(3)}, lambda p, x: jnp.mean(model.apply({}, x * p["w"]))


def linen_norms(train=None):
    import flax.linen as nn

    net = nn.BatchNorm(use_running_average=train is False)
    variables = net.init(KEY, DATA[:1])
    options = {} if train is None else {"mutable": ["batch_stats"]}

    def loss_fn(params, x):
        return jnp.mean(net.apply(variables | {"params": params}, x, **options)[0])

    return variables["params"], loss_fn


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (keras_model_itself, r"model\.stateless_call\(params"),
        (equinox_norms, "use GroupNorm or LayerNorm"),
        (haiku_norms, "use GroupNorm or LayerNorm"),
        (linen_norms, "use GroupNorm or LayerNorm"),
        (equinox_dropout, r"uses_prng_key=True.*net\(x, key=key\)"),
        (haiku_dropout, r"uses_prng_key=True.*net\.apply\(params, key"),
        (linen_dropout, "uses_prng_key=True"),
        (nnx_dropout, r"nnx\.merge\(\.\.\., copy=True\).*nnx\.reseed"),
    ],
)
def test_errors_are_explained_with_a_way_out(make, hint):
    params, loss_fn = make()
    with pytest.raises(Exception, match=hint) as caught:
        trace(params, loss_fn)
    assert "docs/recipes.md" in "\n".join([str(caught.value), *caught.value.__notes__])


def copied_nnx_dropout():
    return nnx_split(
        lambda nnx, rngs: nnx.Sequential(
            nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        )
    )


def keras_dropout():
    model, loss_fn = keras_model(lambda x: [x.Dense(2), x.Dropout(0.5)])
    return model.trainable_variables, loss_fn


@pytest.mark.parametrize("make", [copied_nnx_dropout, keras_dropout])
def test_a_dropout_without_a_key_is_warned_of(make):
    with pytest.warns(UserWarning, match="uses_prng_key=True"):
        trace(*make())


def nnx_norms(train):
    return nnx_split(
        lambda nnx, rngs: nnx.BatchNorm(3, use_running_average=not train, rngs=rngs)
    )


def scanned_linen_norms(train):
    import flax.linen as nn

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
    variables = net.init(KEY, DATA[:1], None)

    def loss_fn(params, x):
        given = {**variables, "params": params}
        return jnp.mean(net.apply(given, x, None, mutable=["batch_stats"])[0][0])

    return variables["params"], loss_fn


def keras_norms(train):
    model, loss_fn = keras_model(lambda x: [x.BatchNormalization()], train)
    return model.trainable_variables, loss_fn


NORMS = [
    nnx_norms,
    linen_norms,
    scanned_linen_norms,
    keras_norms,
    haiku_norms,
    equinox_norms,
]


@pytest.mark.slow
@pytest.mark.parametrize("make", NORMS)
def test_averages_of_batch_norm_that_are_dropped_are_warned_of(make):
    said = r"new values of 2 arrays .*drops them.*use GroupNorm or LayerNorm.*recipes"
    with pytest.warns(UserWarning, match=said):
        trace(*make(train=True))


@pytest.mark.parametrize("make", [nnx_norms, linen_norms, keras_norms, equinox_norms])
def test_frozen_averages_of_batch_norm_are_no_reason_to_warn(make):
    trace(*make(train=False))


@pytest.mark.parametrize("kind", ["float32", "mixed_bfloat16"])
def test_a_keras_model_must_compute_in_16_bits_under_such_a_policy(kind):
    options = {"dtype": kind} if kind == "mixed_bfloat16" else {}
    model, loss_fn = keras_model(lambda x: [x.Dense(1, **options)])

    def params_after():
        return trace(model.trainable_variables, loss_fn, policy="mixed_bfloat16")

    if kind == "float32":
        said = r"no product in bfloat16.*keras\.config\.set_dtype_policy"
        with pytest.warns(UserWarning, match=said):
            params_after()
    else:  # variables become arrays
        assert [type(x) for x in params_after()] == [type(jnp.ones(1))] * 2
