"""Do the audits catch a library that breaks its promise?

Each fault is put into dpmp for the time of one audit (`dpmp.tools.audit`). A line says
in how many of the seeds an audit caught it. Without a fault, no audit may complain.

    python -m benchmarks.sabotage                 # half an hour on two cores
"""

import contextlib
import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Annotated, Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpmp
from benchmarks import harness
from dpmp.batch_selection import PoissonSampling, RandomAllocation
from dpmp.clipping import _clip_norms
from dpmp.loss_scaling import DynamicScale
from dpmp.mechanism import DPSGD
from dpmp.noise_addition import _privatizers
from dpmp.precision import Policy
from dpmp.tools import audit
from dpmp.tools.audit import _canaries as _canaries_of_audits
from dpmp.tools.selfcheck._noise import measure_noise
from dpmp.tools.selfcheck._subjects import Sizes, dpmp_subjects
from dpmp.training import _step

_NUM_EXAMPLES, _STEPS, _NUM_CANARIES = 2**15, 40, 2**18

Audit = Callable[[int], Any]  # from a seed to a result with `passed`


def _mechanism(**fields: Any) -> DPSGD:
    options = {"num_examples": _NUM_EXAMPLES, "expected_batch_size": _NUM_EXAMPLES / 8}
    options |= {"iterations": _STEPS, "l2_clip_norm": 1.0, "num_parameters": 2**15}
    return DPSGD(**(options | fields)).calibrate(epsilon=4.0, delta=1e-6)


def _canaries(seed: int, **fields: Any) -> Any:
    mechanism = _mechanism(**fields)
    return audit.canaries(mechanism, num_canaries=_NUM_CANARIES, seed=seed)


def _batches(_: int, **fields: Any) -> Any:
    return audit.batches(_mechanism(**fields), num_batches=400)


def _data(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(256, 300)).astype(np.float32)
    return {"x": features, "y": rng.normal(size=256).astype(np.float32)}


def _loss(params: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)


def _replay(
    seed: int,
    loss_scale: Any = None,
    make_source: Callable[[Any], Any] = lambda data: data,
    callbacks: Callable[[], dict[str, Any]] = dict,
    **fields: Any,
) -> Any:
    """A replay in which an example is replaced by one with huge gradients."""
    data, other, index = _data(seed), _data(seed), seed % 256
    other["x"][index] = 1e6  # which is not finite in float16
    trainer = _trainer(loss_scale, **fields)
    source, neighbour = map(make_source, (data, other))
    options = {"index": index, "neighbour": neighbour, **callbacks()}
    return audit.replay(trainer, jnp.zeros(300), source, **options)


def _replay_without_one(seed: int) -> Any:
    """A replay in which an example is left out whose gradient opposes all others."""
    data, index = _data(seed), seed % 256
    data = {"x": np.ones_like(data["x"]), "y": np.ones_like(data["y"])}
    data["x"][index] = -1
    trainer = _trainer(arithmetic="float32", method="per_example")
    return audit.replay(trainer, jnp.zeros(300), data, index=index)


def _trainer(loss_scale: Any = None, **fields: Any) -> dpmp.DPTrainer:
    options = {"num_examples": 256, "expected_batch_size": 32, "iterations": 20}
    return dpmp.DPTrainer(
        mechanism=_mechanism(**(options | {"l2_clip_norm": 0.1} | fields)),
        loss_fn=_loss,
        optimizer=optax.sgd(0.1, momentum=0.9),
        policy="float32" if loss_scale is None else "mixed_float16",
        loss_scale=loss_scale,
    )


def _selfcheck(seed: int) -> Any:
    del seed
    (exact, *_) = dpmp_subjects().releases
    results = measure_noise(exact, Sizes(num_training=2**20, num_test=2**17))
    return types.SimpleNamespace(passed=all(x.passed for x in results))


# Each fault is a function that makes a context manager.

Fault = Callable[[], contextlib.AbstractContextManager[Any]]


def _instead_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Fault]:
    """Makes a fault of a function to call instead, which gets the real one first."""
    real = getattr(owner, name)

    def make(function: Callable[..., Any]) -> Fault:
        def replaced(*args: Any, **options: Any) -> Any:
            return function(real, *args, **options)

        return lambda: mock.patch.object(owner, name, replaced)

    return make


def _noise(change: Callable[[Fraction], Fraction]) -> Fault:
    """Changes the standard deviation of the noise."""

    def add_noise(real: Any, leaves: Any, stddev: Fraction, *others: Any) -> Any:
        return real(leaves, change(stddev), *others)

    return _instead_of(_privatizers, "add_noise")(add_noise)


@_instead_of(_privatizers, "add_noise")
def _no_noise(
    real: Any, leaves: Any, stddev: Any, key: Any, step: Any, past: Any = (), *_: Any
) -> Any:
    del real, stddev, key, step
    return [x.to_float() for x in leaves], past


@_instead_of(_privatizers, "add_noise")
def _same_key(
    real: Any, leaves: Any, stddev: Any, key: Any, step: Any, *others: Any
) -> Any:
    """Two steps have the same key."""
    return real(leaves, stddev, 0 * key, step // 2, *others)


@_instead_of(_privatizers, "add_noise")
def _noise_in_bfloat16(real: Any, leaves: Any, *others: Any) -> Any:
    noisy, past = real(leaves, *others)
    pairs = zip(noisy, [x.to_float() for x in leaves], strict=True)
    return [y + (x - y).astype(jnp.bfloat16).astype(y.dtype) for x, y in pairs], past


def _coefficients(change: Callable[[jax.Array], jax.Array]) -> Fault:
    """Changes the factors that clip gradients."""

    def coefficients(real: Any, *args: Any) -> list[jax.Array]:
        return [change(x) for x in real(*args)]

    return _instead_of(_clip_norms, "coefficients")(coefficients)


@_instead_of(_clip_norms, "coefficients")
def _norm_in_bfloat16(real: Any, targets: Any, norms: Any, *others: Any) -> Any:
    """Norms are running sums in bfloat16, which stop to grow."""
    # Adding the same small square stalls at 256 times this square.
    largest = [256 * x.value / x.num_entries for x in norms]
    stalled = [
        x._replace(value=jnp.minimum(x.value, y), bound=None)
        for x, y in zip(norms, largest, strict=True)
    ]
    return real(targets, stalled, *others)


def _drawer(sampling: Any, change: Callable[..., np.ndarray]) -> Fault:
    """Changes the indices of batches: `change(indices, step, num_examples)`."""

    def drawer(real: Any, self: Any, num_examples: int, *, start: int = 0) -> Any:
        draw = real(self, num_examples, start=start)
        return lambda step, key: change(draw(step, key), step, num_examples)

    return _instead_of(sampling, "drawer")(drawer)


def _with_replacement(indices: np.ndarray, step: int, size: int) -> np.ndarray:
    del step
    return np.sort(np.random.default_rng().integers(size, size=len(indices)))


def _shuffled(indices: np.ndarray, step: int, size: int) -> np.ndarray:
    """Batches of one size that pass over the dataset."""
    del indices
    order = np.random.default_rng(step // 8).permutation(size)
    return np.sort(np.array_split(order, 8)[step % 8])


def _twice(indices: np.ndarray, step: int, size: int) -> np.ndarray:
    """One example takes part in every step."""
    del step, size
    return np.union1d(indices, [7])


@_instead_of(Policy, "cast_inputs")
def _batch_statistics(real: Any, self: Any, batch: Any) -> Any:
    """Features are centred in their batch."""
    batch = real(self, batch)
    return {**batch, "x": batch["x"] - jnp.mean(batch["x"], axis=0)}


class _Scaled:
    """A source that divides by the largest number it has seen so far."""

    def __init__(self, data: dict[str, np.ndarray]):
        self._data, self._largest = data, 1.0

    def __len__(self) -> int:
        return len(self._data["y"])

    def __getitem__(self, indices: Any) -> dict[str, np.ndarray]:
        rows = {name: x[indices] for name, x in self._data.items()}
        self._largest = max(self._largest, float(np.max(np.abs(rows["x"]))))
        return {"x": rows["x"] / np.float32(self._largest), "y": rows["y"]}


def _leaking_callbacks() -> dict[str, Any]:
    seen: list[float] = []

    def keep(outputs: Any) -> None:
        seen.append(float(jnp.sum(outputs.values)))

    return {"sensitive_callback": keep, "callback": lambda state: {"loss": seen[-1]}}


@contextlib.contextmanager
def _exact_overflows() -> Iterator[None]:
    """The loss scale moves by the number of overflows without noise."""
    exact: list[jax.Array] = []

    @_instead_of(_step.Step, "_sum_sensitive")
    def sums(real: Any, self: Any, *args: Any) -> Any:
        total, sensitive = real(self, *args)
        exact.append(total.num_overflows.to_float())
        return total, sensitive

    @_instead_of(DynamicScale, "update")
    def updates(real: Any, self: Any, state: Any, count: Any, *, stddev: float) -> Any:
        del count
        return real(self, state, exact[-1] * 1e6, stddev=stddev)

    with sums(), updates():
        yield


@_instead_of(_step.Step, "_sum_sensitive")
def _mean_of_batch(real: Any, self: Any, *args: Any) -> Any:
    """The sum is divided by the size of the batch, and not by its expectation."""
    total, sensitive = real(self, *args)
    size = jnp.sum(~args[4], dtype=jnp.float32)
    share = self.mechanism.expected_batch_size / size
    grads = jax.tree.map(lambda x: x * share, total.sum_of_clipped_grads)
    return total._replace(sum_of_clipped_grads=grads), sensitive


@_instead_of(_canaries_of_audits, "DPTrainer")
def _one_step_more(real: Any, *, mechanism: DPSGD, **others: Any) -> dpmp.DPTrainer:
    """The trainer makes one step more than the claim is for."""
    iterations = mechanism.iterations + 1
    mechanism = dataclasses.replace(mechanism, iterations=iterations)
    return real(mechanism=mechanism, **others)


@_instead_of(DPSGD, "calibrate")
def _delta_of_few(real: Any, self: Any, *, epsilon: float, delta: float) -> DPSGD:
    """Delta is chosen for a dataset of a thousandth of the size."""
    with warnings.catch_warnings(action="ignore"):
        return real(self, epsilon=epsilon, delta=1000 * delta)


class Sabotage(NamedTuple):
    """A fault, and the audit that has to catch it."""

    audit: Audit
    fault: Fault = contextlib.nullcontext


_allocated: dict[str, Any] = {"sampling": "random_allocation"}
_bounded = functools.partial(_replay, arithmetic="bounded")
_scaled = functools.partial(_replay, loss_scale=DynamicScale(initial=64.0))
_allocated_batches = functools.partial(_batches, **_allocated)

FAULTS = {
    "none, canaries": Sabotage(_canaries),
    "none, canaries, random allocation": Sabotage(
        functools.partial(_canaries, **_allocated)
    ),
    "none, replay": Sabotage(_replay),
    "none, replay with a loss scale": Sabotage(_scaled),
    "none, replay without an example": Sabotage(_replay_without_one),
    "none, batches": Sabotage(_batches),
    "none, batches of random allocation": Sabotage(_allocated_batches),
    "none, selfcheck": Sabotage(_selfcheck),
    "no noise": Sabotage(_canaries, _no_noise),
    "noise at 0.9": Sabotage(_canaries, _noise(lambda x: x * Fraction(9, 10))),
    "noise for the mean, on the sum": Sabotage(_canaries, _noise(lambda x: x / 4096)),
    "noise in bfloat16": Sabotage(_selfcheck, _noise_in_bfloat16),
    "no clipping": Sabotage(_bounded, _coefficients(jnp.ones_like)),
    "clip norm doubled": Sabotage(_bounded, _coefficients(lambda x: 2 * x)),
    "norm in bfloat16": Sabotage(_replay_without_one, _norm_in_bfloat16),
    "sampling with replacement": Sabotage(
        _batches, _drawer(PoissonSampling, _with_replacement)
    ),
    "shuffling": Sabotage(_batches, _drawer(PoissonSampling, _shuffled)),
    "an example twice in an epoch": Sabotage(
        _allocated_batches, _drawer(RandomAllocation, _twice)
    ),
    "one key for two steps": Sabotage(_canaries, _same_key),
    "one step more": Sabotage(_canaries, _one_step_more),
    "delta of a smaller dataset": Sabotage(_canaries, _delta_of_few),
    "statistics of the batch": Sabotage(_replay, _batch_statistics),
    "a scale that remembers": Sabotage(functools.partial(_replay, make_source=_Scaled)),
    "a callback that reads losses": Sabotage(
        functools.partial(_replay, callbacks=_leaking_callbacks)
    ),
    "a loss scale that counts": Sabotage(_scaled, _exact_overflows),
    "the mean of the batch": Sabotage(_replay_without_one, _mean_of_batch),
}


def benchmark(
    fault: Annotated[str, harness.Each(FAULTS)], seeds: int = 20
) -> harness.Lines:
    """A line for each fault."""
    chosen, caught = FAULTS[fault], 0
    for seed in range(seeds):
        with chosen.fault():
            caught += not chosen.audit(seed).passed
    yield {"seeds": seeds, "caught": caught}


if __name__ == "__main__":
    harness.main(benchmark, tiny={"fault": ["none, replay"], "seeds": 1})
