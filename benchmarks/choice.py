"""Is the default choice of method and microbatch size near the best one?

Models are small and of many kinds. Timed in turn are the sum of clipped gradients with
the defaults of `DPSGD` (bounded sums, in microbatches that follow from shapes), the
plain gradient, and both proved methods in microbatches of several sizes. `regret` is
the median ratio of the default's time to that of the fastest choice.

    python -m benchmarks.choice        # a quarter of an hour on two cores
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp

import dpmp
from benchmarks import harness, models
from dpmp import _timing, lora
from dpmp.lora import Adapters

SIZES = (1, 4, 16, 64)


def dense(dtype: Any, batch_size: int, sizes: Sequence[int]) -> models.Task:
    """Dense layers of any sizes."""
    params = [jnp.full(pair, 0.1, dtype) for pair in itertools.pairwise(sizes)]

    def loss_fn(params, batch):
        *hidden, last = params
        x = functools.reduce(lambda x, w: jax.nn.relu(x @ w), hidden, batch)
        return jnp.mean(jnp.square((x @ last).astype(jnp.float32)))

    return models.Task(loss_fn, params, jnp.ones((batch_size, sizes[0]), dtype))


def small_convolutions(dtype: Any, batch_size: int = 256) -> models.Task:
    """Two 3 x 3 convolutions of 8 x 8 images."""
    shapes = {"first": (3, 3, 3, 32), "second": (3, 3, 32, 32), "head": (32, 10)}
    params = {name: jnp.full(shape, 0.1, dtype) for name, shape in shapes.items()}

    def loss_fn(params, x):
        for name in ("first", "second"):
            x = jax.nn.relu(models.convolve(x, params[name], 1))
        return jnp.mean(jnp.square(x.mean((1, 2)) @ params["head"]))

    return models.Task(loss_fn, params, jnp.ones((batch_size, 8, 8, 3), dtype))


def state_space(dtype: Any, batch_size: int = 16) -> models.Task:
    """A selective state-space layer on 64 tokens, with states of 128 x 16 numbers."""
    shapes = {
        "embed": (64, 128),
        "decay": (128, 16),
        "step": (128, 128),
        "input": (128, 16),
        "output": (128, 16),
        "head": (128, 64),
    }
    params = {name: jnp.full(shape, 0.1, dtype) for name, shape in shapes.items()}

    def loss_fn(params, tokens):
        x = params["embed"][tokens]
        step = jax.nn.softplus(x @ params["step"])[..., None]
        decay = jnp.exp(-step * jnp.exp(params["decay"]))
        inputs = step * (x @ params["input"])[:, :, None] * x[..., None]

        def update(state, parts):
            state = parts[0] * state + parts[1]
            return state, state

        by_time = [jnp.moveaxis(part, 1, 0) for part in (decay, inputs)]
        _, states = jax.lax.scan(update, jnp.zeros_like(inputs[:, 0]), by_time)
        y = jnp.einsum("tbdn,btn->btd", states, x @ params["output"])
        return models.cross_entropy((y @ params["head"])[:, :-1], tokens[:, 1:])

    return models.Task(loss_fn, params, jnp.ones((batch_size, 64), jnp.int32))


def adapters(dtype: Any, batch_size: int = 16) -> models.Task:
    """LoRA factors of all matrices of a transformer's layers."""
    base = models.transformer(dtype, batch_size, width=256)
    targets = "blocks/.*/(qkv|out|up|down)"
    factors: Adapters = lora.init(
        jax.random.key(0), base.params, rank=8, targets=targets
    )
    factors = jax.tree.map(lambda x: x.astype(dtype), factors)
    return models.Task(lora.apply(base.loss_fn, base.params), factors, base.batch)


_transformer = models.transformer
TASKS: dict[str, Callable[[Any], models.Task]] = {
    "logistic regression": lambda dtype: dense(dtype, 256, (100, 10)),
    "mlp, small": lambda dtype: dense(dtype, 256, (64, 128, 128, 10)),
    "mlp": lambda dtype: dense(dtype, 256, (784, 512, 512, 10)),
    "autoencoder": lambda dtype: dense(dtype, 64, (784, 400, 20, 400, 784)),
    "small convolutions": small_convolutions,
    "cnn": models.cnn,
    "lstm": functools.partial(models.lstm, batch_size=32),
    "state space": state_space,
    "transformer, tiny": functools.partial(_transformer, width=16, depth=1, length=8),
    "transformer": functools.partial(_transformer, batch_size=64, width=64, depth=2),
    "transformer, 3M": functools.partial(
        _transformer, batch_size=16, width=256, length=128
    ),
    "transformer, LoRA": adapters,
}


def measure(
    task: Annotated[str, harness.Each(TASKS)],
    dtype: Annotated[str, harness.Each(models.DTYPES)],
    rounds: int = 7,
) -> harness.Lines:
    """Figures of one model in one dtype."""
    subject = TASKS[task](models.DTYPES[dtype])
    batch_size = len(jax.tree.leaves(subject.batch)[0])
    methods: dict[str, dict[str, Any]] = {
        "book_keeping": {"method": "book_keeping"},
        "per_example": {"arithmetic": "exact"},
    }
    clip = functools.partial(dpmp.clipped_grad, subject.loss_fn, l2_clip_norm=1.0)
    default = clip(**methods["book_keeping"])
    chosen = default.microbatch_size(*subject.args)
    functions = {"plain": jax.grad(subject.loss_fn), "default": default}
    for name, options in methods.items():
        for size in SIZES:
            is_default = name == "book_keeping" and size == chosen
            if batch_size % size == 0 and not is_default:
                fn = clip(**options, microbatch_size=size)
                functions[f"{name}, {size}"] = fn
    _, seconds = _timing.measure(functions, rounds, *subject.args)
    measured = harness.Measured(seconds)
    medians = measured.medians()
    best = min(medians.keys() - {"plain"}, key=medians.__getitem__)
    yield {
        "chosen": chosen,
        "best": best,
        "regret": measured.ratio("default", best),
        "over_plain": measured.ratio("default", "plain"),
        "milliseconds": measured.milliseconds(),
    }


if __name__ == "__main__":
    harness.main(
        measure,
        tiny={"task": ["logistic regression"], "dtype": ["float32"], "rounds": 1},
    )
