"""Do other libraries keep the promises that dpmp makes of its arithmetic?

The measurements of `python -m dpmp selfcheck` are made of dpmp, of its float noise, of
jax_privacy, and, where it is installed, of Opacus.

    python -m benchmarks.selfcheck_others        # three minutes on two cores
"""

import functools
import os
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from jax_privacy import clipping as their_clipping
from jax_privacy import noise_addition as their_noise

from benchmarks import harness
from dpmp.tools import checks
from dpmp.tools.selfcheck import command
from dpmp.tools.selfcheck._subjects import (
    NOISE_MULTIPLIER,
    BatchShape,
    Keys,
    Releases,
    Rows,
    Sizes,
    Subjects,
    SumFn,
    Sums,
    dpmp_subjects,
    draw_fn,
    sum_fn,
)


def all_subjects() -> Subjects:
    """Gives dpmp with its float noise, jax_privacy, and Opacus if it is installed."""
    parts = [dpmp_subjects(include_unsafe=True), _jax_privacy(), _opacus()]
    return Subjects(*(sum(field, ()) for field in zip(*parts, strict=True)))


def _jax_privacy() -> Subjects:
    default, float32 = "jax_privacy default", "jax_privacy float32"
    in_bfloat16 = tuple(BatchShape(jnp.bfloat16, size, 1) for size in (64, 256))
    in_float32 = tuple(BatchShape(jnp.float32, size, 1) for size in (64, 1024, 4096))
    return Subjects(
        (
            Sums(default, False, _jax_privacy_sum(None), in_bfloat16),
            Sums(float32, False, _jax_privacy_sum(jnp.float32), in_float32),
        ),
        (
            Releases(default, False, _jax_privacy_release(jnp.bfloat16)),
            Releases(float32, False, _jax_privacy_release(jnp.float32)),
        ),
        (_jax_privacy_keys(),),
    )


_their_sum = functools.partial(
    their_clipping.clipped_fun, lambda x: x, keep_batch_dim=False
)


def _jax_privacy_sum(dtype: Any) -> Callable[..., tuple[SumFn, Fraction]]:
    def make(
        l2_clip_norm: float, microbatch_size: int | None
    ) -> tuple[SumFn, Fraction]:
        options: Any = {"l2_clip_norm": l2_clip_norm, "dtype": dtype}
        fn = _their_sum(microbatch_size=microbatch_size, **options)
        return sum_fn(fn), Fraction(fn.sensitivity())

    return make


def _jax_privacy_release(dtype: Any) -> Callable[..., Any]:
    """Noise on a sum of this dtype."""
    # Left to itself, it takes a seed from NumPy's generator, whose state is not ours.
    seed = int.from_bytes(os.urandom(3), "little")
    privatizer = their_noise.gaussian_privatizer(stddev=NOISE_MULTIPLIER, prng_key=seed)
    return draw_fn(_their_sum(l2_clip_norm=1.0), privatizer, dtype)


def _jax_privacy_keys() -> Keys:
    zeros = jnp.zeros(4, jnp.float32)

    def draw() -> np.ndarray:
        state: Any = their_noise.gaussian_privatizer(stddev=1.0).init(zeros)
        return np.asarray(jax.random.key_data(state[0]))

    @jax.jit
    def noise(words: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words)
        privatizer: Any = their_noise.gaussian_privatizer(stddev=1.0, prng_key=key)
        return privatizer.update(zeros, privatizer.init(zeros))[0]

    return Keys("jax_privacy", False, draw, lambda words: np.asarray(noise(words)))


def _opacus() -> Subjects:
    if not harness.is_installed("opacus"):
        return Subjects(remarks=("Opacus: not measured, as it is not installed.",))
    import torch  # pyright: ignore[reportMissingImports]
    from opacus.optimizers import DPOptimizer  # pyright: ignore[reportMissingImports]

    def optimizer(params: list[Any], l2_clip_norm: float, **options: Any) -> Any:
        return DPOptimizer(
            torch.optim.SGD(params, lr=1.0),
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=l2_clip_norm,
            expected_batch_size=1,
            **options,
        )

    def parameter(grads: np.ndarray) -> Any:
        dtype = getattr(torch, grads.dtype.name)
        param = torch.nn.Parameter(torch.zeros(grads.shape[1:], dtype=dtype))
        param.grad_sample = torch.from_numpy(grads.astype(np.float32)).to(dtype)
        return param

    def make_sum(l2_clip_norm: float, _: int | None) -> tuple[SumFn, Fraction]:
        def summed(batch: list[np.ndarray], is_padding: np.ndarray) -> Rows:
            params = [parameter(x[~is_padding]) for x in batch]
            optimizer(params, l2_clip_norm).clip_and_accumulate()
            return [
                param.summed_grad.double().numpy().ravel()[None] for param in params
            ]

        return summed, Fraction(l2_clip_norm)

    def release(total: float, num: int, **options: Any) -> np.ndarray:
        param = torch.nn.Parameter(torch.zeros(num))
        private = optimizer([param], 1.0, **options)
        param.summed_grad = torch.full((num,), float(total))
        private.add_noise()
        return param.grad.numpy()

    def draw_key() -> np.ndarray:
        return np.array([torch.Generator().seed()], "<u8").view("<u4")

    def noise_of_key(words: np.ndarray) -> np.ndarray:
        seed = int.from_bytes(words.astype("<u4").tobytes(), "little")
        return release(0.0, 4, generator=torch.Generator().manual_seed(seed))

    batches = tuple(BatchShape(jnp.float32, size) for size in (64, 1024, 4096))
    secure = functools.partial(release, secure_mode=True)
    return Subjects(
        # It adds 1e-6 to all norms.
        (Sums("Opacus", False, make_sum, batches, smallest_clip_norm=1e-6),),
        (
            Releases("Opacus default", False, release),
            Releases("Opacus secure_mode", False, secure),
        ),
        (Keys("Opacus", False, draw_key, noise_of_key),),
    )


def benchmark(is_small: bool = False) -> harness.Lines:
    """A line for each measurement; tables of them are printed."""
    sizes = Sizes(2000, 8, 256, 2**20, 2**17) if is_small else Sizes()
    measured = command.run(all_subjects(), sizes, rich.console.Console())
    for name in dict.fromkeys(x.measurement for x in measured):
        rows = [checks.as_json(x._asdict()) for x in measured if x.measurement == name]
        yield {"measurement": name, "results": rows}


if __name__ == "__main__":
    harness.main(benchmark, tiny={"is_small": True})
