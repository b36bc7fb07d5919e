"""What a self-check examines: modes of dpmp and other libraries, all behind callables.

Other libraries are imported when they are asked for, and left out where they are not
installed.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import clipping, noise_addition
from dpmp._accumulation import DoubleWord
from dpmp._grid import DEFAULT_RESOLUTION, LARGEST_RESOLUTION, GridArray

NOISE_MULTIPLIER = 1.0

# XLA takes minutes to compile a program that has so many outputs, and longer than all
# of its operations one by one.
_MANY_LEAVES = 300

# Releases that are drawn in one step.
_STEP_SIZE = 2**18

# Arrays of (k, n) float64, one for each leaf. In exact arithmetic, the entries of a
# leaf are the sums of its k rows.
Rows = list[np.ndarray]

# From leaves, (B, ...), and which examples are padding, (B,), to the sum.
SumFn = Callable[[list[np.ndarray], np.ndarray], Rows]


class BatchShape(NamedTuple):
    """Batches for which sums are compared."""

    dtype: Any
    size: int
    microbatch_size: int | None = None

    def __str__(self) -> str:
        batch = f"{self.size} in {np.dtype(self.dtype).name}"
        return f"{batch} by {self.microbatch_size}" if self.microbatch_size else batch


@dataclass(frozen=True)
class Sums:
    """A way to clip gradients and to sum them.

    Attributes:
      name: of library and mode.
      is_claimed: whether dpmp promises that it passes.
      make: gives, for a clip norm and a microbatch size, a function of batches, and in
        units of its output the largest norm of a contribution and change of the sum.
      batches: to compare sums for.
      smallest_clip_norm: that can be used.
    """

    name: str
    is_claimed: bool
    make: Callable[[float, int | None], tuple[SumFn, Fraction]]
    batches: tuple[BatchShape, ...]
    smallest_clip_norm: float = 0.0


@dataclass(frozen=True)
class Releases:
    """A way to add noise, with a noise multiplier of `NOISE_MULTIPLIER`.

    Attributes:
      name: of library and mode.
      is_claimed: whether dpmp promises that it passes.
      draw: `draw(has_example, num)` gives `num` noisy sums of one entry each, (num,),
        for batches of one example that is clipped to 1, or of none.
    """

    name: str
    is_claimed: bool
    draw: Callable[[bool, int], np.ndarray]


@dataclass(frozen=True)
class Keys:
    """A way to come by the key of the noise.

    Attributes:
      name: of the library.
      is_claimed: whether dpmp promises that it passes.
      draw: gives the uint32 words of a new key.
      noise: some noise, as a function of these words.
    """

    name: str
    is_claimed: bool
    draw: Callable[[], np.ndarray]
    noise: Callable[[np.ndarray], np.ndarray]


class Subjects(NamedTuple):
    """All that is examined, and remarks on what is not."""

    sums: tuple[Sums, ...] = ()
    releases: tuple[Releases, ...] = ()
    keys: tuple[Keys, ...] = ()
    remarks: tuple[str, ...] = ()


def all_subjects(*, include_unsafe: bool) -> Subjects:
    """The modes of dpmp that can run, and the other libraries that are installed."""
    parts = [dpmp_subjects()]
    if include_unsafe:
        parts.append(Subjects(releases=(unsafe_releases(),)))
    parts.append(_if_installed("jax_privacy", _jax_privacy))
    parts.append(_if_installed("opacus", _opacus))
    return Subjects(*(sum(field, ()) for field in zip(*parts, strict=True)))


def _if_installed(module: str, make: Callable[[], Subjects]) -> Subjects:
    if importlib.util.find_spec(module) is None:
        return Subjects(remarks=(f"{module}: not checked, it is not installed.",))
    return make()


class _Mode(NamedTuple):
    name: str
    accumulator: str
    resolution: int | None
    batches: tuple[BatchShape, ...]


def dpmp_subjects() -> Subjects:
    """The modes of dpmp that keep a promise."""
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
    return Subjects(
        tuple(map(_sums, modes)), tuple(map(_releases, modes)), (_keys(),), remarks
    )


def _clip(
    mode: _Mode, l2_clip_norm: float, microbatch_size: int | None
) -> clipping.BoundedSensitivityCallable:
    return clipping.clipped_fun(
        lambda x: x,
        keep_batch_dim=False,
        l2_clip_norm=l2_clip_norm,
        microbatch_size=microbatch_size,
        accumulator=mode.accumulator,
        resolution=mode.resolution,
    )


def _sums(mode: _Mode) -> Sums:
    def make(
        l2_clip_norm: float, microbatch_size: int | None
    ) -> tuple[SumFn, Fraction]:
        fn = _clip(mode, l2_clip_norm, microbatch_size)
        bound = fn.sensitivity()
        if mode.accumulator == "exact":
            bound = mode.resolution or DEFAULT_RESOLUTION
        return sum_fn(fn), Fraction(bound)

    return Sums(mode.name, True, make, mode.batches, smallest_clip_norm=1e-15)


def sum_fn(fn: Callable[..., Any]) -> SumFn:
    """A clipped sum of jax arrays, as `Sums` has them."""
    compiled = jax.jit(lambda batch, mask: fn(batch, is_padding_example=mask))

    def summed(batch: list[np.ndarray], is_padding: np.ndarray) -> Rows:
        if len(batch) > _MANY_LEAVES:
            total = fn(batch, is_padding_example=is_padding)
        else:
            total = compiled(batch, is_padding)
        return [_rows(x) for x in jax.tree.leaves(total, is_leaf=_is_sum)]

    return summed


def _is_sum(x: Any) -> bool:
    return isinstance(x, DoubleWord | GridArray)


def _rows(x: Any) -> np.ndarray:
    """(k, n); integers count units of their grid."""
    parts = [x.steps] if isinstance(x, GridArray) else list(x) if _is_sum(x) else [x]
    return np.stack([np.asarray(part).astype(np.float64).ravel() for part in parts])


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


def draw_fn(
    fn: Callable[..., Any], privatizer: Any, dtype: Any = jnp.float32
) -> Callable[[bool, int], np.ndarray]:
    """A clipped sum and an optax privatizer, as `Releases` has them."""
    update = jax.jit(privatizer.update)

    def draw(has_example: bool, num: int) -> np.ndarray:
        total = fn(
            np.full((1, 1), 10, dtype), is_padding_example=np.array([not has_example])
        )
        sums = jax.tree.map(lambda x: jnp.broadcast_to(x, _STEP_SIZE), total)
        state, noisy = privatizer.init(sums), []
        for _ in range(-(-num // _STEP_SIZE)):
            released, state = update(sums, state)
            noisy.append(np.asarray(released))
        return np.concatenate(noisy)[:num]

    return draw


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
    from jax_privacy import clipping as their_clipping

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
    from jax_privacy import clipping as their_clipping
    from jax_privacy import noise_addition as their_noise

    fn = their_clipping.clipped_fun(lambda x: x, keep_batch_dim=False, l2_clip_norm=1.0)
    # Left to itself, it takes a seed from NumPy's generator, whose state is not ours.
    seed = int.from_bytes(os.urandom(3), "little")
    privatizer = their_noise.gaussian_privatizer(stddev=NOISE_MULTIPLIER, prng_key=seed)
    return Releases(name, False, draw_fn(fn, privatizer, dtype))


def _jax_privacy_keys() -> Keys:
    from jax_privacy import noise_addition as their_noise

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
        return [_rows(param.summed_grad.double().numpy()) for param in params]

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
