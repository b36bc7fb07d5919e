"""The modes of dpmp that a self-check examines."""

from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import clipping, noise_addition
from dpmp.numerics._arithmetic import parse
from dpmp.numerics._grid import LARGEST_RESOLUTION
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


class _Mode(NamedTuple):
    name: str
    arithmetic: str
    resolution: int | None
    batches: tuple[BatchShape, ...]


def dpmp_subjects(*, include_unsafe: bool = False) -> Subjects:
    """The modes of dpmp that keep a promise.

    Args:
      include_unsafe: whether to add float noise, which keeps none.
    """
    small = (BatchShape(jnp.float32, 64, 1), BatchShape(jnp.bfloat16, 256))
    large = (*small, BatchShape(jnp.float32, 1024, 16), BatchShape(jnp.float32, 4096))
    one_by_one = BatchShape(jnp.float32, 4096, 1)
    modes = [
        _Mode("dpmp exact", "exact", None, (*large, one_by_one)),
        _Mode("dpmp exact, 2^22 units", "exact", LARGEST_RESOLUTION, small),
        _Mode("dpmp float32", "float32", None, large),
        _Mode("dpmp float32x2", "float32x2", None, (*large, one_by_one)),
    ]
    remarks = ("dpmp: no gradients of 1e-23, as a clip norm of 1e-22 is refused.",)
    if jax.config.read("jax_enable_x64"):
        modes.append(_Mode("dpmp float64", "float64", None, (*large, one_by_one)))
    else:
        remarks += ("dpmp float64: not checked, as JAX_ENABLE_X64 is not set.",)
    releases = [_releases(mode) for mode in modes]
    if include_unsafe:
        releases.append(unsafe_releases())
    return Subjects(tuple(map(_sums, modes)), tuple(releases), (_keys(),), remarks)


def _clip(
    mode: _Mode, l2_clip_norm: float, microbatch_size: int | None
) -> clipping.BoundedSensitivityCallable:
    return clipping.clipped_fun(
        lambda x: x,
        keep_batch_dim=False,
        l2_clip_norm=l2_clip_norm,
        microbatch_size=microbatch_size,
        arithmetic=mode.arithmetic,
        resolution=mode.resolution,
    )


def _sums(mode: _Mode) -> Sums:
    def make(
        l2_clip_norm: float, microbatch_size: int | None
    ) -> tuple[SumFn, Fraction]:
        fn = _clip(mode, l2_clip_norm, microbatch_size)
        units = parse(mode.arithmetic, resolution=mode.resolution).resolution
        return sum_fn(fn), Fraction(fn.sensitivity() if units is None else units)

    return Sums(mode.name, True, make, mode.batches, smallest_clip_norm=1e-15)


def _releases(mode: _Mode) -> Releases:
    privatizer = noise_addition.gaussian_privatizer(
        stddev=NOISE_MULTIPLIER, l2_sensitivity=1.0
    )
    return Releases(mode.name, True, draw_fn(_clip(mode, 1.0, None), privatizer))


def unsafe_releases() -> Releases:
    """Float noise, whose failure is expected."""
    privatizer = noise_addition.continuous_gaussian_privatizer(stddev=NOISE_MULTIPLIER)
    clip = _clip(_Mode("", "float32", None, ()), 1.0, None)
    return Releases("dpmp continuous (unsafe)", False, draw_fn(clip, privatizer))


def _keys() -> Keys:
    privatizer: Any = noise_addition.gaussian_privatizer(stddev=1.0)
    zeros = jnp.zeros(4, jnp.float32)
    impl = jax.random.key_impl(privatizer.init(zeros).prng_key)

    @jax.jit
    def noise(words: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl=impl)
        state = noise_addition.NoiseState(key, jnp.zeros((), jnp.int32))
        return privatizer.update(zeros, state)[0]

    return Keys(
        "dpmp",
        True,
        lambda: np.asarray(jax.random.key_data(privatizer.init(zeros).prng_key)),
        lambda words: np.asarray(noise(words)),
    )
