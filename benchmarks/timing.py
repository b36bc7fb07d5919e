"""What do running times tell about a batch, an example or the noise?

An attacker who measures how long something takes wants to know which of two secrets it
was done with. All secrets of a part take turns, in random order. The attacker learns
the best threshold for the times from the first half of the rounds, and is tested on the
second half. The *advantage* is the rate of true positives minus that of false
positives: 1 if the times tell everything, and 0 if they tell nothing. Within three
standard errors of 0, this many rounds cannot tell the secrets apart. "Again" is the
same secret once more: what it seems to tell is an error of the measurement.

    taskset -c 0 python -m benchmarks.timing        # ten minutes on one quiet core
"""

import functools
import gc
import secrets
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpmp
from benchmarks import harness
from dpmp.batch_selection import PoissonSampling
from dpmp.loss_scaling import DynamicScale
from dpmp.noise_addition._alias_table import alias_table, look_up
from dpmp.noise_addition._discrete_gaussian import DiscreteGaussian

Call = Callable[[], Any]
# What makes the call to be timed, with new arrays, by the name of the secret: the time
# of a call depends on the addresses of its arrays. The first secret is compared with
# each of the others.
Secrets = Mapping[str, Callable[[], Call]]

_NUM_EXAMPLES, _BATCH_SIZE, _PADDED, _WIDTH, _ENTRIES = 4096, 32, 96, 64, 1000
_QUANTILES = np.linspace(0, 1, 401)


def durations(calls: Secrets, rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each call in each round; a round has an order of its own."""
    rng, names = np.random.default_rng(), list(calls)
    seconds = {name: np.zeros(rounds) for name in names}
    for name in names * 20:
        jax.block_until_ready(calls[name]()())
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            for k in rng.permutation(len(names)):
                call = calls[names[k]]()
                start = time.perf_counter_ns()
                jax.block_until_ready(call())
                seconds[names[k]][i] = (time.perf_counter_ns() - start) * 1e-9
    finally:
        gc.enable()
    return seconds


def of_arrays(run: Callable[..., Any], arrays: Mapping[str, Any]) -> Secrets:
    """Calls `run` with a new copy of some arrays of NumPy."""

    def prepare(given: Any) -> Call:
        copies = jax.block_until_ready(jax.tree.map(jnp.array, given))
        return functools.partial(run, copies)

    return {name: functools.partial(prepare, x) for name, x in arrays.items()}


def advantage(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """The attacker's advantage, and its standard error."""
    half = len(first) // 2
    learn, test = (first[:half], second[:half]), (first[half:], second[half:])
    thresholds = np.quantile(np.concatenate(learn), _QUANTILES)
    below = [np.searchsorted(np.sort(x), thresholds) / half for x in learn]
    best = np.argmax(np.abs(below[0] - below[1]))
    rates = [float(np.mean(x < thresholds[best])) for x in test]
    sign = 1 if below[0][best] > below[1][best] else -1
    variance = sum(p * (1 - p) / len(x) for p, x in zip(rates, test, strict=True))
    return sign * (rates[0] - rates[1]), variance**0.5


def _noise() -> Secrets:
    noise = DiscreteGaussian.at_least(3000.0)
    draw = jax.jit(
        lambda key: noise.sample(key, (_ENTRIES,), step=jnp.int32(0), leaf=0)
    )
    one, other = _random_words(4), _random_words(4)
    keys = {"one key": one, "one key, again": one, "another key": other}
    return of_arrays(draw, keys)


def _table() -> Secrets:
    """Reads at random places of the table of the noise, or always at the same place."""
    read = jax.jit(lambda words: look_up(alias_table(), list(words)))
    any_places = _random_words(4 * _ENTRIES).reshape(4, _ENTRIES)
    one_place = np.zeros_like(any_places) + any_places[:, :1]
    words = {"any places": any_places, "any places, again": any_places}
    return of_arrays(read, words | {"one place": one_place})


def _random_words(number: int) -> np.ndarray:
    return np.frombuffer(secrets.token_bytes(4 * number), np.uint32)


def _sampler(num_keys: int = 50_000) -> Secrets:
    """Draws a batch with a key from a pool: that of batches of one kind."""
    sampling = PoissonSampling(_BATCH_SIZE / _NUM_EXAMPLES, 1)

    def draw(key: int) -> np.ndarray:
        return sampling.indices(0, num_examples=_NUM_EXAMPLES, key=key)

    batches = {key: draw(key) for key in map(secrets.randbits, [128] * num_keys)}

    def of_pool(sizes: range, first: int | None = None) -> Callable[[], Call]:
        pool = [
            key
            for key, batch in batches.items()
            if len(batch) in sizes and (first is None or batch[0] < first)
        ]
        return lambda: functools.partial(draw, secrets.choice(pool))

    size, as_many = _BATCH_SIZE, range(_BATCH_SIZE, _BATCH_SIZE + 1)
    return {
        f"{size} examples": of_pool(as_many),
        f"{size} examples, again": of_pool(as_many),
        "one more": of_pool(range(size + 1, size + 2)),
        "half as many again": of_pool(range(3 * size // 2 - 2, 2 * size)),
        f"{size}, one of the first 32": of_pool(as_many, first=32),
    }


def _loss(params: Any, batch: Any) -> jax.Array:
    hidden = jax.nn.relu(batch["x"] @ params["in"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def _step(policy: str, scale: DynamicScale | None = None, **fields: Any) -> Secrets:
    """Steps with another example, by a factor of its features, or another batch size.

    Only the compiled step is timed: Python would add its own noise to the times.
    """
    rng, size = np.random.default_rng(0), _BATCH_SIZE
    trainer = dpmp.DPTrainer(
        mechanism=dpmp.DPSGD(
            num_examples=_NUM_EXAMPLES,
            expected_batch_size=size,
            iterations=1,
            l2_clip_norm=0.05,
            noise_multiplier=1.0,
            truncated_batch_size=_PADDED,
            num_parameters=10_000,
            **fields,
        ),
        loss_fn=_loss,
        optimizer=optax.sgd(0.0),  # all steps have the same parameters
        policy=policy,
        loss_scale=scale,
    )
    params = {"in": rng.normal(size=(_WIDTH, _WIDTH)) / 8, "out": np.full(_WIDTH, 0.1)}
    state = trainer.init(jax.tree.map(np.float32, params))._replace(spent=None)
    batch = {
        "x": rng.normal(size=(_PADDED, _WIDTH)).astype(np.float32),
        "y": np.ones(_PADDED, np.float32),
    }
    program, constants = trainer._step.make_program(state, batch)
    keys = [jnp.asarray(_random_words(4)) for _ in range(3)]

    def run(given: Any) -> Any:
        nonlocal state
        state, *_ = program(state, keys, *given, (), constants)
        return state

    def secret(factor: float = 1.0, size: int = size) -> tuple[Any, np.ndarray]:
        first = np.arange(_PADDED)[:, None] == 0
        x = np.where(first, batch["x"] * np.float32(factor), batch["x"])
        return batch | {"x": x}, np.arange(_PADDED) >= size

    return of_arrays(
        run,
        {
            "clipped": secret(),
            "clipped, again": secret(),
            "not clipped": secret(1e-3),
            "gradient 0": secret(0.0),
            "subnormal": secret(1e-41),
            "huge": secret(1e30),
            "NaN": secret(np.nan),
            "one example more": secret(size=size + 1),
            "one less": secret(size=size - 1),
            "twice as many": secret(size=2 * size),
        },
    )


_PARTS: dict[str, Callable[[], Secrets]] = {
    "noise": _noise,
    "table of the noise": _table,
    "sampler": _sampler,
    "step": functools.partial(_step, "float32", microbatch_size=8),
    "step, whole batch": functools.partial(_step, "float32", microbatch_size=_PADDED),
    "step, per example": functools.partial(
        _step, "float32", microbatch_size=8, method="per_example"
    ),
    "step, float16": functools.partial(
        _step, "mixed_float16", DynamicScale(), microbatch_size=8
    ),
}


def benchmark(
    part: Annotated[str, harness.Each(_PARTS)], rounds: int | None = None
) -> harness.Lines:
    """A line for each secret of a part besides the first one."""
    rounds = rounds or (25_000 if part.startswith("step") else 100_000)
    (first, reference), *others = durations(_PARTS[part](), rounds).items()
    median = statistics.median(reference)
    for second, seconds in others:
        found, error = advantage(reference, seconds)
        yield {
            "rounds": rounds,
            "first": first,
            "second": second,
            "advantage": found,
            "standard_error": error,
            "microseconds": 1e6 * median,
            "microseconds_more": 1e6 * (statistics.median(seconds) - median),
        }


if __name__ == "__main__":
    harness.main(benchmark, tiny={"rounds": 10, "part": ["noise", "step"]})
