"""The subjects of a self-check, sums, noise and keys, and those of dpmp."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpmp import _random, clipping, noise_addition, numerics, strategies
from dpmp.numerics import is_grid

NOISE_MULTIPLIER = 1.0

# The number of noisy sums that are drawn in one step.
_STEP_SIZE = 2**18

Number = Fraction | float

# Arrays of (k, n) float64, one for each leaf. In exact arithmetic, the entries of a
# leaf are the sums of its k rows.
Rows = list[np.ndarray]

# From leaves, (B, ...), and which examples are padding, (B,), to the sum.
SumFn = Callable[[list[np.ndarray], np.ndarray], Rows]


class BatchShape(NamedTuple):
    """The shape of batches for which sums are compared."""

    dtype: Any
    size: int
    microbatch_size: int | None = None

    def __str__(self) -> str:
        batch = f"{self.size} in {np.dtype(self.dtype).name}"
        return f"{batch} by {self.microbatch_size}" if self.microbatch_size else batch


# A subject has the name of its library and mode, and dpmp may claim that it passes.


class Sums(NamedTuple):
    """A way to clip gradients and to sum them.

    `make` maps a clip norm and a microbatch size to the sum function, and to the
    largest norm of a contribution and change of the sum, in units of the output. The
    subject accepts no clip norm below `smallest_clip_norm`. If it
    `assumes_fixed_slots`, it promises nothing about batches whose examples move.
    A gradient that is clipped keeps at least `smallest_norm` of the clip norm.
    """

    name: str
    is_claimed: bool
    make: Callable[[float, int | None], tuple[SumFn, Fraction]]
    batches: tuple[BatchShape, ...]
    smallest_clip_norm: float = 0.0
    assumes_fixed_slots: bool = False
    smallest_norm: float = 0.98


class Releases(NamedTuple):
    """A way to add noise, with a noise multiplier of `NOISE_MULTIPLIER`.

    `draw(has_example, num)` gives `num` noisy sums of one entry each, (num,). The batch
    has one example, which is clipped to 1, or none.
    """

    name: str
    is_claimed: bool
    draw: Callable[[bool, int], np.ndarray]


class Keys(NamedTuple):
    """A way to obtain the key of the noise."""

    name: str
    is_claimed: bool
    draw: Callable[[], np.ndarray]  # the uint32 words of a new key
    noise: Callable[[np.ndarray], np.ndarray]  # from these words


class Subjects(NamedTuple):
    """All subjects, and remarks on missing measurements."""

    sums: tuple[Sums, ...] = ()
    releases: tuple[Releases, ...] = ()
    keys: tuple[Keys, ...] = ()
    remarks: tuple[str, ...] = ()


class Result(NamedTuple):
    """A measured value and its limits, if there are any."""

    measurement: str  # the name of the measured quantity
    subject: str  # the library and the mode that were measured
    is_claimed: bool  # whether dpmp promises that the value is within the limits
    value: float  # rounded to float64
    at_least: float | None
    at_most: float | None
    passed: bool  # whether the exact value is within the limits
    worst_case: str  # the data on which the value was measured


class Sizes(NamedTuple):
    """The sizes of the measurements."""

    num_entries: int = 20_000  # of a gradient with one leaf
    num_leaves: int = 128  # of a gradient with many
    largest_batch: int = 4096  # for which sums are compared
    num_training: int = 2**23  # noisy values of each sum that an attacker knows
    num_test: int = 2**20  # noisy values of each sum that the attacker tells apart


def compare(
    measurement: str,
    subject: Any,
    value: Number,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    worst_case: str = "",
    is_squared: bool = False,
) -> Result:
    """Compares a value, or the root of a square, to its limits, exactly."""
    value = value if isinstance(value, Fraction) else float(value)
    power = 2 if is_squared else 1
    # NaN is within no limits.
    is_large = at_least is None or value >= Fraction(at_least) ** power
    is_small = at_most is None or value <= Fraction(at_most) ** power
    value = math.sqrt(value) if is_squared else float(value)
    claim = measurement, subject.name, subject.is_claimed
    passed = is_large and is_small
    return Result(*claim, value, at_least, at_most, passed, worst_case)


def sum_fn(fn: Callable[..., Any]) -> SumFn:
    """Turns a clipped sum of jax arrays into a function for `Sums`."""
    compiled = jax.jit(lambda batch, mask: fn(batch, is_padding_example=mask))

    def summed(batch: list[np.ndarray], is_padding: np.ndarray) -> Rows:
        leaves = jax.tree.leaves(compiled(batch, is_padding), is_leaf=is_grid)
        # Integers count units of their grid.
        arrays = [np.asarray(x.counts if is_grid(x) else x) for x in leaves]
        return [x.astype(np.float64).reshape(1, -1) for x in arrays]

    return summed


def draw_fn(
    fn: Callable[..., Any],
    privatizer: Any,
    dtype: Any = jnp.float32,
    coefficients: Sequence[float] = (1.0,),
) -> Callable[[bool, int], np.ndarray]:
    """Turns a clipped sum and an optax privatizer into a function for `Releases`."""
    update = jax.jit(privatizer.update)

    def draw(has_example: bool, num: int) -> np.ndarray:
        is_padding = np.array([not has_example])
        total = fn(np.full((1, 1), 10, dtype), is_padding_example=is_padding)
        sums = jax.tree.map(lambda x: jnp.broadcast_to(x, _STEP_SIZE), total)
        state, found = privatizer.init(sums), []
        earlier: list[np.ndarray] = []  # the noise of earlier steps, in grid units
        while len(found) < -(-num // _STEP_SIZE):
            released, state = update(sums, state)
            if tail := coefficients[1:]:
                # An attacker who knows the earlier noise takes its share out.
                counts = np.rint(np.float64(released) / sums.unit)
                if len(earlier) == len(tail):
                    share = sum(c * x for c, x in zip(tail, earlier, strict=True))
                    found.append(sums.unit * (counts + share))
                earlier = [counts - np.asarray(sums.counts), *earlier][: len(tail)]
            else:
                found.append(np.asarray(released))
        return np.concatenate(found)[:num]

    return draw


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
