import jax.numpy as jnp
import numpy as np

from dpmp.engines.book_keeping import measure_condition_numbers


def loss(w, batch):
    return jnp.sum(batch["g"] * (batch["x"] @ w))


def make_batch(g):
    g = np.float32(g)[..., None]
    return {"x": np.ones_like(g), "g": g}


def test_they_are_sums_of_magnitudes_over_the_norm_of_the_sum():
    batch = make_batch([[1, 1, 1, 1], [1, -1, 1, 1], [3, -1, 0, 0]])
    found = measure_condition_numbers(
        loss, np.ones((1, 1), np.float32), batch, microbatch_size=1
    )
    np.testing.assert_allclose(found.ratios, [1, 2, 2], rtol=1e-6)
    assert found.share_cut == 0


def test_cancellation_is_cut_in_large_microbatches():
    batch = make_batch([[1, 1, 1, 1], [1, -1, 1, -0.999]])
    found = measure_condition_numbers(
        loss, np.ones((1, 1), np.float32), batch, microbatch_size=128
    )
    assert 1 < found.largest < 4 / 0.001 < 1.1 * found.ratios[1]
    assert found.share_cut == 0.5
