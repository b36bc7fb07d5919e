"""Sums in parts are off by no more roundings than are counted."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpmp.engines.book_keeping import _totals
from dpmp.programs import _interpreter


@pytest.mark.parametrize("size", [0, 1, 2, 3, 17, 64, 1000, 2**12 + 1])
def test_integers_are_added_up_exactly(size):
    x = np.random.default_rng(size).integers(-99, 99, size).astype(np.float32)
    parts = _totals.of_rows(jnp.asarray(x))
    assert float(_totals.add_up(parts)) == x.sum()
    assert float(_totals.add_up(_totals.joined([parts, parts, parts]))) == 3 * x.sum()


def test_batches_are_added_up_over_the_last_axis():
    x = jnp.arange(12.0).reshape(2, 6)
    np.testing.assert_array_equal(_totals.add_up(x), [15.0, 51.0])


@pytest.mark.parametrize("size", [1, 2, 3, 100, 1023, 1025, 2**16 + 7])
def test_roundings_are_as_many_as_are_counted(size):
    x = np.full(size, 1 + 2.0**-23, np.float32)
    x += np.random.default_rng(0).uniform(0, 1, size).astype(np.float32)
    exact = sum(map(Fraction, x.tolist()))
    total = jax.jit(lambda x: _totals.add_up(_totals.of_rows(x)))(x)
    error = abs(Fraction(float(total)) - exact) / exact
    roundings = _totals.num_roundings(size)
    assert error <= (1 + Fraction(1, 2**24)) ** roundings - 1


def _depth_of(jaxpr):
    """The most additions on any path from an input to the output."""
    depths = {}
    for eqn in jaxpr.eqns:
        inputs = [
            depths.get(x, 0) for x in eqn.invars if not _interpreter.is_literal(x)
        ]
        longest = max(inputs, default=0) + (eqn.primitive.name == "add")
        depths |= dict.fromkeys(eqn.outvars, longest)
    return depths.get(jaxpr.outvars[0], 0)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 100, 257])
def test_the_tree_is_as_deep_as_is_counted(num_parts):
    jaxpr = jax.make_jaxpr(_totals.add_up)(jnp.ones(num_parts)).jaxpr
    assert _depth_of(jaxpr) == _totals.depth(num_parts)
