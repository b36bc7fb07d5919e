"""Cotangents reach what the outputs depend on differentiably, and nothing else."""

import jax
import jax.numpy as jnp
import pytest

from dpmp.programs import analysis, interpreter

X = jax.ShapeDtypeStruct((3,), jnp.float32)


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda a, b: a * b, [True, True]),
        (lambda a, b: a * jax.lax.stop_gradient(jnp.sin(b)), [True, False]),
        (lambda a, b: a[jnp.argmax(b)], [True, False]),
        (lambda a, b: jnp.where(b > 0, a, 1.0), [True, False]),
        (lambda a, b: (b, a)[1], [True, False]),
    ],
    ids=["product", "stopped", "index", "comparison", "unused"],
)
def test_cotangents_reach_what_is_differentiated(fun, expected):
    closed, _ = interpreter.trace(fun, X, X)
    reached = analysis.reached(closed.jaxpr)
    assert [v in reached for v in closed.jaxpr.invars] == expected


def test_an_output_that_nobody_reads_sends_no_cotangents():
    closed, _ = interpreter.trace(lambda a, b: (jnp.sin(a), jnp.cos(b)), X, X)
    reached = analysis.reached(closed.jaxpr, unread=[1])
    assert [v in reached for v in closed.jaxpr.invars] == [True, False]


def test_what_a_later_iteration_reads_is_read():
    def body(carry, _):
        a, b, c, d = carry
        return (a + b, jnp.sin(b * c), jnp.cos(c), jnp.sin(d)), a

    closed, _ = interpreter.trace(
        lambda *carry: jax.lax.scan(body, carry, length=3), *[X] * 4
    )
    loop = interpreter.as_loop(closed.jaxpr.eqns[0])
    # Of the five outputs, only the first is read outside.
    assert analysis.unread_in_loop(loop, [1, 2, 3, 4]) == {3, 4}
