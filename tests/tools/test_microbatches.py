import jax
import jax.numpy as jnp
import pytest

from dpmp import clipped_grad
from dpmp.tools.microbatches import MicrobatchTimes, measure_microbatch_sizes


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def make_fn(size):
    return clipped_grad(loss, l2_clip_norm=1.0, microbatch_size=size)


def test_every_size_is_measured():
    batch = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    times = measure_microbatch_sizes(make_fn, jnp.ones(3), batch, sizes=(2, 4))
    assert list(times.seconds) == list(times.temporary_bytes) == [2, 4]
    assert all(x > 0 for x in times.seconds.values())


def test_the_best_is_the_fastest():
    times = MicrobatchTimes({2: 0.5, 8: 0.25, 32: 0.75}, {2: 10, 8: 20, 32: None})
    assert times.best == 8
    assert "250.0" in str(times)
    assert str(times).endswith("unknown")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sizes": ()}, "at least one size"),
        ({"sizes": (0,)}, "size must be"),
        ({"sizes": (3,)}, "microbatch_size must divide"),
        ({"rounds": 0}, "rounds must be"),
    ],
)
def test_sizes_that_cannot_be_measured_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        measure_microbatch_sizes(make_fn, jnp.ones(3), jnp.ones((8, 3)), **options)
