"""That the example is what it says it is."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from programs import equations

from dpmp import Policy

PATH = pathlib.Path(__file__).parents[2] / "examples" / "finetune_transformer.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("finetune_transformer", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["mixed_bfloat16", "float32"])
def test_products_are_in_the_dtype_of_the_policy(example, name):
    policy = Policy.from_name(name, float32_paths=example.IN_FLOAT32)
    with jax.numpy_dtype_promotion("standard"):  # flax needs it
        graphdef, params = nnx.split(example.Transformer(nnx.Rngs(0)), nnx.Param)
        params = jax.eval_shape(policy.cast_to_compute, params)
        tokens = jax.ShapeDtypeStruct((1, example.CONTEXT + 1), jnp.int32)

        def loss(params):
            return jnp.sum(example.losses(graphdef, params, jnp.zeros_like(tokens))[0])

        eqns = equations(jax.make_jaxpr(loss)(params).jaxpr)
    products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    assert products
    for eqn in products:
        assert {str(v.aval.dtype) for v in eqn.invars} == {str(policy.compute_dtype)}
