import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpmp.lora._fingerprint import checksum

DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "bool", "uint32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_sees_every_single_change(dtype):
    x = np.asarray((100 * jax.random.normal(jax.random.key(0), (3, 5))).astype(dtype))
    sums = {int(checksum(jnp.asarray(x)))}
    for index in np.ndindex(x.shape):
        changed = x.copy()
        changed.view(np.uint8)[index[0], index[1] * x.itemsize] ^= 1
        sums.add(int(checksum(jnp.asarray(changed))))
    assert len(sums) == x.size + 1


def test_a_checksum_sees_an_exchange_of_two_entries():
    assert int(checksum(jnp.array([1, 2]))) != int(checksum(jnp.array([2, 1])))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_checksum_sees_a_multiplied_array(dtype):
    x = jnp.arange(1, 65).astype(dtype)
    sums = {int(checksum(x * jnp.asarray(n, dtype))) for n in (1, -1, 2, 0.25)}
    assert len(sums) == 4


@pytest.mark.parametrize("dtype", ["complex64", "int4", "uint2", "float8_e4m3fn"])
def test_a_checksum_sees_arrays_of_rare_types(dtype):
    x = jnp.ones((3, 4)).astype(dtype)
    assert int(checksum(x)) != int(checksum(jnp.zeros_like(x)))


def test_a_checksum_does_not_depend_on_the_sharding():
    x = jax.random.normal(jax.random.key(0), (8, 6))
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P("a")))
    assert int(checksum(placed)) == int(checksum(x))
