"""Mistakes in a loss that no exception tells are found in its program."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import dpmp
from dpmp.programs.frozen import hoist_constants
from dpmp.programs.losses import calls_host, check_program


def check(loss_fn, *, policy="float32", uses_prng_key=False, float32_paths=()):
    """Checks the program of a loss as `DPTrainer` does."""
    chosen = dpmp.Policy.from_name(policy, float32_paths=float32_paths)
    dtype = chosen.compute_dtype
    arrays = chosen.cast_to_compute({"w": jnp.ones(3)}), jnp.ones((1, 3), dtype)
    key = (jax.random.key(0),) if uses_prng_key else ()
    checked = functools.partial(
        check_program,
        params=["['w']"],
        num_columns=1,
        takes_key=uses_prng_key,
        compute_dtype=dtype,
        float32_paths=float32_paths,
    )
    hoist_constants(loss_fn, *arrays, *key, check=checked)


def drop(w, x, key):
    return jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0) @ w)


def drops_in_a_loop(params, x):
    def body(total, row):
        return total + drop(params["w"], row, jax.random.key(0)), None

    return jax.lax.scan(body, jnp.zeros(()), x)[0]


def computes_in_float32(params, x):
    return jnp.sum(x.astype(jnp.float32) @ params["w"].astype(jnp.float32))


def has_a_product_of_each_kind(params, x):
    narrow = jnp.sum(x @ params["w"]).astype(jnp.float32)
    return narrow + jnp.sum(x.astype(jnp.float32) @ WIDE)


STATE, WIDE = jnp.ones(3), np.ones(3, np.float32)
UNREAD = r"must compute with the params.*stateless_ca"
UNREAD_BATCH = r"must compute with the batch.*would not be protected"
SAME_KEY = "the same for every example at every step"
DROPPED = r"new values of 1 arrays .* of the shapes \(3,\), and drops them"
NARROW = "computes no product in b?float16, though"

# The loss, the policy, and the words of the complaint, if there is one.
LOSSES = {
    "other params": (lambda p, x: jnp.mean(x @ STATE), "float32", UNREAD),
    "no data": (lambda p, x: jnp.sum(p["w"]), "float32", UNREAD_BATCH),
    "other data": (lambda p, x: jnp.sum(p["w"] @ STATE), "float32", UNREAD_BATCH),
    "a key of its own": (
        lambda p, x: drop(p["w"], x, jax.random.key(0)),
        "float32",
        SAME_KEY,
    ),
    "a key in a loop": (drops_in_a_loop, "float32", SAME_KEY),
    "the key of the example": (lambda p, x, key: drop(p["w"], x, key), "float32", None),
    "integers in floats": (
        lambda p, x: jnp.sum(x @ p["w"]) + p["w"][x.astype(int)[0, 0]],
        "mixed_bfloat16",
        "casts a column of floats to integers.*above 256 do not exist",
    ),
    "integers in wide floats": (
        lambda p, x: jnp.sum(x @ p["w"]) + p["w"][x.astype(int)[0, 0]],
        "float32",
        None,
    ),
    "dropped state": (
        lambda p, x: (0.9 * STATE + x[0], jnp.sum(x @ p["w"]))[1],
        "float32",
        DROPPED,
    ),
    "dropped in jit": (
        lambda p, x: (jax.jit(jnp.add)(STATE, x[0]), jnp.sum(x @ p["w"]))[1],
        "float32",
        DROPPED,
    ),
    "state of no example": (
        lambda p, x: (STATE + 1, jnp.sum(x @ p["w"]))[1],
        "float32",
        None,
    ),
    "dropped array of another shape": (
        lambda p, x: (x * STATE, jnp.sum(x @ p["w"]))[1],
        "float32",
        None,
    ),
    "wide in bfloat16": (computes_in_float32, "mixed_bfloat16", NARROW),
    "wide in float16": (computes_in_float32, "mixed_float16", NARROW),
    "one of two is narrow": (has_a_product_of_each_kind, "mixed_bfloat16", None),
    "no product": (
        lambda p, x: jnp.sum((x * p["w"]).astype(jnp.float32)),
        "mixed_bfloat16",
        None,
    ),
    "summed in float32": (
        lambda p, x: jnp.sum(
            jnp.einsum("bi,i", x, p["w"], preferred_element_type=jnp.float32)
        ),
        "mixed_bfloat16",
        None,
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_mistakes_that_cause_no_error_are_found_and_nothing_else_is(name):
    loss_fn, policy, said = LOSSES[name]
    expected = contextlib.nullcontext()  # warnings raise
    if said in (UNREAD, UNREAD_BATCH):
        expected = pytest.raises(ValueError, match=said)
    elif said is not None:
        expected = pytest.warns(UserWarning, match=said)
    with expected:
        check(loss_fn, policy=policy, uses_prng_key=name == "the key of the example")


def test_a_parameter_in_float32_that_the_loss_rounds_is_told():
    def kept(params, x):
        return jnp.sum(x.astype(jnp.float32) @ params["w"]) + jnp.float32(x @ x.T)[0, 0]

    def rounded(params, x):
        return jnp.sum(x @ params["w"].astype(x.dtype))

    options = {"policy": "mixed_bfloat16", "float32_paths": ("w",)}
    check(kept, **options)
    with pytest.warns(UserWarning, match=r"float32_paths keeps in float32: \['w'\]"):
        check(rounded, **options)


SHAPE = jax.ShapeDtypeStruct((), jnp.float32)


def calling(x):
    return jax.pure_callback(lambda y: y, SHAPE, x)


def in_a_rule(x):
    function = jax.custom_jvp(calling)
    function.defjvp(lambda x, t: (calling(*x), *t))
    return function(x)


CALLS = {
    "print": lambda x: (jax.debug.print("{}", x), x)[1],
    "debug": lambda x: (jax.debug.callback(print, x), x)[1],
    "pure": calling,
    "io": lambda x: io_callback(lambda y: y, SHAPE, x),
    "jit": jax.jit(calling),
    "branch": lambda x: jax.lax.cond(x > 0, calling, lambda y: y, x),
    "scan": lambda x: jax.lax.scan(lambda c, _: (calling(c), None), x, None, 3)[0],
    "while": lambda x: jax.lax.while_loop(lambda c: calling(c) < 3, jnp.sin, x),
    "remat": jax.checkpoint(calling),
    "custom derivative": in_a_rule,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_program_that_calls_the_host_is_known(name):
    assert calls_host(jax.make_jaxpr(CALLS[name])(1.0).jaxpr)


def test_other_programs_do_not_call_the_host():
    def function(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 3)[0]

    assert not calls_host(jax.make_jaxpr(jax.jit(jax.grad(function)))(1.0).jaxpr)
