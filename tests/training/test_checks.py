"""What a trainer refuses, it refuses by name, and without showing a value."""

import functools
import traceback

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpmp

SIZE = 16
SECRET = 12345.678
DATA = {"x": np.full((SIZE, 3), SECRET, np.float32), "y": np.ones(SIZE, np.float32)}
MECHANISM = dpmp.DPSGD(
    num_examples=SIZE,
    expected_batch_size=4,
    iterations=1,
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
)


def loss_fn(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def with_key(w, batch, key):
    return loss_fn(w, batch)


def make(**fields):
    options = {"optimizer": optax.sgd(0.1), "policy": "float32", "loss_fn": loss_fn}
    return dpmp.DPTrainer(**{"mechanism": MECHANISM, **options, **fields})


def fit(data=DATA, params=None, **fields):
    trainer = make(**fields)
    state = trainer.init(jnp.zeros(3) if params is None else params)
    return trainer.fit(state, data, progress=False)


def test_losses_whose_arguments_are_unknown_are_taken():
    make(loss_fn=functools.partial(loss_fn))
    make(loss_fn=lambda *args: loss_fn(*args), uses_prng_key=True)
    make(loss_fn=jax.jit(loss_fn))


def test_a_policy_may_be_the_name_of_a_preset():
    assert make(policy="mixed_bfloat16").policy == dpmp.Policy.from_name(
        "mixed_bfloat16"
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "params must be a tree with float arrays"),
        (
            {"w": jnp.zeros(3), "n": jnp.zeros(3, int)},
            r"leaf=\"\['n'\]\", type='int32'",
        ),
        ({"w": jnp.zeros(3), "act": jax.nn.relu}, r"\['act'\].*eqx.partition"),
        ({"w": "name"}, r"leaf=\"\['w'\]\", type='str'"),
        ({"w": np.array([1.0, None], object)}, r"type='object'"),
        ({"w": jnp.zeros(3, complex)}, r"'complex64'.*two arrays.*jax\.lax\.complex"),
    ],
)
def test_params_without_float_arrays_are_refused_by_path(params, message):
    with pytest.raises(ValueError, match=message):
        make().init(params)


class Variable:
    """As those of Keras: no array, but with one as its value."""

    def __init__(self, value):
        self.value = value


def test_variables_become_their_values():
    state = fit(params=Variable(jnp.zeros(3)))
    assert isinstance(state.params, jax.Array)


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (lambda w, b: (loss_fn(w, b), 1.0), "tuple"),
        (lambda w, b: None, "NoneType"),
        (lambda w, b: b["x"] @ w, r"an array of shape \(1,\)"),
    ],
)
def test_a_loss_must_be_a_scalar(loss, given):
    with pytest.raises(ValueError, match=f"the loss of one example.*got loss='{given}"):
        fit(loss_fn=loss)


def test_debug_flags_do_not_stop_a_run():
    """Metrics are NaN before the first step."""
    with jax.debug_nans(True), jax.debug_infs(True):
        state = fit()
    assert np.isfinite(state.metrics["overflowed"])


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
def test_a_mask_that_is_not_of_bool_is_refused(dtype):
    trainer = make()
    message = "is_padding_example must be an array of bool; got dtype="
    with pytest.raises(ValueError, match=message):
        trainer.train_step(trainer.init(jnp.zeros(3)), DATA, np.zeros(SIZE, dtype))


def test_errors_in_the_loss_say_what_it_was_given():
    with pytest.raises(KeyError, match=r"batch\['x'\]: float32\[1, 3\]"):
        fit(data={"x": DATA["x"]})
    with pytest.raises(TypeError, match="Parameters and float inputs are bfloat16"):
        fit(params=jnp.zeros(4), policy="mixed_bfloat16")


def test_dtypes_that_clash_under_a_policy_are_explained():
    def recurrent(w, batch):
        def step(carry, x):
            return carry + x * w, None

        return jnp.sum(jax.lax.scan(step, jnp.zeros(3), batch["x"])[0])

    with pytest.raises(ValueError, match=r"are bfloat16.*dpmp\.autocast\(loss_fn\)"):
        fit(loss_fn=recurrent, policy="mixed_bfloat16")


def test_the_default_of_an_argument_is_not_shown():
    def loss(w, batch, more, data=SECRET):
        return loss_fn(w, batch)

    with pytest.raises(ValueError, match=r"got loss_fn='\(w, batch, more, data\)'"):
        make(loss_fn=loss)


class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros(()))


class BatchNormNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(x)


class DropoutNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(x)


def nnx_loss(counter, w, batch):
    counter.count[...] = counter.count[...] + 1
    return loss_fn(w, batch)


def linen_loss(model, variables, w, batch):
    return jnp.mean(model.apply(variables, batch["x"] * w))


@pytest.mark.parametrize(
    ("loss", "hint"),
    [
        (functools.partial(nnx_loss, Counter()), r"nnx\.merge\(..., copy=True\)"),
        (
            functools.partial(
                linen_loss,
                BatchNormNet(),
                {
                    "batch_stats": {
                        "BatchNorm_0": {"mean": np.ones(3), "var": np.ones(3)}
                    }
                }
                | {
                    "params": {"BatchNorm_0": {"scale": np.ones(3), "bias": np.ones(3)}}
                },
            ),
            "use GroupNorm or LayerNorm",
        ),
        (functools.partial(linen_loss, DropoutNet(), {}), "uses_prng_key=True"),
    ],
    ids=["nnx", "batch-norm", "dropout"],
)
def test_models_that_need_more_are_told_what_to_do(loss, hint):
    with pytest.raises(flax.errors.FlaxError, match=hint):
        fit(loss_fn=loss)


def test_an_error_in_the_loss_shows_no_example():
    with pytest.raises(KeyError) as caught:
        fit(data={"x": DATA["x"]})
    assert "12345" not in "".join(traceback.format_exception_only(caught.value))
