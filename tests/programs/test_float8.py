import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from programs import equations
from small_runs import new_trainer

from dpmp import Policy
from dpmp.programs import rounded_products
from dpmp.programs.formats import round_to
from dpmp.programs.rounded_products import (
    Choice,
    _to_float8,
    is_native,
    with_rounded_products,
)

FORMATS = {"float8_e4m3fn": jnp.float8_e4m3fn, "float8_e5m2": jnp.float8_e5m2}

both_ways = pytest.mark.parametrize("native", [False, True], ids=["emulated", "native"])


def with_float8_products(fun, *, native=None):
    return with_rounded_products(fun, lambda _: Choice("float8"), native=native)


@functools.partial(jax.jit, static_argnums=1)
def rounded_to(x, dtype):
    return round_to(x, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"), [("float8_e4m3fn", jnp.bfloat16), ("float8_e5m2", jnp.float32)]
)
def test_rounds_to_the_nearest_number_of_the_format(name, dtype):
    x = np.random.default_rng(0).normal(size=500).astype(np.float32).astype(dtype)
    x[0] = largest = float(jnp.finfo(FORMATS[name]).max)  # so that the scale is 1
    x[1:] *= np.asarray(largest / 4, dtype)
    rounded = rounded_to(x, FORMATS[name])
    expected = np.asarray(x, np.float32).astype(getattr(ml_dtypes, name))
    np.testing.assert_array_equal(
        np.asarray(rounded, np.float32), expected.astype(np.float32)
    )


def test_what_is_not_finite_stays_so_and_zeros_and_nothing_stay_too():
    for x in ([np.inf, -np.inf, np.nan, 1.0], [0.0] * 4, np.zeros((0, 3))):
        rounded = rounded_to(np.float32(x), jnp.float8_e4m3fn)
        np.testing.assert_array_equal(rounded, np.float32(x))


def _by_hand(w, x, cotangent):
    """A product and its gradients, of rounded numbers."""
    w8, x8 = (round_to(a, jnp.float8_e4m3fn) for a in (w, x))
    c8 = round_to(cotangent, jnp.float8_e5m2)
    return x8 @ w8, x8.T @ c8, c8 @ w8.T


@both_ways
def test_operands_and_cotangents_of_products_are_rounded(native):
    rng = np.random.default_rng(1)
    shapes = (4, 3), (5, 4), (5, 3)
    args = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    fun = with_float8_products(lambda w, x: x @ w, native=native)

    @jax.jit
    def both(w, x, cotangent):
        y, vjp = jax.vjp(fun, w, x)
        return (y, *vjp(cotangent)), _by_hand(w, x, cotangent)

    computed, by_hand = both(*args)
    for a, b in zip(computed, by_hand, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    assert np.max(np.abs(computed[0] - args[1] @ args[0])) > 0.01


# With any axes; z is of size zero.
_PRODUCTS = """
    nk,km->nm nk,k->n k,k-> bnk,bkm->bnm kabn,mbkc->nbmca bn,bm->bnm nkac,mcka->nm
    zk,kn->zn nz,zk->nk
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (spec, "bfloat16" if i % 2 else "float32")
        for i, spec in enumerate(_PRODUCTS.split())
    ],
)
def test_native_products_are_the_same_numbers(spec, dtype):
    """And those of the gradient; up to the order of sums."""
    rng = np.random.default_rng(2)
    sizes = dict(zip("abckmnz", (2, 3, 2, 5, 4, 6, 0), strict=True))
    shapes = [[sizes[i] for i in part] for part in spec.split("->")[0].split(",")]
    operands = [
        jnp.asarray(rng.normal(size=s) * 10.0 ** rng.uniform(-3, 3), dtype)
        for s in shapes
    ]

    def products(native):
        fun = with_float8_products(lambda *xs: jnp.einsum(spec, *xs), native=native)
        y, vjp = jax.vjp(fun, *operands)
        cotangent = np.random.default_rng(3).normal(size=y.shape)
        return y, *vjp(jnp.asarray(cotangent, y.dtype))

    both = jax.jit(lambda: (products(True), products(False)))()
    for ours, expected in zip(*both, strict=True):
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
        ours, expected = np.float64(ours), np.float64(expected)
        unit = float(jnp.finfo(dtype).eps) * np.max(np.abs(expected), initial=0)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=unit)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "float8_e4m3fn"),
        ("bfloat16", "float8_e5m2"),
        ("float16", "float8_e4m3fn"),
    ],
)
def test_what_is_rounded_becomes_8_bits_without_another_rounding(dtype, name):
    rng = np.random.default_rng(4)
    largest = float(jnp.finfo(FORMATS[name]).max)
    sizes = 2.0 ** rng.uniform(-12, 8, size=(300, 1))
    x = sizes * rng.normal(size=(300, 16))
    # Some with the largest entry that has a scale, and those beside it.
    x[:100] = np.clip(x[:100] / sizes[:100] / 8, -0.8, 0.8) * 2.0**-3
    x[:100, 0] = largest * 2.0 ** rng.integers(-30, -20, size=100)
    x[::3] *= 1 + 2.0**-6

    @jax.jit
    @jax.vmap
    def both(x):
        rounded = round_to(x, FORMATS[name])
        return rounded, *_to_float8(rounded, FORMATS[name])

    rounded, numbers, exponents = both(np.float32(x).astype(jnp.dtype(dtype)))
    assert numbers.dtype == FORMATS[name]
    back = np.ldexp(np.float64(numbers), -np.asarray(exponents)[:, None])
    if dtype == "float16":  # which has the smallest of them only rounded
        back = np.float16(back)
    np.testing.assert_array_equal(back, np.float64(rounded))


@both_ways
def test_scales_far_from_one_leave_products_in_range(native):
    fun = jax.jit(with_float8_products(jnp.dot, native=native))
    for size, expected in ((2.0**80, np.inf), (2.0**-60, 2.0**-120)):
        x = np.float32([size, 0.0])
        assert fun(x, x[::-1]) == 0
        assert fun(x, x) == expected


def test_native_products_of_what_is_not_finite_are_not_numbers():
    fun = with_float8_products(jnp.dot, native=True)
    ones = np.ones(2, np.float32)

    @jax.jit
    def both(bad):
        _, vjp = jax.vjp(fun, ones, ones)
        return fun(jnp.stack([bad, 1.0]), ones), vjp(bad)[0]

    for bad in (np.inf, -np.inf, np.nan):
        assert all(np.isnan(x).all() for x in both(np.float32(bad)))


class _Device(NamedTuple):
    platform: str
    compute_capability: str | None = ""


def test_recent_gpus_have_float8(monkeypatch):
    for capability in ("8.9", "9.0", "12.0", "8.0", "gfx942", None):
        monkeypatch.setattr(jax, "devices", lambda x=capability: [_Device("gpu", x)])
        assert is_native() == (capability in ("8.9", "9.0", "12.0"))
    with jax.default_device("cpu"):
        monkeypatch.setattr(jax, "devices", lambda platform: [_Device(platform)])
        assert not is_native()


def test_loops_branches_and_remat_are_gone_into_forward_and_back():
    def loss(w, x):
        step = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        x, _ = jax.lax.scan(step, x, w)
        return jax.lax.cond(jnp.sum(x) > 0, lambda: x @ w[0], lambda: x @ w[1]).sum()

    args = np.ones((3, 2, 2), np.float32), np.ones((4, 2), np.float32)
    native = with_float8_products(loss, native=True)
    jaxpr = jax.make_jaxpr(jax.grad(native, (0, 1)))(*args).jaxpr
    products = {
        tuple(v.aval.dtype.name for v in eqn.invars)
        for eqn in equations(jaxpr)
        if eqn.primitive.name == "dot_general"
    }
    operands, cotangents = FORMATS
    assert products == {(operands, operands), (cotangents, operands)}
    emulated = with_float8_products(loss)
    names = [x.primitive.name for x in equations(jax.make_jaxpr(emulated)(*args).jaxpr)]
    # Two operands of each product.
    assert (names.count("reduce_precision"), names.count("dot_general")) == (6, 3)
    assert jnp.isfinite(jax.jit(jax.grad(emulated))(*args)).all()


def test_products_of_wider_operands_are_left_alone():
    policy = Policy.from_name("float8", float32_paths=("head",))

    def loss(params, x):
        hidden = (x @ params["w"]).astype(jnp.float32)
        return jnp.sum(hidden @ params["head"])

    params = policy.cast_to_compute({"w": jnp.ones((3, 3)), "head": jnp.ones((3, 3))})
    fun = policy.in_product_precision(loss)
    jaxpr = jax.make_jaxpr(fun)(params, jnp.ones((2, 3), jnp.bfloat16)).jaxpr
    names = [eqn.primitive.name for eqn in equations(jaxpr)]
    assert (names.count("reduce_precision"), names.count("dot_general")) == (2, 2)


@pytest.mark.slow
@both_ways
def test_the_preset_trains_and_says_if_it_is_emulated(monkeypatch, recwarn, native):
    monkeypatch.setattr(rounded_products, "is_native", lambda: native)
    trainer = new_trainer(
        loss_fn=lambda w, x: jnp.mean((x @ w) ** 2).astype(jnp.float32),
        policy="float8",
    )
    said = [w for w in recwarn if "emulated" in str(w.message)]
    assert len(said) == (not native)
    state = trainer.init(jnp.ones((5, 2)))
    data = np.ones((64, 5), np.float32)
    batch = data[: trainer.mechanism.padded_batch_size]
    assert ("f8E4M3FN" in trainer.lower(state, batch).as_text()) == native
    state = trainer.fit(state, data, progress=False)
    assert state.params.dtype == jnp.float32
    assert jnp.isfinite(state.params).all()
