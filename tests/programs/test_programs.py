import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpmp.programs import analysis, frozen, interpreter
from dpmp.programs.frozen import hoist_constants

FROZEN = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
ARGS = (np.float32([1.0, -2.0, 0.5]), {"x": np.float32([[0.3, 0.1, -0.2]])})


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


def assert_close(actual, expected, atol=0.0):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol),
        actual,
        expected,
    )


# Of sums of 1000 float32 products, in whatever order.
OF_SUMS = 1e-3


@pytest.mark.parametrize(
    ("kind", "library"),
    [*((kind, np) for kind in make_functions(FROZEN)), ("jit", jnp)],
)
def test_constants_are_hoisted_and_functions_can_be_differentiated_and_mapped(
    kind, library
):
    fun = make_functions(library.asarray(FROZEN))[kind]
    hoisted, constants, _ = hoist_constants(fun, *ARGS)
    assert any(np.size(x) == FROZEN.size for x in constants)
    points = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)

    def mapped(fun, *args):
        return jax.vmap(jax.value_and_grad(fun), (0, None))(*args)

    def mapped_hoisted(constants, *args):
        return mapped(functools.partial(hoisted, constants), *args)

    args = points, ARGS[1]
    original = jax.jit(functools.partial(mapped, fun)).lower(*args)
    lowered = jax.jit(mapped_hoisted).lower(constants, *args)
    found, expected = lowered.compile()(constants, *args), original.compile()(*args)
    assert_close(found, expected, OF_SUMS)
    # Two characters for each byte of an array.
    assert len(original.as_text()) > FROZEN.nbytes
    if kind != "custom_vjp-closing-over":  # the arrays of such rules stay
        assert len(lowered.as_text()) < FROZEN.nbytes


def test_constants_can_be_exchanged_and_there_may_be_none():
    hoisted, constants, _ = hoist_constants(make_functions(FROZEN)["plain"], *ARGS)
    others = [2 * x if np.size(x) == FROZEN.size else x for x in constants]
    expected = jax.jit(make_functions(2 * FROZEN)["plain"])(*ARGS)
    assert_close(jax.jit(hoisted)(others, *ARGS), expected, OF_SUMS)

    hoisted, constants, _ = hoist_constants(lambda x: x + 1, np.zeros(3, np.float32))
    assert constants == []
    np.testing.assert_array_equal(hoisted([], np.ones(3, np.float32)), 2)


# Tracing, and going through a program.

X = np.float32([0.5, -1.0, 2.0])


def names_of(closed):
    return [eqn.primitive.name for eqn in closed.jaxpr.eqns]


def evaluated(closed, *args):
    return interpreter.run(closed, args, interpreter.bind)


def test_calls_under_jit_are_written_out_and_nothing_else_changes():
    @jax.jit
    def inner(x):
        return jnp.sin(x) * FROZEN[0]

    twice = jax.jit(lambda x: inner(x) + jax.jit(inner)(2 * x))
    closed, _ = interpreter.trace(twice, X)
    assert names_of(closed).count("sin") == 2
    assert not {"jit", "pjit", "closed_call"} & set(names_of(closed))
    np.testing.assert_allclose(
        *evaluated(closed, X), inner(X) + inner(2 * X), rtol=1e-6
    )
    assert str(interpreter.inline(closed)) == str(closed)


@pytest.mark.parametrize("index", [0, 2, -1, np.int32(-2), (1, -1)])
def test_indices_that_are_known_are_written_in_the_program(index):
    ones = np.ones((4, 3), np.float32)
    closed, _ = interpreter.trace(lambda w: w[index], ones)
    for eqn in closed.jaxpr.eqns:
        assert all(map(interpreter.is_literal, eqn.invars[1:]))
    found = jax.jit(lambda w: evaluated(closed, w))(ones)
    np.testing.assert_array_equal(*found, 1)


# Equations with programs of their own.


@pytest.mark.parametrize(
    ("policy", "prevent_cse"),
    [(None, True), (jax.checkpoint_policies.dots_saveable, False)],
)
def test_a_checkpoint_is_told_by_its_body_and_wrapped_again(policy, prevent_cse):
    def fun(w, x):
        return jnp.sin(jax.jit(jnp.matmul)(x, w)) * FROZEN[0]

    args = np.eye(3, dtype=np.float32), X
    checkpoint = jax.checkpoint(fun, policy=policy, prevent_cse=prevent_cse)
    (eqn,) = interpreter.trace(checkpoint, *args)[0].jaxpr.eqns
    body, wrap = interpreter.as_rematerialised(eqn)
    assert "dot_general" in names_of(body)  # written out

    def again(*xs):
        return wrap(lambda *xs: evaluated(body, *xs))(*xs)

    operands = [np.ones(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    (new,) = interpreter.trace(again, *operands)[0].jaxpr.eqns
    assert new.primitive.name == eqn.primitive.name
    for name in ("policy", "prevent_cse"):
        assert new.params[name] == eqn.params[name]


# Programs with some equations replaced.


def with_jit(op):
    return lambda x: jax.jit(lambda y: jax.jit(op)(y) + op(2 * y))(x)


def with_scan(op):
    def body(carry, x):
        return op(carry + jax.jit(op)(x)), op(x)

    return lambda x: jax.lax.scan(body, jnp.zeros(()), x)


def with_nested_loops(op):
    def fun(x):
        def body(i, carry):
            return jax.lax.fori_loop(0, i, lambda _, c: op(c) + 1, carry)

        return jax.lax.fori_loop(0, 3, body, x)

    return fun


def with_while(op):
    def fun(x):
        return jax.lax.while_loop(
            lambda c: op(c[0]) < 0.9, lambda c: (c[0] + 0.25, op(c[1])), (x[0], x)
        )

    return fun


def with_branches(op):
    def fun(x):
        x = jax.lax.cond(x[0] > 0, op, jnp.tanh, x)
        return jax.lax.switch(1, [jnp.tanh, lambda x: op(op(x))], x)

    return fun


PROGRAMS = {
    "plain": lambda op: lambda x: {"a": op(x), "b": (x, op(op(x)))},
    "jit": with_jit,
    "scan": with_scan,
    "nested-loops": with_nested_loops,
    "while": with_while,
    "branches": with_branches,
    "checkpoint": lambda op: jax.checkpoint(lambda x: op(with_jit(op)(x))),
    "checkpoint-of-loop": lambda op: jax.checkpoint(with_scan(op)),
    "vmap": lambda op: jax.vmap(lambda x: jax.lax.cond(x > 0, op, jnp.tanh, x)),
}


def sine(x):
    return jnp.sin(x)


def doubled_sine(x):
    return 2 * jnp.sin(x)


DOUBLE_SINES = {"sin": lambda eqn, values: [doubled_sine(*values)]}


@pytest.mark.parametrize("name", PROGRAMS)
def test_equations_are_replaced_wherever_they_are_and_only_if_asked(name):
    program, expected = PROGRAMS[name](sine), PROGRAMS[name](doubled_sine)
    rewritten = interpreter.rewrite(program, DOUBLE_SINES)
    same = interpreter.rewrite(program, {"sin": lambda eqn, values: None})
    found = jax.jit(lambda x: [f(x) for f in (rewritten, expected, same, program)])(X)
    assert_close(found[0], found[1])
    assert_close(found[2], found[3])
    if name == "plain":
        assert_close(rewritten(X), found[1])


def test_a_body_is_replaced_too_if_what_replaces_it_has_arrays_of_its_own():
    large = jnp.asarray(FROZEN[:3, 0])

    rules = {"sin": lambda eqn, values: [values[0] * large]}

    def fun(x):
        return jax.lax.fori_loop(0, 2, lambda _, x: jnp.sin(x), x), jnp.sin(x)

    in_loop, outside = jax.jit(interpreter.rewrite(fun, rules))(X)
    np.testing.assert_allclose(in_loop, X * large * large, rtol=1e-6)
    np.testing.assert_allclose(outside, X * large, rtol=1e-6)


def stacks_twice(op, *, reverse):
    def fun(x):
        def body(carry, x):
            y = op(carry + x)
            return y, (y, 1.0, {"a": y, "b": 2 * y}, x)

        return jax.lax.scan(body, 0.5, x, reverse=reverse)

    return fun


@pytest.mark.parametrize(
    ("transform", "reverse"),
    [(lambda fun: fun, False), (jax.jit, True), (jax.vmap, True)],
)
def test_a_loop_stacks_once_what_it_gives_twice(transform, reverse):
    args = np.stack([X, X + 1]) if transform is jax.vmap else X
    program = transform(stacks_twice(sine, reverse=reverse))
    expected = transform(stacks_twice(doubled_sine, reverse=reverse))
    rewritten = interpreter.rewrite(program, DOUBLE_SINES)
    assert_close(*jax.jit(lambda x: (rewritten(x), expected(x)))(args))
    # The outputs of a mapped program are transposed once, too.
    before, after = (
        {id(v) for v in interpreter.trace(fun, args)[0].jaxpr.outvars}
        for fun in (program, rewritten)
    )
    assert len(after) == len(before) - 1


def test_branches_for_platforms_stay_what_they_are():
    def fun(x):
        return jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)

    closed, _ = interpreter.trace(fun, 1.0)
    assert interpreter.as_branches(closed.jaxpr.eqns[-1]) is None


def test_what_is_computed_from_a_packed_table_is_not_repeated_for_ever():
    table = jnp.arange(12, dtype=jnp.uint8).reshape(3, 4)

    def fun(x):
        codes = table.astype(jnp.float32) / 16
        for _ in range(30):  # each number is used twice
            codes = 2 * codes * codes - 1
        return jnp.sum(x @ codes)

    x = jnp.arange(3.0)
    hoisted, constants, _ = frozen.hoist_constants(fun, x)
    program = jax.make_jaxpr(jax.grad(hoisted, 1))(constants, x)
    assert len(analysis.equations(program.jaxpr)) < 500
    np.testing.assert_allclose(jax.jit(hoisted)(constants, x), fun(x), rtol=1e-5)


def test_a_value_that_is_read_instead_sends_its_gradient_to_the_parameter():
    def loss(value, param):
        return jnp.sum(frozen.read_instead(value, param) ** 2)

    of_value, of_param = jax.grad(loss, (0, 1))(jnp.array([2.0, 3.0]), jnp.zeros(2))
    np.testing.assert_array_equal(of_value, [0, 0])
    np.testing.assert_array_equal(of_param, [4, 6])
