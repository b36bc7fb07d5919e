"""Does Adam train better if it knows the noise?

Fine-tunes a model with `optax.adam` and with `dpmp.optimizers.dp_adam`, on a grid of
learning rates. All runs begin from the same parameters. Runs with the same seed have
the same batches and the same noise. Quoted are losses on held-out records: mean and
range over the seeds.

    python -m benchmarks.dp_adam         # five minutes on two quiet cores
    python -m benchmarks.dp_adam --model smollm2 --steps 6 --batch-size 64 --seeds 2
                                         # an hour on two cores with other work

The first command trains the transformer of examples/finetune_transformer.py, made
smaller, after training on the public text. The second one trains adapters of
SmolLM2-135M, like examples/finetune_llm.py, in smaller batches.

Every line is appended to benchmarks/results/dp_adam.jsonl.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dpmp
from benchmarks import example_files, results

RATES = {"transformer": [1e-3, 3e-3, 1e-2, 3e-2], "smollm2": [1.5e-3, 5e-3, 1.5e-2]}
WIDTH, LAYERS, CONTEXT, PRETRAINING_STEPS = 32, 1, 32, 300  # of the small transformer
LENGTH = 64  # tokens of a record for SmolLM2


class Task(NamedTuple):
    """A model to fine-tune, and its private records."""

    model: str
    unit: str
    loss_fn: Callable[..., jax.Array]
    params: Any
    records: Any
    evaluate: Callable[[Any], float]
    policy: str
    microbatch_size: int


def transformer() -> Task:
    """The transformer of the example, made smaller, after its public training."""
    example = example_files.load("finetune_transformer")
    example.WIDTH, example.HEADS = WIDTH, 2
    example.LAYERS, example.CONTEXT = LAYERS, CONTEXT
    texts = example.private_and_held_out(None)
    train, held_out = map(example.encode, texts)
    graphdef, params = nnx.split(example.Transformer(nnx.Rngs(0)), nnx.Param)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        nats, counts = example.losses(graphdef, params, tokens)
        return nats[0] / counts[0]

    args = argparse.Namespace(pretraining_steps=PRETRAINING_STEPS, seed=0)
    policy = dpmp.Policy.from_name("float32")
    params = example.pretrain(graphdef, params, policy, args)
    evaluate = functools.partial(example.evaluate, graphdef, tokens=held_out)
    unit = "nats per byte"
    return Task("transformer", unit, loss_fn, params, train, evaluate, "float32", 32)


def smollm2() -> Task:
    """Adapters of SmolLM2-135M, as the example has them."""
    example = example_files.load("finetune_llm")
    model = example.llm.load(example.find_model(None), dtype=jnp.bfloat16)
    make_batch = functools.partial(
        example.llm.make_batch, model.tokenizer, length=LENGTH
    )
    train, held_out = example.private_and_held_out(None)
    held_out = make_batch(held_out[: example.MAX_HELD_OUT])
    return Task(
        model="smollm2",
        unit="nats per token",
        loss_fn=example.lora.apply(
            functools.partial(example.llm.mean_nats, model.apply), model.params
        ),
        params=example.lora.init(jax.random.key(0), model.params, 8, example.TARGETS),
        records=make_batch(train),
        evaluate=functools.partial(example.evaluate, model, held_out),
        policy="mixed_bfloat16",
        microbatch_size=16,
    )


TASKS = {"transformer": transformer, "smollm2": smollm2}


def optimizers(mechanism: dpmp.DPSGD) -> dict[str, optax.GradientTransformation]:
    """Optimizers whose learning rate is a part of their state, by name."""
    schedule = optax.linear_schedule(1.0, 0.0, mechanism.iterations)
    make = functools.partial(dpmp.optimizers.dp_adam, schedule, mechanism, b2=0.99)
    found = {"adam": optax.adam(schedule, b2=0.99)}
    found |= {f"dp_adam, floor {floor}": make(floor=floor) for floor in (1.0, 0.1)}
    scale = optax.inject_hyperparams(optax.scale)
    return {name: optax.chain(x, scale(step_size=1.0)) for name, x in found.items()}


def fit(trainer: dpmp.DPTrainer, task: Task, rate: float) -> Any:
    """The parameters after a run with this learning rate."""
    state = trainer.init(task.params)
    of_adam, of_scale = state.opt_state
    of_scale.hyperparams["step_size"] = jnp.float32(rate)
    state = state._replace(opt_state=(of_adam, of_scale))
    return trainer.fit(state, task.records, progress=False).params


def main() -> None:
    """Trains with every optimizer and learning rate, and appends their losses."""
    parser = argparse.ArgumentParser(description="Compares dp_adam to adam.")
    add = parser.add_argument
    add("--model", choices=TASKS, default="transformer")
    add("--steps", type=int, default=30)
    add("--batch-size", type=int, default=128)
    add("--epsilon", type=float, default=8.0)
    add("--seeds", type=int, default=3)
    add("--rates", type=float, nargs="+")
    args = parser.parse_args()
    task = TASKS[args.model]()
    mechanism = dpmp.DPSGD(
        num_examples=len(jax.tree.leaves(task.records)[0]),
        expected_batch_size=args.batch_size,
        iterations=args.steps,
        l2_clip_norm=1.0,
        microbatch_size=task.microbatch_size,
        num_parameters=sum(x.size for x in jax.tree.leaves(task.params)),
    ).calibrate(epsilon=args.epsilon, delta=1e-5)
    before = task.evaluate(task.params)
    trainers = {
        name: [
            dpmp.DPTrainer(
                mechanism=mechanism,
                loss_fn=task.loss_fn,
                optimizer=optimizer,
                policy=task.policy,
                prng_key=jax.random.key(seed),
            )
            for seed in range(args.seeds)
        ]
        for name, optimizer in optimizers(mechanism).items()
    }
    for rate in args.rates or RATES[args.model]:
        for name, of_seeds in trainers.items():
            losses = [task.evaluate(fit(trainer, task, rate)) for trainer in of_seeds]
            results.append(
                "dp_adam",
                model=task.model,
                unit=task.unit,
                steps=args.steps,
                batch_size=args.batch_size,
                epsilon=args.epsilon,
                noise_multiplier=mechanism.noise_multiplier,
                optimizer=name,
                learning_rate=rate,
                before=round(before, 4),
                losses=[round(x, 4) for x in losses],
                mean=round(float(np.mean(losses)), 4),
            )


if __name__ == "__main__":
    main()
