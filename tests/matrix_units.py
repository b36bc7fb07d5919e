"""Matrix units of NVIDIA GPUs, emulated: they truncate where processors round.

Fasi, Higham, Mikaitis and Pranesh (Numerical behavior of NVIDIA tensor cores, 2021)
found the following behaviour by experiments. A unit takes some products of 16-bit
numbers (4 on a V100, 8 on an A100) and a float32 number at once. It aligns them to the
largest of their exponents, cuts off all bits that are too small for that, and adds up
the rest. Newer units keep one or two bits more than here. In 8 bits, an H100 keeps ten
bits fewer (DeepSeek-V3 technical report, 2024).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

FRACTION_BITS = 23


def add_products(left, right, *, at_once=4, fraction_bits=FRACTION_BITS):
    """The sums of products over the last axis, (..., n), as such a unit adds them."""
    # In float64, products of 24 bits and sums of a few truncated ones are exact.
    products = np.asarray(left, np.float64) * np.asarray(right, np.float64)
    total = np.zeros(products.shape[:-1])
    for start in range(0, products.shape[-1], at_once):
        terms = products[..., start : start + at_once]
        terms = np.concatenate([terms, total[..., None]], axis=-1)
        _, exponents = np.frexp(np.max(np.abs(terms), axis=-1, keepdims=True))
        terms = _cut_off(terms, exponents, fraction_bits)
        total = np.sum(terms, axis=-1)
        total = _cut_off(total, np.frexp(total)[1], fraction_bits)
    return total


def _cut_off(x, exponents, fraction_bits):
    unit = np.ldexp(1.0, exponents - 1 - fraction_bits)
    return np.trunc(x / unit) * unit


def contract(a, b, contracting, batch=((), ()), **unit):
    """`_linalg.contract` by `add_products`, in compiled functions too."""
    shape = jax.eval_shape(
        lambda a, b: jax.lax.dot_general(a, b, (contracting, batch)), a, b
    ).shape

    def multiply(a, b):
        assert min(a.dtype.itemsize, b.dtype.itemsize) >= 2
        left, right = map(_ordered, (a, b), contracting, batch)
        products = add_products(left[:, :, None], right[:, None], **unit)
        return products.reshape(shape).astype(np.float32)

    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.pure_callback(multiply, result, a, b, vmap_method="sequential")


def _ordered(x, contracted, batch):
    free = [i for i in range(x.ndim) if i not in (*batch, *contracted)]
    parts = batch, free, contracted
    sizes = [math.prod(x.shape[i] for i in axes) for axes in parts]
    return np.transpose(x, [*batch, *free, *contracted]).reshape(sizes)
