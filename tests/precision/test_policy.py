import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import equations

from dpmp import Policy


@pytest.mark.parametrize(
    ("name", "compute_dtype", "matmul_precision", "float8_scale"),
    [
        ("tf32", jnp.float32, "tensorfloat32", None),
        ("mixed_float16", jnp.float16, None, None),
        ("float8", jnp.bfloat16, None, "per_example"),
    ],
)
def test_presets_keep_float32_parameters(
    name, compute_dtype, matmul_precision, float8_scale
):
    assert Policy.from_name(name) == Policy(
        jnp.float32, compute_dtype, matmul_precision, float8_scale=float8_scale
    )


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16], ids=str)
def test_stochastic_rounding_is_for_bfloat16_parameters(dtype):
    with pytest.raises(ValueError, match="bfloat16 with stochastic_rounding"):
        Policy(dtype, jnp.bfloat16, stochastic_rounding=True)


@pytest.mark.parametrize(
    ("name", "dtype"), [("param_dtype", jnp.complex64), ("compute_dtype", jnp.int32)]
)
def test_dtypes_that_are_not_real_floats_are_refused(name, dtype):
    dtypes = {"param_dtype": jnp.float32, "compute_dtype": jnp.float32, name: dtype}
    with pytest.raises(ValueError, match=f"{name} must be a float dtype"):
        Policy(**dtypes)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="policy must be one of"):
        Policy.from_name("bfloat16")


_PARAMS = {"embed": jnp.ones(2), "layers": [{"w": jnp.ones(3)}, {"w": jnp.ones(3)}]}


@pytest.mark.parametrize(
    ("paths", "in_float32"),
    [
        ((), set()),
        (("embed",), {"embed"}),
        (("^embed$", r"layers/1/"), {"embed", "layers/1/w"}),
        (("w",), {"layers/0/w", "layers/1/w"}),
    ],
)
def test_parameters_at_some_paths_stay_in_float32(paths, in_float32):
    policy = Policy.from_name("mixed_bfloat16", float32_paths=paths)
    leaves = jax.tree_util.tree_leaves_with_path(policy.cast_to_compute(_PARAMS))
    assert in_float32 == {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, x in leaves
        if x.dtype == jnp.float32
    }


def test_paths_say_nothing_of_inputs():
    policy = Policy.from_name("mixed_bfloat16", float32_paths=("x",))
    batch = policy.cast_inputs({"x": jnp.ones(2), "ids": jnp.arange(2)})
    assert (batch["x"].dtype, batch["ids"].dtype) == (jnp.bfloat16, jnp.int32)


def test_a_path_that_is_nowhere_is_refused():
    policy = Policy.from_name("mixed_bfloat16", float32_paths=("embed", "heads?"))
    with pytest.raises(ValueError, match=r"unused=\['heads\?'\]"):
        policy.cast_to_compute(_PARAMS)


def test_one_path_has_to_be_in_a_tuple():
    with pytest.raises(ValueError, match="tuple of regular expressions"):
        Policy(jnp.float32, jnp.float32, float32_paths="embed")


def _precisions(fun, *args):
    return {
        str(eqn.params["precision"])
        for eqn in equations(jax.make_jaxpr(fun)(*args).jaxpr)
        if eqn.primitive.name == "dot_general"
    }


def test_products_of_a_loss_and_of_its_gradient_have_the_precision_asked_for():
    def loss(w):
        return jnp.sum(jnp.tanh(w @ w))

    w = jnp.ones((2, 2))
    scoped = Policy.from_name("tf32").in_product_precision(loss)
    expected = _precisions(lambda w: jnp.matmul(w, w, precision="tensorfloat32"), w)
    assert _precisions(jax.grad(scoped), w) == expected != _precisions(loss, w)
    # Nothing is left behind.
    assert _precisions(jax.grad(loss), w) == _precisions(loss, w)
    assert Policy.from_name("mixed_bfloat16").in_product_precision(loss) is loss


def test_a_precision_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="matmul_precision must be one of"):
        Policy(jnp.float32, jnp.float32, "tf32")
