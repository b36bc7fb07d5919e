"""That a view and its factors stay together through every change of the axes."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpmp.lora._views import CannotFollowError, Target, View, aligned


def view():
    """A stack of matrices with two axes of inputs, and its factors."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-3, 4, (2, 6, 4, 3)), rng.integers(-3, 4, (2, 3, 9))
    array = jnp.asarray(np.einsum("sijr,sro->sijo", a, b))
    factors = aligned(a, (0, 1, 2, 4), 4), aligned(b, (0, 4, 3), 4)
    return View(array, factors, ((0,), (1,), (2,), (3,)), Target("w"))


def transposed(view, permutation):
    return view.transposed(jnp.transpose(view.array, permutation), permutation)


def reshaped(view, shape):
    return view.reshaped(jnp.reshape(view.array, shape))


def product_of_factors(view):
    a, b = view.factors
    return jnp.broadcast_to((a * b).sum(-1), view.array.shape)


def splits(size):
    return [(size,), *((n, size // n) for n in range(1, size + 1) if size % n == 0)]


@hypothesis.settings(max_examples=6)  # each compiles a program
@hypothesis.given(st.data())
def test_the_product_of_the_factors_follows_the_array(data):
    def changed_in_turn():
        # Both axes of the inputs may be merged.
        v = reshaped(view(), data.draw(st.sampled_from([(2, 24, 9), (2, 8, 3, 9)])))
        yield product_of_factors(v), v.array
        for _ in range(data.draw(st.integers(1, 4))):
            if data.draw(st.booleans()):
                v = transposed(v, data.draw(st.permutations(range(v.array.ndim))))
            else:
                parts = [data.draw(st.sampled_from(splits(x))) for x in v.array.shape]
                v = reshaped(v, [n for part in parts for n in part])
            assert v.array.ndim == len(v.origins)
            yield product_of_factors(v), v.array

    for product, array in jax.jit(lambda: [*changed_in_turn()])():
        np.testing.assert_array_equal(product, array)


def test_axes_of_both_factors_are_not_merged_and_those_of_one_not_looped_over():
    # An axis of inputs and the one of outputs; the stack and an axis of inputs.
    for shape in ((2, 6, 36), (12, 4, 9)):
        with pytest.raises(CannotFollowError, match="merges an axis"):
            reshaped(view(), shape)
    view().check_leading()
    with pytest.raises(CannotFollowError, match="loops over"):
        transposed(view(), (1, 0, 2, 3)).check_leading()
