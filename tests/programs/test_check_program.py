"""Mistakes in a loss that no exception tells are found in its program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import dpmp
from dpmp.programs._check_program import calls_host, check_program
from dpmp.programs._transformations import hoist_constants


def check(loss_fn, *, policy="float32", uses_prng_key=False):
    """Checks the program of a loss as `DPTrainer` does."""
    dtype = dpmp.Policy.from_name(policy).compute_dtype
    arrays = {"w": jnp.ones(3, dtype)}, jnp.ones((1, 3), dtype)
    key = (jax.random.key(0),) if uses_prng_key else ()
    checked = functools.partial(
        check_program, num_params=1, takes_key=uses_prng_key, compute_dtype=dtype
    )
    hoist_constants(loss_fn, *arrays, *key, check=checked)


def test_a_loss_that_ignores_its_params_is_refused():
    own = jnp.ones(3)
    with pytest.raises(ValueError, match=r"must compute with the params.*stateless_ca"):
        check(lambda params, x: jnp.mean(x @ own))


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, x: jnp.sum(params["w"]),
        lambda params, x: jax.jit(lambda w: jnp.sum(x @ w))(params["w"]),
        lambda params, x: params["w"][0],
    ],
    ids=["no data", "jit", "entry"],
)
def test_a_loss_that_reads_any_param_is_taken(loss_fn):
    check(loss_fn)


def drop(w, x, key):
    return jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0) @ w)


def in_a_loop(params, x):
    def body(total, row):
        return total + drop(params["w"], row, jax.random.key(0)), None

    return jax.lax.scan(body, jnp.zeros(()), x)[0]


@pytest.mark.parametrize(
    "loss_fn",
    [lambda params, x: drop(params["w"], x, jax.random.key(0)), in_a_loop],
    ids=["plain", "loop"],
)
def test_random_numbers_from_a_key_that_never_changes_are_warned_of(loss_fn):
    with pytest.warns(UserWarning, match="the same for every example at every step"):
        check(loss_fn)


STATE = jnp.ones(3)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, x: (0.9 * STATE + x[0], jnp.sum(x @ params["w"]))[1],
        lambda params, x: (jax.jit(jnp.add)(STATE, x[0]), jnp.sum(x @ params["w"]))[1],
    ],
    ids=["plain", "jit"],
)
def test_a_next_state_that_is_dropped_is_warned_of(loss_fn):
    said = r"new values of 1 arrays .* of the shapes \(3,\), and drops them"
    with pytest.warns(UserWarning, match=said):
        check(loss_fn)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, x: jnp.sum((x * STATE) @ params["w"]),
        lambda params, x: (STATE + 1, jnp.sum(x @ params["w"]))[1],
        lambda params, x: (x * STATE, jnp.sum(x @ params["w"]))[1],
    ],
    ids=["used", "of no example", "of another shape"],
)
def test_other_arrays_that_a_loss_closes_over_are_welcome(loss_fn):
    check(loss_fn)


WIDE = np.ones(3, np.float32)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_loss_without_any_product_in_the_16_bits_of_the_policy_is_warned_of(policy):
    def loss_fn(params, x):
        return jnp.sum(x.astype(jnp.float32) @ params["w"].astype(jnp.float32))

    with pytest.warns(UserWarning, match="computes no product in b?float16, though"):
        check(loss_fn, policy=policy)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, x: jnp.sum(x @ params["w"]),
        lambda params, x: (
            jnp.sum(x @ params["w"]).astype(jnp.float32)
            + jnp.sum(x.astype(jnp.float32) @ WIDE)
        ),
        lambda params, x: jnp.sum((x * params["w"]).astype(jnp.float32)),
        lambda params, x: jnp.sum(
            jnp.einsum("bi,i", x, params["w"], preferred_element_type=jnp.float32)
        ),
    ],
    ids=["plain", "one of two", "no product", "summed in float32"],
)
def test_a_loss_with_a_product_in_16_bits_or_none_at_all_is_welcome(loss_fn):
    check(loss_fn, policy="mixed_bfloat16")


def test_random_numbers_from_the_key_of_the_example_are_welcome():
    check(lambda params, x, key: drop(params["w"], x, key), uses_prng_key=True)


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
