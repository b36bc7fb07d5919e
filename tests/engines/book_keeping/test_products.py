import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import equations

from dpmp.engines.book_keeping._products import adapted

# Batch axes of one are "u" and "v".
_CONTRACTIONS = [
    ("ubtk,ubks->ubts", (1, 3, 4, 5), (1, 3, 5, 6)),
    ("butc,busc->buts", (3, 1, 4, 5), (3, 1, 6, 5)),
    ("buthd,bushd->buhts", (3, 1, 4, 2, 5), (3, 1, 6, 2, 5)),
    ("ubvk,ukvb->uvb", (1, 3, 1, 4), (1, 4, 1, 3)),
    ("uk,uk->u", (1, 4), (1, 4)),
    ("btk,bks->bts", (3, 4, 5), (3, 5, 6)),
    ("tk,ks->ts", (1, 3), (3, 4)),
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("contraction", "left", "right"), _CONTRACTIONS)
def test_products_are_what_they_were_without_batch_axes_of_one(
    contraction, left, right, dtype
):
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.integers(-3, 4, shape), dtype) for shape in (left, right)]

    def product(a, b):
        return jnp.einsum(contraction, a, b)

    expected, actual = product(*args), jax.jit(adapted(product))(*args)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(
        np.float32(actual), np.float32(expected), strict=True
    )  # small integers: nothing is rounded
    for eqn in equations(jax.make_jaxpr(adapted(product))(*args).jaxpr):
        if eqn.primitive.name == "dot_general":
            _, batch = eqn.params["dimension_numbers"]
            sizes = [eqn.invars[0].aval.shape[i] for i in batch[0]]
            assert all(size > 1 for size in sizes)
