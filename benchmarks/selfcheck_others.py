"""Do other libraries keep the promises that dpmp makes of its arithmetic?

The measurements of `python -m dpmp selfcheck` are made of dpmp, of its float noise, of
jax_privacy, and, where it is installed, of Opacus.

    python -m benchmarks.selfcheck_others        # three minutes on two cores
"""

import importlib
import os
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from jax_privacy import clipping as their_clipping
from jax_privacy import noise_addition as their_noise

from benchmarks import harness
from dpmp.tools.selfcheck import command
from dpmp.tools.selfcheck._modes import dpmp_subjects
from dpmp.tools.selfcheck._results import Sizes
from dpmp.tools.selfcheck._subjects import (
    NOISE_MULTIPLIER,
    BatchShape,
    Keys,
    Releases,
    Rows,
    Subjects,
    SumFn,
    Sums,
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
            _jax_privacy_sums(default, None, in_bfloat16),
            _jax_privacy_sums(float32, jnp.float32, in_float32),
        ),
        (
            _jax_privacy_releases(default, jnp.bfloat16),
            _jax_privacy_releases(float32, jnp.float32),
        ),
        (_jax_privacy_keys(),),
    )


def _jax_privacy_sums(name: str, dtype: Any, batches: tuple[BatchShape, ...]) -> Sums:
    def make(
        l2_clip_norm: float, microbatch_size: int | None
    ) -> tuple[SumFn, Fraction]:
        fn = their_clipping.clipped_fun(
            lambda x: x,
            keep_batch_dim=False,
            l2_clip_norm=l2_clip_norm,
            microbatch_size=microbatch_size,
            dtype=dtype,
        )
        return sum_fn(fn), Fraction(fn.sensitivity())

    return Sums(name, False, make, batches)


def _jax_privacy_releases(name: str, dtype: Any) -> Releases:
    """Noise on a sum of this dtype."""
    fn = their_clipping.clipped_fun(lambda x: x, keep_batch_dim=False, l2_clip_norm=1.0)
    # Left to itself, it takes a seed from NumPy's generator, whose state is not ours.
    seed = int.from_bytes(os.urandom(3), "little")
    privatizer = their_noise.gaussian_privatizer(stddev=NOISE_MULTIPLIER, prng_key=seed)
    return Releases(name, False, draw_fn(fn, privatizer, dtype))


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
    batches = tuple(BatchShape(jnp.float32, size) for size in (64, 1024, 4096))
    return Subjects(
        # It adds 1e-6 to all norms.
        (Sums("Opacus", False, _opacus_sum, batches, smallest_clip_norm=1e-6),),
        (
            _opacus_releases("Opacus default"),
            _opacus_releases("Opacus secure_mode", secure_mode=True),
        ),
        (_opacus_keys(),),
    )


def _opacus_sum(
    l2_clip_norm: float, microbatch_size: int | None
) -> tuple[SumFn, Fraction]:
    del microbatch_size
    torch: Any = importlib.import_module("torch")

    def parameter(grads: np.ndarray) -> Any:
        dtype = getattr(torch, grads.dtype.name)
        param = torch.nn.Parameter(torch.zeros(grads.shape[1:], dtype=dtype))
        param.grad_sample = torch.from_numpy(grads.astype(np.float32)).to(dtype)
        return param

    def summed(batch: list[np.ndarray], is_padding: np.ndarray) -> Rows:
        params = [parameter(x[~is_padding]) for x in batch]
        _opacus_optimizer(params, l2_clip_norm).clip_and_accumulate()
        return [param.summed_grad.double().numpy().ravel()[None] for param in params]

    return summed, Fraction(l2_clip_norm)


def _opacus_releases(name: str, **kwargs: Any) -> Releases:
    return Releases(
        name,
        False,
        lambda has_example, num: _opacus_noise(float(has_example), num, **kwargs),
    )


def _opacus_keys() -> Keys:
    torch: Any = importlib.import_module("torch")

    def draw() -> np.ndarray:
        return np.array([torch.Generator().seed()], "<u8").view("<u4")

    def noise(words: np.ndarray) -> np.ndarray:
        seed = int.from_bytes(words.astype("<u4").tobytes(), "little")
        return _opacus_noise(0.0, 4, generator=torch.Generator().manual_seed(seed))

    return Keys("Opacus", False, draw, noise)


def _opacus_noise(total: float, num: int, **kwargs: Any) -> np.ndarray:
    torch: Any = importlib.import_module("torch")
    param = torch.nn.Parameter(torch.zeros(num))
    optimizer = _opacus_optimizer([param], 1.0, **kwargs)
    param.summed_grad = torch.full((num,), total)
    optimizer.add_noise()
    return param.grad.numpy()


def _opacus_optimizer(params: list[Any], l2_clip_norm: float, **kwargs: Any) -> Any:
    torch: Any = importlib.import_module("torch")
    return importlib.import_module("opacus.optimizers").DPOptimizer(
        torch.optim.SGD(params, lr=1.0),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=l2_clip_norm,
        expected_batch_size=1,
        **kwargs,
    )


def benchmark(is_small: bool = False) -> harness.Lines:
    """A line for each measurement; tables of them are printed."""
    sizes = Sizes(2000, 8, 256, 2**20, 2**17) if is_small else Sizes()
    measured = command.run(all_subjects(), sizes, rich.console.Console())
    for name in dict.fromkeys(x.measurement for x in measured):
        rows = [command.as_json(x) for x in measured if x.measurement == name]
        yield {"measurement": name, "results": rows}


if __name__ == "__main__":
    harness.main(benchmark, tiny={"is_small": True})
