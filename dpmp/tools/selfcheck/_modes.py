"""The modes of dpmp that a self-check examines."""

import dataclasses
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpmp import _random, clipping, noise_addition, numerics, strategies
from dpmp.tools.selfcheck._subjects import (
    NOISE_MULTIPLIER,
    BatchShape,
    Keys,
    Releases,
    Subjects,
    SumFn,
    Sums,
    draw_fn,
    sum_fn,
)

_SMALL = (BatchShape(jnp.float32, 64, 1), BatchShape(jnp.bfloat16, 256))
_LARGE = (*_SMALL, BatchShape(jnp.float32, 1024, 16), BatchShape(jnp.float32, 4096))
_ALL = (*_LARGE, BatchShape(jnp.float32, 4096, 1))


def dpmp_subjects(*, include_unsafe: bool = False) -> Subjects:
    """The modes of dpmp that keep a promise, and float noise, which keeps none."""
    fine = numerics.ExactSums(numerics.LARGEST_RESOLUTION)
    modes = [
        _mode("dpmp exact", "exact", _ALL),
        _mode("dpmp exact, 2^22 units", fine, _SMALL),
        _mode("dpmp float32", "float32", _LARGE),
        # Book-keeping reserves more of the clip norm for rounding.
        _mode("dpmp bounded", numerics.BoundedSums(2**18), _ALL, "book_keeping", 0.95),
    ]
    remarks = ("dpmp: no gradients of 1e-23, because a clip norm of 1e-22 is refused.",)
    if jax.config.read("jax_enable_x64"):
        modes.append(_mode("dpmp float64", "float64", _ALL))
    else:
        remarks += ("dpmp float64: not measured, because JAX_ENABLE_X64 is not set.",)
    sums, releases = zip(*modes, strict=True)
    releases += (_correlated_releases(),)
    if include_unsafe:
        releases += (unsafe_releases(),)
    return Subjects(sums, releases, (_keys(),), remarks)


def _mode(
    name: str,
    arithmetic: str | numerics.Arithmetic,
    batches: tuple[BatchShape, ...],
    method: str = "per_example",
    smallest_norm: float = 0.98,
) -> tuple[Sums, Releases]:
    def make(
        l2_clip_norm: float, microbatch_size: int | None
    ) -> tuple[SumFn, Fraction]:
        fn = _clip(arithmetic, method, l2_clip_norm, microbatch_size)
        units = numerics.parse_arithmetic(arithmetic, method=method).resolution
        return sum_fn(fn), Fraction(fn.sensitivity() if units is None else units)

    clip = _clip(arithmetic, method)
    sums = Sums(
        name,
        True,
        make,
        batches,
        smallest_clip_norm=1e-15,
        assumes_fixed_slots=clip.assumes_fixed_slots,
        smallest_norm=smallest_norm,
    )
    privatizer = noise_addition.gaussian_privatizer(
        stddev=NOISE_MULTIPLIER, l2_sensitivity=1.0
    )
    return sums, Releases(name, True, draw_fn(clip, privatizer))


def _clip(
    arithmetic: str | numerics.Arithmetic,
    method: str = "per_example",
    l2_clip_norm: float = 1.0,
    microbatch_size: int | None = None,
) -> clipping.BoundedSensitivityCallable:
    """A sum of clipped examples, or of gradients that are these examples."""
    options: dict[str, Any] = {
        "l2_clip_norm": l2_clip_norm,
        "microbatch_size": microbatch_size,
        "arithmetic": arithmetic,
        "keep_batch_dim": False,
    }
    if method == "per_example":
        return clipping.clipped_fun(lambda x: x, **options)
    clipped = clipping.clipped_grad(_inner_product, method=method, **options)

    def of_examples(batch: Any, **masks: Any) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), batch)
        return clipped(zeros, batch, **masks)

    return dataclasses.replace(clipped, fun=of_examples)


def _inner_product(weights: Any, example: Any) -> jax.Array:
    """A loss whose gradient is the example."""

    def product(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tensordot(w, x, w.ndim).astype(jnp.float32)

    return jax.tree.reduce(jnp.add, jax.tree.map(product, weights, example))


def _correlated_releases() -> Releases:
    """Noise that is correlated over steps, if the noise of earlier steps is known."""
    strategy = strategies.banded_toeplitz(4, iterations=64)
    privatizer = noise_addition.correlated_gaussian_privatizer(
        stddev=NOISE_MULTIPLIER / strategy.sensitivity, strategy=strategy
    )
    draw = draw_fn(_clip("exact"), privatizer, coefficients=strategy.coefficients)
    return Releases("dpmp exact, correlated", True, draw)


def unsafe_releases() -> Releases:
    """Float noise, whose failure is expected."""
    draw = draw_fn(_clip("float32"), float_noise(stddev=NOISE_MULTIPLIER))
    return Releases("dpmp continuous (unsafe)", False, draw)


def float_noise(
    *, stddev: float, prng_key: jax.Array | None = None
) -> optax.GradientTransformation:
    """A privatizer with float noise, as in other libraries; it breaks its promise.

    The guarantee of the Gaussian mechanism is about real numbers. A float32 sum of 0
    and one of 1 leave different lowest bits in the output, which tell the two apart
    nine times out of ten. And noise in float32 ends at 5.42 standard deviations
    ([Mironov 2012](https://doi.org/10.1145/2382196.2382264)).
    """
    init = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=prng_key).init

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        key = _random.fold_in(state.prng_key, state.step)
        noise = optax.tree_utils.tree_random_like(key, updates)
        noisy = jax.tree.map(lambda x, z: x + stddev * z, updates, noise)
        return noisy, state._replace(step=state.step + 1)

    return optax.GradientTransformation(init, update)


def _keys() -> Keys:
    privatizer: Any = noise_addition.gaussian_privatizer(stddev=1.0)
    zeros = jnp.zeros(4, jnp.float32)
    impl = jax.random.key_impl(privatizer.init(zeros).prng_key)

    def draw() -> np.ndarray:
        return np.asarray(jax.random.key_data(privatizer.init(zeros).prng_key))

    @jax.jit
    def noise(words: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl=impl)
        state = noise_addition.NoiseState(key, jnp.zeros((), jnp.int32))
        return privatizer.update(zeros, state)[0]

    return Keys("dpmp", True, draw, lambda words: np.asarray(noise(words)))
