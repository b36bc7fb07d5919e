"""Do other libraries keep the promises that dpmp makes of its arithmetic?

The measurements of `python -m dpmp selfcheck` are made of dpmp, of its float noise, of
jax_privacy, and, where it is installed, of Opacus.

    python -m benchmarks.selfcheck_others        # three minutes on two cores
"""

import functools
import os
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from jax_privacy import clipping as their_clipping
from jax_privacy import noise_addition as their_noise

import dpmp
from benchmarks import harness
from dpmp.tools import checks
from dpmp.tools.selfcheck import command
from dpmp.tools.selfcheck._modes import dpmp_subjects
from dpmp.tools.selfcheck._subjects import (
    NOISE_MULTIPLIER,
    BatchShape,
    Keys,
    Releases,
    Result,
    Rows,
    Sizes,
    Subjects,
    SumFn,
    Sums,
    compare,
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


class Mean(NamedTuple):
    """A way to average gradients that are clipped to 1, with noise multiplier 1.

    `average(gradients, adds_noise)` maps (B, n) to (n,). The batch size is expected to
    be `_EXPECTED`, and the noise must be for that.
    """

    name: str
    is_claimed: bool
    average: Callable[[np.ndarray, bool], np.ndarray]


_EXPECTED, _ENTRIES = 32, 2**16


def means() -> list[Mean]:
    """Those of dpmp, jax_privacy, and Opacus if it is installed."""
    found = [
        Mean("dpmp", True, _mean_of_dpmp),
        Mean("jax_privacy", False, _mean_of_jax_privacy),
    ]
    if harness.is_installed("opacus"):
        found.append(Mean("Opacus", False, _mean_of_opacus))
    return found


def measure_means() -> Iterator[Result]:
    """Is the sum divided by a constant, and is the noise that for the sum?

    A mean over the batch itself changes by more than one contribution if an example
    leaves. And noise for a mean is too narrow by the batch size if it is added to the
    sum.
    """
    rng = np.random.default_rng(0)
    others = np.tile(rng.normal(size=256), (_EXPECTED, 1)).astype(np.float32)
    leaving = np.concatenate([others, -others[:1]])
    for x in means():
        change = x.average(leaving, False) - x.average(others, False)
        yield compare(
            "Change of the mean if one example leaves, over clip norm / batch size",
            x,
            float(np.linalg.norm(change)) * _EXPECTED,
            at_most=1 + 2.0**-20,
        )
        noise = x.average(np.zeros((_EXPECTED, _ENTRIES), np.float32), True)
        yield compare(
            "Noise on the mean, over clip norm / batch size",
            x,
            float(np.std(noise.astype(np.float64))) * _EXPECTED,
            at_least=0.98,  # within seven standard errors of 1
        )


def _mean_of_dpmp(gradients: np.ndarray, adds_noise: bool) -> np.ndarray:
    mechanism = dpmp.DPSGD(
        num_examples=1000,
        expected_batch_size=_EXPECTED,
        iterations=1,
        l2_clip_norm=1.0,
        noise_multiplier=NOISE_MULTIPLIER,
        delta=1e-6,
        method="per_example",
    )
    zeros = jnp.zeros(gradients.shape[1])
    grad_fn = mechanism.clipped_grad(jnp.vdot)
    mask = np.zeros(len(gradients), bool)
    total = grad_fn(zeros, gradients, is_padding_example=mask)
    if not adds_noise:
        return np.asarray(total.to_float())
    privatizer: Any = mechanism.privatizer()
    return np.asarray(privatizer.update(total, privatizer.init(zeros))[0])


def _mean_of_jax_privacy(gradients: np.ndarray, adds_noise: bool) -> np.ndarray:
    options: Any = {"l2_clip_norm": 1.0, "normalize_by": float(_EXPECTED)}
    fn = _their_sum(**options)
    total: Any = fn(jnp.asarray(gradients))
    if not adds_noise:
        return np.asarray(total)
    seed = int.from_bytes(os.urandom(3), "little")
    privatizer: Any = their_noise.gaussian_privatizer(
        stddev=NOISE_MULTIPLIER * fn.sensitivity(), prng_key=seed
    )
    return np.asarray(privatizer.update(total, privatizer.init(total))[0])


def _mean_of_opacus(gradients: np.ndarray, adds_noise: bool) -> np.ndarray:
    import torch  # pyright: ignore[reportMissingImports]
    from opacus.optimizers import DPOptimizer  # pyright: ignore[reportMissingImports]

    param = torch.nn.Parameter(torch.zeros(gradients.shape[1]))
    param.grad_sample = torch.from_numpy(gradients)
    private = DPOptimizer(
        torch.optim.SGD([param], lr=1.0),
        noise_multiplier=NOISE_MULTIPLIER if adds_noise else 0.0,
        max_grad_norm=1.0,
        expected_batch_size=_EXPECTED,
    )
    private.pre_step()
    return param.grad.numpy()


def benchmark(is_small: bool = False) -> harness.Lines:
    """A line for each measurement; tables of them are printed."""
    sizes = Sizes(2000, 8, 256, 2**20, 2**17) if is_small else Sizes()
    measured = command.run(all_subjects(), sizes, rich.console.Console())
    measured = [*measured, *measure_means()]
    for name in dict.fromkeys(x.measurement for x in measured):
        rows = [checks.as_json(x._asdict()) for x in measured if x.measurement == name]
        yield {"measurement": name, "results": rows}


if __name__ == "__main__":
    harness.main(benchmark, tiny={"is_small": True})
