import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import equations

from dpmp import Policy


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tf32", Policy("float32", "float32", "tensorfloat32")),
        ("mixed_float16", Policy(jnp.float32, np.dtype(np.float16))),
        ("float8", Policy(jnp.float32, jnp.bfloat16, products="float8")),
    ],
)
def test_presets_keep_float32_parameters(name, expected):
    assert Policy.from_name(name) == expected
    assert hash(Policy.from_name(name)) == hash(expected)


OTHERS = {
    "labels": np.arange(3),
    "mask": jnp.array([True, False]),
    "bytes": np.uint8([255]),
    "count": 3,
    "key": jax.random.key(0),
    "complex": jnp.ones(1, jnp.complex64),
    "nothing": None,
}


def test_only_floats_are_cast_and_round_to_nearest():
    policy = Policy.from_name("mixed_bfloat16")
    floats = [jnp.ones(2, jnp.float16), np.ones(2, np.float32), 1.5]
    for cast, dtype in (
        (policy.cast_to_compute, jnp.bfloat16),
        (jax.jit(policy.cast_to_compute), jnp.bfloat16),
        (policy.cast_to_param, jnp.float32),
    ):
        found, others = cast((floats, OTHERS))
        assert {x.dtype for x in found} == {jnp.dtype(dtype)}
        kinds, expected = jax.tree.map(jnp.result_type, (others, OTHERS))
        assert kinds == expected
        np.testing.assert_array_equal(others["labels"], OTHERS["labels"])
    # bfloat16 numbers from 1 to 2 are 2^-7 apart.
    cast = policy.cast_to_compute(jnp.float32([1 + 2.0**-9, 1 + 3 * 2.0**-9]))
    np.testing.assert_array_equal(cast.astype(jnp.float32), [1.0, 1 + 2.0**-7])


def test_float64_parameters_need_64_bit_mode():
    with pytest.raises(ValueError, match="float64 parameters need 64-bit mode"):
        Policy(jnp.float64, jnp.float32)
    with jax.enable_x64(True):
        policy = Policy(jnp.float64, jnp.float32)
        assert policy.cast_to_param(jnp.ones(2, jnp.float32)).dtype == jnp.float64


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"param_dtype": jnp.bfloat16}, "must be float32 or wider"),
        ({"param_dtype": jnp.complex64}, "param_dtype must be a float dtype"),
        ({"stochastic_rounding": True}, "bfloat16 with stochastic_rounding"),
        (
            {"param_dtype": jnp.float16, "stochastic_rounding": True},
            "bfloat16 with stochastic_rounding",
        ),
    ],
)
def test_narrow_parameters_need_stochastic_rounding(wrong, message):
    fields = {"param_dtype": jnp.float32, "compute_dtype": jnp.float32, **wrong}
    with pytest.raises(ValueError, match=message):
        Policy(**fields)


_PARAMS = {"embed": jnp.ones(2), "layers": [{"w": jnp.ones(3)}, {"w": jnp.ones(3)}]}


def test_parameters_at_some_paths_stay_in_float32():
    policy = Policy.from_name("mixed_bfloat16", float32_paths=("^embed$", "1/w"))
    cast = policy.cast_to_compute(_PARAMS)
    dtypes = jax.tree.map(lambda x: x.dtype.name, cast)
    layers = [{"w": "bfloat16"}, {"w": "float32"}]
    assert dtypes == {"embed": "float32", "layers": layers}
    # They are no paths of inputs, and must be somewhere.
    batch = policy.cast_inputs({"embed": jnp.ones(2), "ids": jnp.arange(2)})
    assert (batch["embed"].dtype, batch["ids"].dtype) == (jnp.bfloat16, jnp.int32)
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


def test_updates_are_for_stored_parameters_and_not_for_their_copy():
    policy = Policy.from_name("mixed_bfloat16")
    params, updates = {"w": jnp.ones(3)}, {"w": jnp.full(3, 1e-4)}
    assert policy.apply_updates(params, updates)["w"][0] > 1
    with pytest.raises(ValueError, match="must be the stored ones, in float32"):
        policy.apply_updates(policy.cast_to_compute(params), updates)
