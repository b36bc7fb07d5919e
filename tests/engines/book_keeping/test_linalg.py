"""Products are what they were, and sums have no more roundings than are counted."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import equations

from dpmp.engines.book_keeping import _linalg
from dpmp.engines.book_keeping._linalg import adapted
from dpmp.programs import interpreter

# Batch axes of one are "u" and "v".
_CONTRACTIONS = [
    ("ubtk,ubks->ubts", (1, 3, 4, 5), (1, 3, 5, 6)),
    ("butc,busc->buts", (3, 1, 4, 5), (3, 1, 6, 5)),
    ("buthd,bushd->buhts", (3, 1, 4, 2, 5), (3, 1, 6, 2, 5)),
    ("ubvk,ukvb->uvb", (1, 3, 1, 4), (1, 4, 1, 3)),
    ("uk,uk->u", (1, 4), (1, 4)),
    ("btk,bks->bts", (3, 4, 5), (3, 5, 6)),
    ("tk,ks->ts", (1, 3), (3, 4)),
    ("kr,btk->rbt", (32, 4), (8, 16, 32)),  # weights come first
]


@pytest.mark.parametrize(("contraction", "left", "right"), _CONTRACTIONS)
def test_products_are_what_they_were_without_batch_axes_of_one(
    contraction, left, right
):
    rng = np.random.default_rng(0)
    args = [rng.integers(-3, 4, x).astype(jnp.bfloat16) for x in (left, right)]

    def product(a, b):
        return jnp.einsum(contraction, a, b)

    both = jax.jit(lambda *args: (product(*args), adapted(product)(*args)))
    expected, actual = both(*args)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(
        np.float32(actual), np.float32(expected), strict=True
    )  # small integers: nothing is rounded
    for eqn in equations(jax.make_jaxpr(adapted(product))(*args).jaxpr):
        if eqn.primitive.name == "dot_general":
            _, batch = eqn.params["dimension_numbers"]
            sizes = [eqn.invars[0].aval.shape[i] for i in batch[0]]
            assert all(size > 1 for size in sizes)


@pytest.mark.parametrize("size", [1, 3, 1025, 2**16 + 7])
def test_roundings_are_as_many_as_are_counted(size):
    x = np.full(size, 1 + 2.0**-23, np.float32)
    x += np.random.default_rng(0).uniform(0, 1, size).astype(np.float32)
    exact = sum(map(Fraction, x.tolist()))
    total = jax.jit(lambda x: _linalg.add_up(_linalg.row_sums(x)))(x)
    error = abs(Fraction(float(total)) - exact) / exact
    roundings = _linalg.num_roundings(size)
    assert error <= (1 + Fraction(1, 2**24)) ** roundings - 1


def _depth_of(jaxpr):
    """The most additions on any path from an input to the output."""
    depths = {}
    for eqn in jaxpr.eqns:
        inputs = [depths.get(x, 0) for x in eqn.invars if not interpreter.is_literal(x)]
        longest = max(inputs, default=0) + (eqn.primitive.name == "add")
        depths |= dict.fromkeys(eqn.outvars, longest)
    return depths.get(jaxpr.outvars[0], 0)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8, 9, 257])
def test_the_tree_is_as_deep_as_is_counted(num_parts):
    jaxpr, _ = interpreter.trace(_linalg.add_up, jnp.ones(num_parts))
    assert _depth_of(jaxpr.jaxpr) == _linalg.depth(num_parts)
