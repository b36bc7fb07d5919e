import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import equations

from dpmp._fence import materialize


def _fun(x):
    def compute():
        y = jnp.sin(x)
        return {"y": y, "again": (y, x, y), "none": None}

    return materialize(compute, x)


@pytest.mark.parametrize("transform", [lambda fun: fun, jax.jit, jax.vmap])
def test_what_leaves_a_branch_is_what_was_computed(transform):
    x = jnp.linspace(-1.0, 1.0, 5)
    out = transform(_fun)(x)
    assert out["none"] is None
    for y in (out["y"], out["again"][0], out["again"][2]):
        np.testing.assert_allclose(y, jnp.sin(x), rtol=1e-6)
    np.testing.assert_array_equal(out["again"][1], x)


def test_what_leaves_a_branch_twice_is_there_once():
    jaxpr = jax.make_jaxpr(_fun)(jnp.ones(5)).jaxpr
    (branch,) = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "cond")
    assert len(branch.outvars) == 2
