"""Several random views of an example: their gradients are averaged, then clipped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import dpmp

NUM_EXAMPLES, NUM_VIEWS = 3, 3
RNG = np.random.default_rng(0)
BATCH = {
    "image": RNG.normal(size=(NUM_EXAMPLES, 1, 6, 6)).astype(np.float32),
    "label": RNG.integers(0, 3, NUM_EXAMPLES),
}
PARAMS = {
    "kernel": RNG.normal(size=(4, 1, 3, 3)).astype(np.float32),
    "bias": RNG.normal(size=(4, 1, 1)).astype(np.float32),
    "dense": RNG.normal(size=(36, 3)).astype(np.float32),
}
KEY = jax.random.key(1)

# Float32 roundings of gradients and sums, which each engine has in an order of its own.
TOLERANCE = 32 * 2.0**-23


@jax.jit
def random_view(image, key):
    key_of_flip, key_of_shift = jax.random.split(key)
    image = jnp.where(jax.random.bernoulli(key_of_flip), image[:, :, ::-1], image)
    corner = jax.random.randint(key_of_shift, (2,), 0, 3)
    padded = jnp.pad(image, ((0, 0), (1, 1), (1, 1)))
    return jax.lax.dynamic_slice(padded, (0, *corner), image.shape)


def mean_loss(params, images, labels):
    hidden = jax.lax.conv(images, params["kernel"], (2, 2), "SAME") + params["bias"]
    logits = jnp.tanh(hidden).reshape(len(images), -1) @ params["dense"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mean_loss_of_views(params, batch, key):
    keys = jax.random.split(key, NUM_VIEWS)
    views = jax.vmap(random_view, (None, 0))(batch["image"][0], keys)
    return mean_loss(params, views, jnp.repeat(batch["label"], NUM_VIEWS))


@pytest.fixture(scope="module")
def averaged():
    """The gradients of one view alone, averaged for each example, in float64."""
    grad_fn = jax.jit(jax.grad(mean_loss))
    averages = []
    for image, label, key in zip(
        *BATCH.values(), jax.random.split(KEY, NUM_EXAMPLES), strict=True
    ):
        views = [random_view(image, k) for k in jax.random.split(key, NUM_VIEWS)]
        grads = [grad_fn(PARAMS, view[None], label[None]) for view in views]
        assert reference.relative_distance(grads[0], grads[1]) > 0.1
        averages.append(jax.tree.map(lambda *x: np.mean(np.float64(x), 0), *grads))
    return jax.tree.map(lambda *x: np.stack(x), *averages)


@pytest.mark.parametrize("method", reference.FLOAT_SUMS)
def test_gradients_of_views_are_averaged_and_then_clipped(method, averaged):
    norms = reference.per_example_norms(averaged)
    clip_norm = float(np.median(norms))
    grad_fn = dpmp.clipped_grad(
        mean_loss_of_views,
        l2_clip_norm=clip_norm,
        prng_argnum=2,
        return_grad_norms=True,
        method=method,
        arithmetic=reference.FLOAT_SUMS[method],
    )
    total, sensitive = jax.jit(grad_fn.__call__)(PARAMS, BATCH, KEY)
    np.testing.assert_allclose(sensitive.grad_norms, norms, rtol=TOLERANCE)
    # A share of the clip norm is reserved for rounding.
    expected = reference.clipped_sum(averaged, clip_norm / (1 + 2.0**-7))
    reference.assert_trees_close(total, expected, rtol=TOLERANCE)
