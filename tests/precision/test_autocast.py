"""Products in half precision, everything else in float32, whatever is around it."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import reference
from programs import equations

from dpmp.clipping import clipped_grad
from dpmp.precision import Policy
from dpmp.precision._autocast import autocast

_ZOO = models.ZOO
_X = np.linspace(-1.0, 2.0, 24, dtype=np.float32).reshape(4, 6)
_W = np.linspace(-0.5, 0.7, 36, dtype=np.float32).reshape(6, 6)


def _dtypes(fun, *args):
    """For each primitive the dtypes of its operands, in every program inside."""
    found = {}
    for eqn in equations(jax.make_jaxpr(fun)(*args).jaxpr):
        some = {str(atom.aval.dtype) for atom in eqn.invars if hasattr(atom, "aval")}
        found.setdefault(eqn.primitive.name, set()).update(some)
    return found


def _standardised(w, x):
    x = x @ w
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize(
    ("fun", "narrow", "wide"),
    [
        (
            lambda w, x: jnp.sum(jax.nn.softmax(jnp.tanh(x @ w) @ w)),
            ("dot_general", "tanh"),
            ("exp", "reduce_sum"),
        ),
        (_standardised, ("dot_general",), ("reduce_sum", "square", "rsqrt", "mul")),
        # Operands that differ meet in float32; numbers follow what they meet.
        (lambda w, x: x @ w + x, ("dot_general",), ("add",)),
        (lambda w, x: 0.5 * jnp.maximum(x @ w, 0.25), ("mul", "max"), ()),
    ],
)
def test_products_are_in_the_compute_dtype_and_what_sums_is_not(fun, narrow, wide):
    dtypes = _dtypes(autocast(fun), _W, _X)
    assert all(dtypes[name] == {"bfloat16"} for name in narrow)
    assert all(dtypes[name] == {"float32"} for name in wide)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_product_is_that_of_rounded_operands(dtype):
    policy = Policy(jnp.float32, dtype)

    def product(x, w):
        return (x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)

    cast = jax.jit(autocast(jnp.matmul, policy))
    np.testing.assert_array_equal(cast(_X, _W), jax.jit(product)(_X, _W))

    # Casts of the model stay as they are.
    def fun(x):
        return (x.astype(jnp.float16) * 3).astype(jnp.float32), x.astype(jnp.int8)

    both = jax.jit(lambda x: (autocast(fun, policy)(x), fun(x)))(_X)
    jax.tree.map(np.testing.assert_array_equal, *both)


def test_results_have_the_shapes_and_dtypes_that_they_had():
    def fun(w, x, *, scale):
        y = scale * (x @ w)
        return {"y": y, "max": jnp.max(y), "best": jnp.argmax(y), "x": x, "n": 3.0}

    args, kwargs = (_W, _X), {"scale": 2.0}
    expected = jax.eval_shape(functools.partial(fun, **kwargs), *args)
    actual = jax.eval_shape(functools.partial(autocast(fun), **kwargs), *args)
    assert actual == expected


def _loop(w, x):
    def step(carry, _):
        return jnp.tanh(carry @ w) * 1.5, jnp.sum(carry)

    return jax.lax.scan(step, x, None, length=3)


def _rematerialised(w, x):
    return jax.checkpoint(lambda x: jnp.sin(x @ w) @ w)(x)


def _branch(w, x):
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: 2 * (x @ w.T))


def _while(w, x):
    def body(state):
        return state[0] + 1, jnp.tanh(state[1] @ w)

    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]


def _compiled(w, x):
    return jax.jit(lambda x: jnp.tanh(x @ w))(x)


_PROGRAMS = [_loop, _rematerialised, _branch, _while, _compiled]


@pytest.mark.parametrize("fun", _PROGRAMS)
def test_products_inside_of_programs_are_found_and_have_gradients(fun):
    cast = autocast(fun)
    assert _dtypes(cast, _W, _X)["dot_general"] == {"bfloat16"}

    def loss(fun):
        return lambda w: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(fun(w, _X)))

    @jax.jit
    def compared(w):
        losses = [] if fun is _while else [loss(fun), loss(cast), autocast(loss(fun))]
        return (fun(w, _X), cast(w, _X)), [jax.grad(f)(w) for f in losses]

    (expected, actual), grads = compared(_W)
    reference.assert_trees_close(actual, expected, rtol=0.02)
    dtypes = [jax.tree.map(jnp.result_type, x) for x in (actual, expected)]
    assert dtypes[0] == dtypes[1]
    for grad in grads:
        assert grad.dtype == jnp.float32
        reference.assert_trees_close(grad, grads[0], rtol=0.05)


def test_functions_with_derivatives_of_their_own_run_as_they_are():
    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (7 * ct,))
    loss = autocast(lambda x: jnp.sum(doubled(x @ _W) + jax.nn.relu(x)))
    expected = 7 * np.ones_like(_X) @ _W.T + (_X > 0)
    grad = jax.jit(jax.grad(loss))(_X)
    np.testing.assert_allclose(grad, expected, rtol=0.02, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [("conv", "per_example"), ("lstm", "book_keeping")],
)
def test_models_of_the_zoo_train_privately(name, method):
    model = _ZOO[name]
    params, batch = model.init(jnp.float32), model.make_batch(3, 6)
    loss = autocast(model.loss)
    assert "bfloat16" in _dtypes(loss, params, batch)["dot_general"]
    wide, cast = (
        jax.jit(
            clipped_grad(
                fun,
                l2_clip_norm=0.1,
                method=method,
                arithmetic=reference.FLOAT_SUMS[method],
            ).__call__
        )(params, batch)
        for fun in (model.loss, loss)
    )
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(cast))
    assert 0 < reference.relative_distance(cast, wide) <= 0.05
