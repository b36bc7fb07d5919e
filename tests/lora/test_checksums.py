import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpmp.lora._fingerprint import checksum, fingerprint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_a_checksum_sees_every_single_change(dtype):
    x = (100 * np.random.default_rng(0).normal(size=(3, 5))).astype(jnp.dtype(dtype))
    sums = {int(checksum(jnp.asarray(x)))}
    for index in np.ndindex(x.shape):
        changed = x.copy()
        changed.view(np.uint8)[index[0], index[1] * x.itemsize] ^= 1
        sums.add(int(checksum(jnp.asarray(changed))))
    assert len(sums) == x.size + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_checksum_sees_another_order_and_a_multiplied_array(dtype):
    x = np.arange(1, 65).astype(jnp.dtype(dtype))
    others = (x[::-1], *((x * n).astype(x.dtype) for n in (-1, 2, 0.25)))
    assert len({int(checksum(jnp.asarray(y))) for y in (x, *others)}) == 5


@pytest.mark.parametrize("dtype", ["complex64", "int4", "uint2", "float8_e4m3fn"])
def test_a_checksum_sees_arrays_of_rare_types(dtype):
    ones, zeros = (
        jnp.asarray(f((3, 4), jnp.dtype(dtype))) for f in (np.ones, np.zeros)
    )
    assert int(checksum(ones)) != int(checksum(zeros))


def test_a_checksum_does_not_depend_on_the_sharding():
    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P("a")))
    assert int(checksum(placed)) == int(checksum(x))


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_arrays_of_four_bits_may_be_on_a_device(dtype):
    x = jnp.arange(8).reshape(2, 4).astype(dtype)
    there = jax.device_put(x, jax.devices()[0])
    assert fingerprint({"a": there}) == fingerprint({"a": x})
    assert fingerprint({"a": there + 1}) != fingerprint({"a": x})


def test_a_model_may_have_keys():
    prints = {fingerprint({"key": jax.random.key(seed)}) for seed in (0, 0, 1)}
    assert len(prints) == 2


@pytest.mark.parametrize("x", [1e-6, True, "text", np.array(["text"]), np.array([{}])])
def test_models_are_arrays(x):
    with pytest.raises(ValueError, match=r"must be a tree of arrays; .*\['eps'\]"):
        fingerprint({"w": jnp.ones(2), "eps": x})
