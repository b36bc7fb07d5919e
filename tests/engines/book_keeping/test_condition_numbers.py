import jax.numpy as jnp
import numpy as np
import pytest

from dpmp.engines.book_keeping import measure_condition_numbers


def loss(w, batch):
    return jnp.sum(batch["g"] * (batch["x"] @ w))


def make_batch(g):
    x = np.ones((len(g), 4, 1), np.float32)
    return {"x": x, "g": np.float32(g)[..., None]}


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


def test_arguments_that_clipped_grad_would_refuse_are_refused():
    batch = make_batch([[1, 1, 1, 1]])
    with pytest.raises(ValueError, match="microbatch_size must be"):
        measure_condition_numbers(
            loss, np.ones((1, 1), np.float32), batch, microbatch_size=0
        )
    with pytest.raises(ValueError, match="must not overlap"):
        measure_condition_numbers(
            loss, np.ones(1, np.float32), batch, microbatch_size=1, batch_argnums=0
        )
    with pytest.raises(ValueError, match="scalar float loss"):
        measure_condition_numbers(
            lambda w, x: x["x"], np.ones(1, np.float32), batch, microbatch_size=1
        )
