import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpmp import Policy


@pytest.mark.parametrize(
    ("name", "compute_dtype"),
    [("float32", jnp.float32), ("mixed_bfloat16", jnp.bfloat16)],
)
def test_presets_keep_float32_parameters(name, compute_dtype):
    policy = Policy.from_name(name)
    assert policy == Policy(jnp.float32, compute_dtype)
    assert policy.param_dtype == jnp.float32
    assert policy.compute_dtype == compute_dtype


def test_floats_are_cast():
    policy = Policy.from_name("mixed_bfloat16")
    tree = {"f16": jnp.ones(2, jnp.float16), "f32": np.ones(2, np.float32), "py": 1.5}
    assert {x.dtype for x in jax.tree.leaves(policy.cast_to_compute(tree))} == {
        jnp.dtype(jnp.bfloat16)
    }
    assert {x.dtype for x in jax.tree.leaves(policy.cast_to_param(tree))} == {
        jnp.dtype(jnp.float32)
    }


def test_casts_round_to_nearest():
    policy = Policy.from_name("mixed_bfloat16")
    # bfloat16 numbers from 1 to 2 are 2^-7 apart.
    cast = policy.cast_to_compute(jnp.float32([1 + 2.0**-9, 1 + 3 * 2.0**-9]))
    np.testing.assert_array_equal(cast.astype(jnp.float32), [1.0, 1 + 2.0**-7])


def test_what_is_not_float_is_left_alone():
    policy = Policy.from_name("mixed_bfloat16")
    tree = {
        "labels": np.arange(3),
        "mask": jnp.array([True, False]),
        "bytes": np.uint8([255]),
        "count": 3,
        "key": jax.random.key(0),
        "complex": jnp.ones(1, jnp.complex64),
        "nothing": None,
    }
    for cast in (policy.cast_to_compute, policy.cast_to_param):
        out = cast(tree)
        assert out["labels"].dtype == jnp.int32
        assert out["mask"].dtype == jnp.bool_
        assert out["bytes"].dtype == jnp.uint8
        assert out["complex"].dtype == jnp.complex64
        assert out["count"] == 3
        assert out["nothing"] is None
        assert out["key"].dtype == tree["key"].dtype
        np.testing.assert_array_equal(out["labels"], tree["labels"])


def test_casts_can_be_compiled():
    policy = Policy.from_name("mixed_bfloat16")
    out = jax.jit(policy.cast_to_compute)({"w": jnp.ones(3), "n": jnp.arange(2)})
    assert out["w"].dtype == jnp.bfloat16
    assert out["n"].dtype == jnp.int32


def test_a_policy_can_be_given_by_dtypes():
    policy = Policy(param_dtype="float32", compute_dtype="float16")
    assert policy == Policy(jnp.float32, np.dtype(np.float16))
    assert hash(policy) == hash(Policy(jnp.float32, jnp.float16))
    assert policy.cast_to_compute(1.0).dtype == jnp.float16


def test_float64_parameters_need_64_bit_mode():
    with pytest.raises(ValueError, match="float64 parameters need 64-bit mode"):
        Policy(jnp.float64, jnp.float32)
    with jax.enable_x64(True):
        policy = Policy(jnp.float64, jnp.float32)
        assert policy.cast_to_param(jnp.ones(2, jnp.float32)).dtype == jnp.float64


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_half_precision_parameters_are_refused(dtype):
    with pytest.raises(ValueError, match="param_dtype must be float32 or wider"):
        Policy(dtype, dtype)


@pytest.mark.parametrize("name", ["param_dtype", "compute_dtype"])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64], ids=str)
def test_dtypes_that_are_not_real_floats_are_refused(name, dtype):
    dtypes = {"param_dtype": jnp.float32, "compute_dtype": jnp.float32, name: dtype}
    with pytest.raises(ValueError, match=f"{name} must be a float dtype"):
        Policy(**dtypes)


@pytest.mark.parametrize("name", ["mixed_float16", "bfloat16", ""])
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match="policy must be one of"):
        Policy.from_name(name)
