import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import equations
from refusals import refusals

from dpmp import Policy


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tf32", Policy("float32", "float32", "tensorfloat32")),
        ("mixed_float16", Policy(jnp.float32, np.dtype(np.float16))),
        ("float8", Policy(jnp.float32, jnp.bfloat16, float8_scale="per_example")),
    ],
)
def test_presets_keep_float32_parameters(name, expected):
    assert Policy.from_name(name) == expected
    assert hash(Policy.from_name(name)) == hash(expected)


def test_floats_are_cast_and_round_to_nearest():
    policy = Policy.from_name("mixed_bfloat16")
    tree = {"f16": jnp.ones(2, jnp.float16), "f32": np.ones(2, np.float32), "py": 1.5}
    for cast, dtype in (
        (policy.cast_to_compute, jnp.bfloat16),
        (jax.jit(policy.cast_to_compute), jnp.bfloat16),
        (policy.cast_to_param, jnp.float32),
    ):
        assert {x.dtype for x in jax.tree.leaves(cast(tree))} == {jnp.dtype(dtype)}
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


def test_float64_parameters_need_64_bit_mode():
    with pytest.raises(ValueError, match="float64 parameters need 64-bit mode"):
        Policy(jnp.float64, jnp.float32)
    with jax.enable_x64(True):
        policy = Policy(jnp.float64, jnp.float32)
        assert policy.cast_to_param(jnp.ones(2, jnp.float32)).dtype == jnp.float64


@refusals(
    ("param_dtype", (jnp.bfloat16, jnp.float16), "must be float32 or wider"),
    ("param_dtype", (jnp.complex64,), "param_dtype must be a float dtype"),
    ("compute_dtype", (jnp.int32,), "compute_dtype must be a float dtype"),
    ("stochastic_rounding", (True,), "bfloat16 with stochastic_rounding"),
    ("float32_paths", ("embed",), "tuple of regular expressions"),
    ("matmul_precision", ("tf32",), "matmul_precision must be one of"),
)
def test_fields_out_of_range_are_refused(wrong, message):
    fields = {"param_dtype": jnp.float32, "compute_dtype": jnp.float32, **wrong}
    with pytest.raises(ValueError, match=message):
        Policy(**fields)


def test_stochastic_rounding_is_for_bfloat16_parameters():
    with pytest.raises(ValueError, match="bfloat16 with stochastic_rounding"):
        Policy(jnp.float16, jnp.bfloat16, stochastic_rounding=True)


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


def test_paths_say_nothing_of_inputs_and_must_be_somewhere():
    policy = Policy.from_name("mixed_bfloat16", float32_paths=("x", "heads?"))
    batch = policy.cast_inputs({"x": jnp.ones(2), "ids": jnp.arange(2)})
    assert (batch["x"].dtype, batch["ids"].dtype) == (jnp.bfloat16, jnp.int32)
    policy = Policy.from_name("mixed_bfloat16", float32_paths=("embed", "heads?"))
    with pytest.raises(ValueError, match=r"unused=\['heads\?'\]"):
        policy.cast_to_compute(_PARAMS)


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
