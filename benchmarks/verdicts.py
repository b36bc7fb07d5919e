"""Is the verdict of `dpmp.compare_policies` right?

Twenty-four tasks, of which some are made so that 8 or 16 bits are too few, some of them
only after parameters have moved: a verdict on each of them, and private training under
the policy and in float32. The verdict "yes" is right if the two losses after 100 steps
are within two standard errors, and "no" if they are not.

    python -m benchmarks.verdicts                # a quarter of an hour on two cores
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpmp
from benchmarks import harness

_NUM_EXAMPLES, _SIZE, _WIDTH, _CLASSES = 2048, 16, 32, 4
_OPTIMIZER = optax.sgd(0.5)


class Task(NamedTuple):
    """A loss of one example, in a batch of one, and what is special in its training."""

    loss: Callable[[Any, Any], jax.Array]
    policies: str  # that are tried
    input_scale: float = 1.0
    length: int = 1  # positions of an example
    initial: Mapping[str, jax.Array] = {}  # parameters in place of random ones


def _initial_params(task: Task) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"first": (_SIZE, _WIDTH), "second": (_WIDTH, _CLASSES)}
    weights = {
        k: jnp.asarray(rng.normal(0, s[0] ** -0.5, s), jnp.float32)
        for k, s in shapes.items()
    }
    others = {"bias": jnp.zeros(_CLASSES), "scale": jnp.ones(_WIDTH)}
    return {**weights, **others, **task.initial}


def _hidden(params: Any, batch: Any) -> jax.Array:
    return jax.nn.relu(batch["x"][:, 0] @ params["first"])


def _classified(params: Any, hidden: jax.Array, batch: Any) -> jax.Array:
    return _logits_to_loss(hidden @ params["second"] + params["bias"], batch)


def _logits_to_loss(logits: jax.Array, batch: Any) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), batch["label"]
    )
    return jnp.mean(losses)


def _plain(params: Any, batch: Any) -> jax.Array:
    return _classified(params, _hidden(params, batch), batch)


def _normalised(params: Any, batch: Any) -> jax.Array:
    hidden = batch["x"][:, 0] @ params["first"]
    hidden = hidden * jax.lax.rsqrt(jnp.mean(jnp.square(hidden), -1, keepdims=True))
    return _classified(params, jax.nn.relu(hidden * params["scale"]), batch)


def _running_mean(params: Any, batch: Any) -> jax.Array:
    """Adds the positions up one after the other, in the dtype of the products."""
    hidden = jax.nn.relu(batch["x"][0] @ params["first"])
    total, _ = jax.lax.scan(
        lambda c, h: (c + h, None), jnp.zeros_like(hidden[0]), hidden
    )
    return _classified(params, (total / len(hidden))[None], batch)


def _recurrent(params: Any, batch: Any) -> jax.Array:
    def body(state: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        new = jnp.tanh(x @ params["first"] + state * params["scale"])
        return new, None

    state, _ = jax.lax.scan(body, jnp.zeros(_WIDTH, batch["x"].dtype), batch["x"][0])
    return _classified(params, state[None], batch)


def _attention(params: Any, batch: Any) -> jax.Array:
    hidden = batch["x"][0] @ params["first"]
    weights = jax.nn.softmax(hidden @ hidden.T * params["scale"][0], axis=-1)
    return _classified(params, jnp.mean(weights @ hidden, axis=0)[None], batch)


def _far_from_zero(params: Any, batch: Any) -> jax.Array:
    """A large constant is added and taken away again."""
    logits = (_hidden(params, batch) @ params["second"] + 1000) - 1000
    return _logits_to_loss(logits + params["bias"], batch)


def _tiny(params: Any, batch: Any) -> jax.Array:
    return 1e-6 * _plain(params, batch)


def _exponential(params: Any, batch: Any) -> jax.Array:
    """Sums of exponentials without care for their range."""
    logits = 4 * (_hidden(params, batch) @ params["second"]) + params["bias"]
    total = jnp.sum(jnp.exp(logits), axis=-1)
    return jnp.mean((jnp.log(total) - logits[:, batch["label"][0]]).astype(jnp.float32))


def _offset(params: Any, batch: Any) -> jax.Array:
    """A parameter with a large value that the model takes differences to."""
    hidden = batch["x"][:, 0] @ params["first"] + params["scale"]
    return _classified(params, jax.nn.relu(hidden - 300), batch)


def _far_softmax(params: Any, batch: Any) -> jax.Array:
    """Rounds nothing before the logits have grown."""
    logits = _hidden(params, batch) @ params["second"] + params["bias"] + 1000
    return _logits_to_loss(logits, batch)


def _difference(params: Any, batch: Any) -> jax.Array:
    """Two heads, of which the difference counts, from values that 8 bits can hold."""
    head = params["second"] - params["third"]
    return _classified(params | {"second": head}, _hidden(params, batch), batch)


_ZERO_HEAD = {"second": jnp.zeros((_WIDTH, _CLASSES))}
_HEAD = jnp.full((_WIDTH, _CLASSES), 500.0)
_LARGE_BIAS = {"scale": jnp.full(_WIDTH, 300.0)}
TASKS = {
    "mlp": Task(_plain, "bf16 fp16 float8"),
    "normalised": Task(_normalised, "bf16 fp16 float8"),
    "large inputs": Task(_normalised, "bf16 fp16", 1e4),
    "running mean": Task(_running_mean, "bf16 fp16", length=256),
    "recurrent": Task(_recurrent, "bf16 float8", length=16),
    "attention": Task(_attention, "bf16 fp16 float8", length=8),
    "far from zero": Task(_far_from_zero, "bf16 fp16"),
    "tiny loss": Task(_tiny, "fp16"),
    "exponentials": Task(_exponential, "fp16", 2.0),
    "offset": Task(_offset, "bf16", initial=_LARGE_BIAS),
    "far softmax": Task(_far_softmax, "bf16 fp16", initial=_ZERO_HEAD),
    "difference": Task(
        _difference, "bf16 fp16", initial={"second": _HEAD, "third": _HEAD}
    ),
}
_POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16", "float8": "float8"}
PAIRS = [f"{name}, {x}" for name, task in TASKS.items() for x in task.policies.split()]


def benchmark(
    task: Annotated[str, harness.Each(PAIRS)],
    epsilon: float = 8.0,
    steps: int = 100,
    seeds: int = 8,
) -> harness.Lines:
    """A line for each task: the verdict, and the losses after training."""
    name, _, short = task.partition(", ")
    chosen, policy = TASKS[name], _POLICIES[short]
    data, params = _data(chosen), _initial_params(chosen)
    mechanism = dpmp.DPSGD(
        num_examples=_NUM_EXAMPLES,
        expected_batch_size=128,
        iterations=steps,
        l2_clip_norm=dpmp.AutomaticClipping(),
    ).calibrate(epsilon=epsilon, delta=1e-5)
    some = {k: x[:64] for k, x in data.items()}
    (verdict,) = dpmp.compare_policies(
        chosen.loss,
        params,
        some,
        mechanism=mechanism,
        optimizer=_OPTIMIZER,
        policies=[policy],
    )
    policies = ("float32", policy)
    found = [
        harness.mean_and_error(_losses_after(chosen, params, data, mechanism, x, seeds))
        for x in policies
    ]
    means, errors = zip(*found, strict=True)
    is_close = abs(means[0] - means[1]) <= 2 * math.hypot(*errors)
    yield {
        "policy": policy,
        "safe": verdict.is_safe and not verdict.float32_paths,
        "float32_paths": verdict.float32_paths,
        **harness.rounded(
            {x: getattr(verdict, x) for x in ("kept", "aside", "error")}, 4
        ),
        "losses": dict(zip(policies, means, strict=True)),
        "standard_errors": dict(zip(policies, errors, strict=True)),
        "same_loss": is_close,
    }


def _data(task: Task) -> dict[str, np.ndarray]:
    """Inputs, and the labels that a random network gives them."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(_NUM_EXAMPLES, task.length, _SIZE)).astype(np.float32)
    x += rng.normal(size=(_NUM_EXAMPLES, 1, _SIZE)).astype(np.float32)
    teacher = rng.normal(size=(_SIZE, _CLASSES))
    label = np.argmax(x.mean(1) @ teacher, axis=1).astype(np.int32)
    return {"x": x * np.float32(task.input_scale), "label": label}


def _losses_after(
    task: Task, params: Any, data: Any, mechanism: dpmp.DPSGD, policy: str, seeds: int
) -> list[float]:
    trainer = dpmp.DPTrainer(
        mechanism=mechanism, loss_fn=task.loss, optimizer=_OPTIMIZER, policy=policy
    )

    @jax.jit
    def mean_loss(params: Any) -> jax.Array:
        def of_one(example: Any) -> jax.Array:
            return task.loss(params, jax.tree.map(lambda x: x[None], example))

        return jnp.mean(jax.lax.map(of_one, data, batch_size=64))

    found = []
    for _ in range(seeds):
        state = trainer.fit(trainer.init(params), data, progress=False)
        found.append(float(mean_loss(state.params)))
    return found


if __name__ == "__main__":
    tiny = {"task": ["mlp, bf16"], "steps": 4, "seeds": 2}
    harness.main(benchmark, tiny=tiny)
