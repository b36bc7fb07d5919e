import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpmp._jaxpr import hoist_constants

FROZEN = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
ARGS = (jnp.array([1.0, -2.0, 0.5]), {"x": jnp.array([[0.3, 0.1, -0.2]])})


@jax.custom_vjp
def doubled_gradient(x):
    return x


doubled_gradient.defvjp(lambda x: (x, None), lambda _, grad: (2 * grad,))


def make_functions(frozen):
    def plain(w, batch):
        return jnp.sum(jnp.tanh(frozen @ w)) * jnp.mean(batch["x"] @ w)

    def custom(w, batch):
        return plain(doubled_gradient(w), batch)

    @jax.custom_vjp
    def closing_over(w):
        return jnp.sum(frozen @ w)

    closing_over.defvjp(
        lambda w: (jnp.sum(frozen @ w), None),
        lambda _, grad: (3 * grad * jnp.sum(frozen, axis=0),),
    )

    def looped(w, batch):
        def body(total, x):
            return total + jnp.sum(frozen @ (w * x)), None

        return jax.lax.scan(body, jnp.sum(batch["x"]), jnp.arange(3.0))[0]

    return {
        "plain": plain,
        "jit": jax.jit(plain),
        "checkpoint": jax.checkpoint(plain),
        "custom_vjp": custom,
        "custom_vjp-closing-over": lambda w, batch: closing_over(w) + plain(w, batch),
        "scan": looped,
    }


KINDS = sorted(make_functions(FROZEN))


@pytest.fixture(params=["numpy", "jax"])
def frozen(request):
    return jnp.asarray(FROZEN) if request.param == "jax" else FROZEN


def assert_close(actual, expected):
    # Sums of 1000 float32 products, in whatever order.
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_hoisted_function_equals_the_function(kind, frozen):
    fun = make_functions(frozen)[kind]
    hoisted, constants = hoist_constants(fun, *ARGS)
    assert_close(hoisted(constants, *ARGS), fun(*ARGS))
    assert_close(jax.jit(hoisted)(constants, *ARGS), fun(*ARGS))


@pytest.mark.parametrize("kind", KINDS)
def test_it_can_be_differentiated_and_mapped(kind):
    fun = make_functions(jnp.asarray(FROZEN))[kind]
    hoisted, constants = hoist_constants(fun, *ARGS)
    points = jnp.linspace(-1, 1, 12).reshape(4, 3)

    def per_point(fun):
        return jax.vmap(jax.value_and_grad(fun), (0, None))(points, ARGS[1])

    def with_constants(constants):
        return per_point(lambda w, batch: hoisted(constants, w, batch))

    expected_values, expected_grads = per_point(fun)
    values, grads = jax.jit(with_constants)(constants)
    assert_close(values, expected_values)
    assert_close(grads, expected_grads)


@pytest.mark.parametrize("transform", [lambda fun: fun, jax.grad], ids=["fun", "grad"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_large_constant_is_left_in_the_program(kind, transform, frozen):
    fun = transform(make_functions(frozen)[kind])
    hoisted, constants = hoist_constants(fun, *ARGS)
    assert any(np.size(x) == FROZEN.size for x in constants)
    lowered = jax.jit(hoisted).lower(constants, *ARGS)
    # As text, the array takes at least two characters for each byte.
    assert len(lowered.as_text()) < FROZEN.nbytes


def test_a_baked_in_constant_would_be_noticed():
    lowered = jax.jit(make_functions(jnp.asarray(FROZEN))["plain"]).lower(*ARGS)
    assert len(lowered.as_text()) > FROZEN.nbytes


def test_constants_can_be_exchanged():
    fun = make_functions(jnp.asarray(FROZEN))["plain"]
    hoisted, constants = hoist_constants(fun, *ARGS)
    others = [2 * x if np.size(x) == FROZEN.size else x for x in constants]
    assert_close(hoisted(others, *ARGS), make_functions(2 * FROZEN)["plain"](*ARGS))


def test_a_function_without_constants_has_none():
    hoisted, constants = hoist_constants(lambda x: x + 1, jnp.zeros(3))
    assert constants == []
    np.testing.assert_array_equal(hoisted([], jnp.ones(3)), 2)


def test_trees_come_and_go():
    def fun(tree, key, pair):
        noise = jax.random.normal(key, (2,))
        return {"sum": tree["a"] + pair[0], "rest": [noise, None, (tree["b"], pair[1])]}

    args = (
        {"a": jnp.ones(2), "b": jnp.arange(3)},
        jax.random.key(0),
        (jnp.zeros(2), None),
    )
    hoisted, constants = hoist_constants(fun, *args)
    actual, expected = hoisted(constants, *args), fun(*args)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_shapes_are_enough_to_trace():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ARGS)
    fun = make_functions(FROZEN)["plain"]
    hoisted, constants = hoist_constants(fun, *shapes)
    assert_close(hoisted(constants, *ARGS), fun(*ARGS))


def test_the_function_is_traced_once():
    traces = []

    def fun(x):
        traces.append(None)
        return jnp.sum(x * FROZEN)

    hoisted, constants = hoist_constants(fun, jnp.ones(3))
    for _ in range(3):
        jax.grad(hoisted, argnums=1)(constants, jnp.ones(3))
    assert len(traces) == 1
