"""Do exact sums and noise keep their promises on this device?

Checked on shapes that are large enough for the kernels that real models get, beside
integers on the host:

- exact sums are the same bits for any microbatch size, order and padding;
- no example contributes more than the clip norm, be it rounded upward, huge or not
  finite;
- noise is the same integers as on a CPU.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpmp
from benchmarks.gpu import programs
from benchmarks.gpu.programs import Session, finding
from dpmp import noise_addition
from dpmp.clipping import clipped_fun
from dpmp.numerics import ExactSums
from dpmp.numerics._grid import DEFAULT_RESOLUTION

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_RESOLUTIONS = (2**15 - 1, 2**22)


def run(session: Session) -> None:
    """Runs all checks."""
    programs.run_checks(session, (exact_sums, contributions, noise))


def _exact_sum(
    microbatch_size: int | None = None, resolution: int = DEFAULT_RESOLUTION
) -> Callable[..., Any]:
    fn = clipped_fun(
        lambda x: x,
        keep_batch_dim=False,
        l2_clip_norm=1.0,
        arithmetic=ExactSums(resolution),
        microbatch_size=microbatch_size,
    )
    return jax.jit(lambda x, empty: fn(x, is_padding_example=empty).counts)


def _gradients(is_tiny: bool, dtype: Any) -> jax.Array:
    """Of all sizes, most of them to be clipped."""
    shape = (16, 500) if is_tiny else (256, 100_000)
    keys = jax.random.split(jax.random.key(0))
    scales = jnp.exp2(jax.random.randint(keys[0], (shape[0], 1), -12, 4))
    return (jax.random.normal(keys[1], shape) * scales).astype(dtype)


def exact_sums(session: Session) -> Iterator[dict[str, Any]]:
    """One sum, cut up, ordered and padded in several ways."""
    for dtype in (jnp.bfloat16, jnp.float32):
        batch = _gradients(session.is_tiny, dtype)
        size = len(batch)
        none = np.zeros(size, bool)
        order = np.random.default_rng(0).permutation(size)
        gaps = np.arange(2 * size) % 2 == 1
        garbage = jnp.full_like(batch, jnp.nan)
        padded = jnp.stack([batch, garbage], axis=1).reshape(2 * size, -1)
        ways = {
            "microbatches of 1": (batch, none, 1),
            "microbatches of 8": (batch, none, 8),
            "half at a time": (batch, none, size // 2),
            "another order": (batch[order], none, None),
            "padding": (padded, gaps, None),
            "padding, in microbatches": (padded, gaps, 8),
        }
        whole = _exact_sum()(batch, none)
        for name, (x, empty, microbatch_size) in ways.items():
            other = _exact_sum(microbatch_size)(x, empty)
            what = f"entries that differ in {name}, {np.dtype(dtype).name}"
            yield finding(what, np.sum(whole != other), 0)


def contributions(session: Session) -> Iterator[dict[str, Any]]:
    """The norms, in integers, of contributions that are hard to clip."""
    size = _num_entries(session.is_tiny)
    for dtype in _DTYPES:
        examples = _hard_examples(size, dtype)
        for resolution in _RESOLUTIONS:
            clipped = _exact_sum(resolution=resolution)
            ratios = {
                name: _norm(clipped(x[None], np.zeros(1, bool))) / resolution
                for name, x in examples.items()
            }
            where = f"{np.dtype(dtype).name}, resolution {resolution}"
            what = f"largest contribution, over the clip norm; {where}"
            yield finding(what, max(ratios.values()), 1)
            lost = [k for k, ratio in ratios.items() if ratio < 0.95 and "not" not in k]
            what = f"examples of which much is lost; {where}: {lost}"
            yield finding(what, len(lost), 0)
            bad = [ratio for name, ratio in ratios.items() if "not finite" in name]
            yield finding(f"what is not finite contributes; {where}", max(bad), 0)


def _num_entries(is_tiny: bool) -> int:
    return 500 if is_tiny else 300_000


def _hard_examples(size: int, dtype: Any) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    largest = float(jnp.finfo(dtype).max)
    examples = {
        "random": 10 * rng.normal(size=size),
        "equal, rounded": np.full(size, 1 / 3),
        "ones": np.ones(size),
        "a spike": np.where(np.arange(size) == size // 3, 1e4, 1e-3),
        "many sizes": np.exp2(rng.integers(-12, 10, size)),
        "just above the clip norm": np.full(size, (1 + 2.0**-7) / np.sqrt(size)),
        "not finite: infinite": np.where(np.arange(size) == 7, np.inf, 1.0),
        "not finite: NaN": np.where(np.arange(size) == 7, np.nan, 1.0),
        "not of a norm that is finite": np.full(size, largest),
        "not large": np.full(size, 1e-30),
    }
    return {k: jnp.asarray(np.float32(x)).astype(dtype) for k, x in examples.items()}


def _norm(steps: Any) -> float:
    """The norm of integers, whose squares add up to less than 2^63 if all is well."""
    flat = np.asarray(steps).ravel().astype(object)
    return float(np.sqrt(float(sum(flat * flat))))


def _drawer(size: int, resolution: int) -> Callable[..., Any]:
    def draw(step: jax.Array) -> jax.Array:
        key = jax.random.key(0, impl="threefry2x32")
        privatizer: Any = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=key)
        zeros = dpmp.GridArray(jnp.zeros(size, jnp.int32), 1 / resolution)
        return privatizer.update(zeros, noise_addition.NoiseState(key, step))[0]

    return draw


def noise(session: Session) -> Iterator[dict[str, Any]]:
    """The same noise on this device and on a CPU."""
    size = 1000 if session.is_tiny else 2_000_000
    for resolution in (2**15, 2**20):
        here = jax.jit(_drawer(size, resolution))(jnp.int32(3))
        with jax.default_device(jax.devices("cpu")[0]):
            there = np.asarray(jax.jit(_drawer(size, resolution))(jnp.int32(3)))
        what = f"entries of noise that are not those of a CPU; 1/{resolution}"
        yield finding(what, np.sum(here != there), 0)
        error = abs(np.var(here) - 1)
        yield finding(f"error of the variance; 1/{resolution}", error, 0.2)
