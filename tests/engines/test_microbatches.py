"""The size of microbatches, where none is given, depends on shapes and the device."""

import functools
import math
import types

import jax
import jax.numpy as jnp
import pytest

from dpmp import clipped_grad

WIDTH = 64


def loss(params, x):
    """Of (1, positions, width); what does not depend on the example is not counted."""
    frozen = jnp.sum(jnp.ones((2**10, 2**10)) * params["scale"])
    return jnp.mean(jnp.tanh(x @ params["w"])) * frozen


PARAMS = {"w": jnp.ones((WIDTH, WIDTH)), "scale": jnp.ones(())}


def size_of(positions, batch_size, loss=loss, **options):
    fn = clipped_grad(loss, **{"l2_clip_norm": 1.0} | options)
    batch = jax.ShapeDtypeStruct((batch_size, positions, WIDTH), jnp.float32)
    return fn.microbatch_size(PARAMS, batch)


BOOK_KEEPING = {"method": "book_keeping"}
EXACT = {"arithmetic": "exact"}
UNPROVED = {"arithmetic": "unproved_float32"}


@pytest.mark.parametrize(
    ("positions", "batch_size", "options", "size"),
    [
        # 2^18 entries hold the activations of 8 examples of 512 positions.
        (512, 8, BOOK_KEEPING, 8),
        (512, 32, BOOK_KEEPING, 8),
        (512, 36, BOOK_KEEPING, 6),
        (512, 11, BOOK_KEEPING, 1),
        (512, 32, BOOK_KEEPING | {"microbatch_size": 16}, 16),
        # There are at least four examples, which together read the parameters.
        (16_384, 32, BOOK_KEEPING, 4),
        # 2^21 entries hold the gradients of 511 examples.
        (1, 511, EXACT, 511),
        (1, 1022, EXACT, 511),
        (1, 1022, {}, 1022),
        (512, 32, BOOK_KEEPING | UNPROVED, 32),
        (512, 32, BOOK_KEEPING | UNPROVED | {"l2_clip_norm": math.inf}, 8),
    ],
)
def test_arrays_fit_into_a_cache(positions, batch_size, options, size):
    assert size_of(positions, batch_size, **options) == size


def test_a_sum_is_made_in_these_microbatches():
    fn = clipped_grad(loss, l2_clip_norm=1.0, **BOOK_KEEPING)
    jaxpr = jax.make_jaxpr(fn)(PARAMS, jnp.zeros((32, 512, WIDTH)))
    scans = [x for x in jaxpr.eqns if x.primitive.name == "scan"]
    assert [x.params["length"] for x in scans] == [4]


def test_arrays_in_loops_count_once_and_fit_into_the_memory_of_other_devices(
    monkeypatch,
):
    def of_loop(params, x):
        def body(carry, x):
            return jnp.tanh(x @ params["w"]) + carry, None

        return jnp.sum(jax.lax.scan(body, jnp.zeros(WIDTH), x[0])[0])

    options = functools.partial(size_of, 512, 64, of_loop, **BOOK_KEEPING)
    assert options() == 8

    def device(num_bytes):
        stats = {"bytes_limit": num_bytes}
        return types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)

    sizes = []
    for num_bytes in (2**34, 3 * 2**20):
        devices = [device(num_bytes)]
        monkeypatch.setattr(jax, "local_devices", lambda x=devices: x)
        sizes.append(options())
    # A quarter of 2 MiB holds the float32 arrays of a few examples of 512 x 64 entries.
    assert sizes[0] == 64
    assert 1 <= sizes[1] <= 4
