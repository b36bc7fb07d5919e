import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from dpmp import _fence
from dpmp.clipping import clipped_fun


@pytest.mark.parametrize("arithmetic", ["exact", "float32"])
def test_a_clipping_group_may_have_no_entries(arithmetic):
    norms = {"empty": 1.0, "rest": 1.0}
    clipped = clipped_fun(
        lambda x: {"empty": x[0, :0], "rest": x[0]},
        l2_clip_norm=norms,
        arithmetic=arithmetic,
    )
    total = clipped(np.ones((4, 2), np.float32))
    shapes = [x.shape for x in jax.tree.leaves(total["empty"])]
    assert set(shapes) == {(0,)}


def test_the_branch_is_taken_whatever_it_depends_on():
    arrays = [
        np.zeros(3, np.int8),
        np.full(3, -1, np.int32),
        np.full(3, np.nan, np.float32),
        np.ones((2, 2), bool),
        np.uint32(2),
        np.ones(1, np.complex64),
        np.zeros((2, 0), np.float32),
        jax.random.split(jax.random.key(0), 2),
    ]

    def stored_and_loaded(x):
        stored, _ = _fence.compute_and_store(lambda: (jnp.ones((2, 3)), None), x)
        return _fence.floats_of(stored.bits, stored.dtype)

    for loaded in jax.jit(lambda xs: list(map(stored_and_loaded, xs)))(arrays):
        np.testing.assert_array_equal(loaded, np.ones((2, 3)))


# The residue of a product that is not stored. With p = round(a b), the difference
# p * 1 - a * b is 0 if a fused multiply-add rounds a b first, and the rounding error of
# a b if it does not. XLA lets LLVM choose anew in every loop that recomputes it.
def _residue(example):
    return example["p"][None] * example["one"][None] - example["a"] * example["b"]


def _residue_batch(repeats=32, n=300):
    rng = np.random.default_rng(0)
    a, b = rng.uniform(1, 2, (2, 1, n)).astype(np.float32)
    wide = [np.repeat(x[:, None], repeats, axis=1) for x in (a, b)]
    return {"p": a * b, "one": np.ones_like(a), "a": wide[0], "b": wide[1]}


def _norm_of_clipped_residue(clip_norm):
    fun = clipped_fun(_residue, l2_clip_norm=clip_norm, keep_batch_dim=False)
    return reference.norm(jax.jit(fun.__call__)(_residue_batch()))


def test_norm_and_sum_see_the_same_bits_of_a_cancelling_difference():
    assert _norm_of_clipped_residue(1e-9) <= 1e-9


@pytest.mark.slow  # of programs as users have them
def test_norm_and_sum_would_see_other_bits_without_the_branch(monkeypatch):
    monkeypatch.setattr(_fence, "materialize", lambda compute, depends_on: compute())
    # The test above must be one that can fail; it needs a CPU with fused multiply-add.
    assert _norm_of_clipped_residue(1e-9) > 1e-9


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_norm_and_sum_see_values_rounded_to_sixteen_bits(dtype):
    def fun(example):
        a, b, c = example
        return a * b - c

    rng = np.random.default_rng(0)
    a, b = rng.uniform(1, 2, (2, 1, 100)).astype(np.float32).astype(dtype)
    c = (np.float32(a) * np.float32(b)).astype(dtype)
    clipped = clipped_fun(fun, l2_clip_norm=1e-6, keep_batch_dim=False)
    assert reference.has_norm_at_most(jax.jit(clipped.__call__)((a, b, c)), 1e-6)
