"""Noise on several devices: each draws that of its own part of a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from benchmarks.collectives import collectives
from dpmp.noise_addition import gaussian_privatizer
from dpmp.numerics._grid import GridArray

P = jax.P
KEY = jax.random.key(3)
UNIT = 2.0**-15

# Arrays that share a stack, one with a draw of its own, and small ones that share one.
SHAPES = [(256, 128)] * 4 + [(512, 256), (64,), (16, 8)]


def make_mesh(size=8):
    devices = jax.devices()[:size]
    return jax.make_mesh(
        (size,), ("data",), axis_types=(AxisType.Auto,), devices=devices
    )


def make_sum(make_steps):
    return [GridArray(make_steps(shape), UNIT) for shape in SHAPES]


def zeros(shape):
    return np.zeros(shape, np.int32)


PRIVATIZER = gaussian_privatizer(stddev=0.5, prng_key=KEY)


def noisy(total, mesh=None):
    """The noisy arrays, on the mesh as `DPTrainer` sets it."""

    def update(total, state):
        if mesh is None:
            return PRIVATIZER.update(total, state)[0]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return PRIVATIZER.update(total, state)[0]

    return jax.jit(update), (total, PRIVATIZER.init(total))


def test_each_device_draws_the_noise_of_its_own_part():
    mesh = make_mesh()

    def compiled(spec):
        sharding = NamedSharding(mesh, spec)
        fn, args = noisy(
            make_sum(lambda s: jax.ShapeDtypeStruct(s, jnp.int32, sharding=sharding)),
            mesh,
        )
        return fn.lower(*args).compile()

    whole, parts = compiled(P()), compiled(P("data"))
    # The whole noise of the largest stack, in bytes. Small arrays are drawn as a whole.
    of_stack, of_small = 4 * 4 * 256 * 128, 4 * (64 + 16 * 8)
    assert whole.memory_analysis().temp_size_in_bytes > 0.9 * of_stack
    temporary = parts.memory_analysis().temp_size_in_bytes
    assert temporary < 1.2 * of_stack / 8 + 4 * of_small
    assert not collectives(parts.as_text())


def test_parts_have_the_noise_of_the_whole_and_no_two_the_same():
    mesh = make_mesh()
    fn, args = noisy(make_sum(zeros))
    expected = fn(*args)
    sharding = NamedSharding(mesh, P("data"))
    fn, args = noisy(jax.device_put(make_sum(zeros), sharding), mesh)
    found = fn(*args)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for x in found:
        parts = [np.asarray(shard.data) for shard in x.addressable_shards]
        assert not any(
            np.array_equal(a, b) for i, a in enumerate(parts) for b in parts[:i]
        )


def add_noise_on(mesh, **options):
    state = PRIVATIZER.init(None)
    return jax.shard_map(
        lambda x: PRIVATIZER.update(x, state)[0],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        **options,
    )


def test_noise_inside_of_shard_map_is_for_one_device():
    x = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match=r"outside of shard_map.*under jax\.jit"):
        add_noise_on(make_mesh())(x)
    alone = jax.jit(add_noise_on(make_mesh(1), check_vma=False))(x)
    expected, _ = jax.jit(PRIVATIZER.update)(x, PRIVATIZER.init(None))
    np.testing.assert_array_equal(alone, expected)
