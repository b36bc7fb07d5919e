import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpmp import _fence
from dpmp.numerics import reduction

# A loop adds up their columns together, and leaves four.
MANY = [511] * 128 + [132]
_BATCH_SIZES = [1, 7, 8, 9, 64, 100, 1024]


def _sum_examples(rows, add=jnp.add):
    """The sum of (B, n) as examples are added up, and what it was made of."""
    size = reduction.block_size(len(rows))

    def add_block(i):
        indices = reduction.indices_of_block(i, len(rows) // size, size)
        block = reduction.rows_of_block(rows, indices)
        return [reduction.pairwise(list(block), add)]

    return reduction.sum_examples(add_block, len(rows) // size, add=add)[0]


@pytest.mark.parametrize("batch_size", _BATCH_SIZES)
def test_every_example_is_added_once(batch_size):
    # Modulo 2^32, other multiplicities give another sum, but for a chance of 2^-96.
    rng = np.random.default_rng(batch_size)
    rows = rng.integers(2**32, size=(batch_size, 3), dtype=np.uint32)
    total = jax.jit(_sum_examples)(rows)
    np.testing.assert_array_equal(total, rows.sum(0, dtype=np.uint32))


def _rounded_additions(batch_size):
    """The depth of a sum of examples, and the terms below each of its additions."""

    # Pairs of (terms, depth, sum over additions of the terms below); no terms, no
    # rounding.
    def add(a, b):
        terms = a[..., 0] + b[..., 0]
        rounds = ((a[..., 0] > 0) & (b[..., 0] > 0)).astype(jnp.int32)
        depth = jnp.maximum(a[..., 1], b[..., 1]) + rounds
        below = a[..., 2] + b[..., 2] + rounds * terms
        return jnp.stack([terms, depth, below], axis=-1)

    ones = np.tile(np.int32([1, 0, 0]), (batch_size, 1))
    return jax.jit(lambda x: _sum_examples(x, add))(ones)


@pytest.mark.parametrize("batch_size", _BATCH_SIZES)
def test_additions_of_examples_are_counted(batch_size):
    terms, depth, below = map(int, _rounded_additions(batch_size))
    assert terms == batch_size
    assert depth <= reduction.depth(batch_size)
    assert below <= reduction.summed_norms(batch_size)
    # All loops are full, and the counts exact.
    if batch_size in (1, 8, 64, 1024):
        assert depth == reduction.depth(batch_size)
        assert below == pytest.approx(reduction.summed_norms(batch_size))


def test_a_program_does_not_grow_with_the_batch():
    def num_lines(batch_size):
        rows = jax.ShapeDtypeStruct((batch_size, 5), jnp.float32)
        return jax.jit(_sum_examples).lower(rows).as_text().count("\n")

    assert num_lines(4096) <= 2 * num_lines(16)


def _square(rows, start, *operands):
    del start, operands
    return rows * rows


def _weighted(rows, start, *operands):
    (weights,) = operands
    return jax.lax.dynamic_slice_in_dim(weights, start, rows.shape[1]) * rows


@pytest.mark.parametrize("sizes", [[0, 3], [7, 513], [70_001], [600] * 9, MANY])
def test_every_entry_is_added_once(sizes):
    rng = np.random.default_rng(len(sizes))
    arrays = [rng.integers(-9, 9, (2, n)).astype(np.float32) for n in sizes]
    # Columns beyond the last are zeros, and need a weight.
    weights = rng.integers(-9, 9, max(sizes) + 100).astype(np.float32)
    stack = [_fence.StoredArray(jnp.asarray(x), x.dtype, x.shape[1:]) for x in arrays]

    @jax.jit
    def total():
        return reduction.sum_entries(stack, _weighted, jnp.add, jnp.asarray(weights))[0]

    expected = sum(x @ weights[: x.shape[1]] for x in arrays)
    np.testing.assert_array_equal(total(), expected)


@pytest.mark.parametrize("sizes", [[33], [513, 7], [70_001], [2**17], MANY])
def test_no_path_of_entries_has_more_additions_than_are_counted(sizes):
    def add(a, b):
        """Of numbers of additions, plus one; 0 is an empty sum."""
        return jnp.where(a * b == 0, a + b, jnp.maximum(a, b) + 1)

    counted = 0

    @jax.jit
    def longest(xs):
        nonlocal counted
        stack = [_fence.StoredArray(x, x.dtype, x.shape[1:]) for x in xs]
        total, counted = reduction.sum_entries(stack, _square, add)
        return total - 1

    (found,) = longest([jnp.ones((1, size)) for size in sizes])
    assert found <= counted <= 2 * found + 10


def test_a_program_has_arrays_of_one_shape_once():
    def num_lines(count):
        def squares(xs):
            stack = [_fence.StoredArray(x, x.dtype, x.shape[1:]) for x in xs]
            return reduction.sum_entries(stack, _square, jnp.add)[0]

        xs = [jax.ShapeDtypeStruct((4, 5000), jnp.float32)] * count
        return jax.jit(squares).lower(xs).as_text().count("\n")

    assert num_lines(20) - num_lines(10) <= 10 * 3
