"""The modes of dpmp that a self-check examines."""

import dataclasses
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpmp import _random, clipping, noise_addition
from dpmp.numerics import (
    LARGEST_RESOLUTION,
    Arithmetic,
    BoundedSums,
    ExactSums,
    parse_arithmetic,
)
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
    modes = [
        _Mode("dpmp exact", "exact", _ALL),
        _Mode("dpmp exact, 2^22 units", ExactSums(LARGEST_RESOLUTION), _SMALL),
        _Mode("dpmp float32", "float32", _LARGE),
        _Mode("dpmp bounded", BoundedSums(2**18), _ALL, "book_keeping"),
    ]
    remarks = ("dpmp: no gradients of 1e-23, because a clip norm of 1e-22 is refused.",)
    if jax.config.read("jax_enable_x64"):
        modes.append(_Mode("dpmp float64", "float64", _ALL))
    else:
        remarks += ("dpmp float64: not measured, because JAX_ENABLE_X64 is not set.",)
    releases = [mode.releases() for mode in modes]
    if include_unsafe:
        releases.append(unsafe_releases())
    sums = tuple(mode.sums() for mode in modes)
    return Subjects(sums, tuple(releases), (_keys(),), remarks)


class _Mode(NamedTuple):
    name: str
    arithmetic: str | Arithmetic
    batches: tuple[BatchShape, ...] = ()
    method: str = "per_example"

    def sums(self) -> Sums:
        def make(
            l2_clip_norm: float, microbatch_size: int | None
        ) -> tuple[SumFn, Fraction]:
            fn = self.clip(l2_clip_norm, microbatch_size)
            units = parse_arithmetic(self.arithmetic, method=self.method).resolution
            return sum_fn(fn), Fraction(fn.sensitivity() if units is None else units)

        return Sums(
            self.name,
            True,
            make,
            self.batches,
            smallest_clip_norm=1e-15,
            assumes_fixed_slots=self.clip(1.0).assumes_fixed_slots,
            # Book-keeping reserves more of the clip norm for rounding.
            smallest_norm=0.95 if self.method == "book_keeping" else 0.98,
        )

    def releases(self) -> Releases:
        privatizer = noise_addition.gaussian_privatizer(
            stddev=NOISE_MULTIPLIER, l2_sensitivity=1.0
        )
        return Releases(self.name, True, draw_fn(self.clip(1.0), privatizer))

    def clip(
        self, l2_clip_norm: float, microbatch_size: int | None = None
    ) -> clipping.BoundedSensitivityCallable:
        """A sum of clipped examples, or of gradients that are these examples."""
        options: dict[str, Any] = {
            "l2_clip_norm": l2_clip_norm,
            "microbatch_size": microbatch_size,
            "arithmetic": self.arithmetic,
        }
        if self.method == "per_example":
            return clipping.clipped_fun(lambda x: x, keep_batch_dim=False, **options)
        clipped = clipping.clipped_grad(
            _inner_product, keep_batch_dim=False, method=self.method, **options
        )

        def of_examples(batch: Any, **masks: Any) -> Any:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), batch)
            return clipped(zeros, batch, **masks)

        return dataclasses.replace(clipped, fun=of_examples)


def _inner_product(weights: Any, example: Any) -> jax.Array:
    """A loss whose gradient is the example."""

    def product(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tensordot(w, x, w.ndim).astype(jnp.float32)

    return jax.tree.reduce(jnp.add, jax.tree.map(product, weights, example))


def unsafe_releases() -> Releases:
    """Float noise, whose failure is expected."""
    privatizer = float_noise(stddev=NOISE_MULTIPLIER)
    clip = _Mode("", "float32").clip(1.0)
    return Releases("dpmp continuous (unsafe)", False, draw_fn(clip, privatizer))


def float_noise(
    *, stddev: float, prng_key: jax.Array | None = None
) -> optax.GradientTransformation:
    """A privatizer with float noise, as in other libraries; it breaks its promise.

    The guarantee of the Gaussian mechanism is about real numbers. A float32 sum of 0
    and one of 1 leave different lowest bits in the output, which tell the two apart
    nine times out of ten. And noise in float32 ends at 5.42 standard deviations
    ([Mironov 2012](https://doi.org/10.1145/2382196.2382264)).
    """

    def init(params: Any) -> Any:
        privatizer = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=prng_key)
        return privatizer.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        leaves, treedef = jax.tree.flatten(updates)
        step_key = _random.fold_in(state.prng_key, state.step)
        keys = [_random.fold_in(step_key, i) for i in range(len(leaves))]
        noisy = [
            x + stddev * jax.random.normal(key, x.shape)
            for x, key in zip(leaves, keys, strict=True)
        ]
        return treedef.unflatten(noisy), state._replace(step=state.step + 1)

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
