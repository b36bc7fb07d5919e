"""Does Adam train better if it knows the noise?

Fine-tunes the transformer of examples/finetune_transformer.py, made smaller, with
`optax.adam` and with `dpmp.optimizers.dp_adam`, on a grid of learning rates. All runs
begin from the same parameters, which are trained on the public text first. Runs with
the same seed have the same batches and the same noise. Quoted are nats per byte on
held-out records: mean and range over the seeds.

    python -m benchmarks.dp_adam         # five minutes on two quiet cores

Every line is appended to benchmarks/results/dp_adam.jsonl.
"""

import argparse
import functools
import importlib.util
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dpmp
from benchmarks import results

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "finetune_transformer.py"
RATES = [1e-3, 3e-3, 1e-2, 3e-2]
SEEDS = (0, 1, 2)


def load_example(args: argparse.Namespace) -> Any:
    """The example as a module, with a smaller model."""
    spec = importlib.util.spec_from_file_location("finetune_transformer", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.WIDTH, example.HEADS = args.width, 2
    example.LAYERS, example.CONTEXT = args.layers, args.context
    return example


def optimizers(mechanism: dpmp.DPSGD) -> dict[str, optax.GradientTransformation]:
    """Optimizers whose learning rate is a part of their state, by name."""
    schedule = optax.linear_schedule(1.0, 0.0, mechanism.iterations)
    make = functools.partial(dpmp.optimizers.dp_adam, schedule, mechanism, b2=0.99)
    found = {"adam": optax.adam(schedule, b2=0.99)}
    found |= {f"dp_adam, floor {floor}": make(floor=floor) for floor in (1.0, 0.1)}
    scale = optax.inject_hyperparams(optax.scale)
    return {name: optax.chain(x, scale(step_size=1.0)) for name, x in found.items()}


def fit(
    trainer: dpmp.DPTrainer, params: Any, tokens: np.ndarray, rate: float, seed: int
) -> Any:
    """The parameters after a run with this learning rate."""
    state = trainer.init(params, prng_key=jax.random.key(seed))
    of_adam, of_scale = state.opt_state
    of_scale.hyperparams["step_size"] = jnp.float32(rate)
    state = state._replace(opt_state=(of_adam, of_scale))
    return trainer.fit(state, tokens, progress=False).params


def main() -> None:
    """Trains with every optimizer and learning rate, and appends their losses."""
    parser = argparse.ArgumentParser(description="Compares dp_adam to adam.")
    add = parser.add_argument
    add("--width", type=int, default=32)
    add("--layers", type=int, default=1)
    add("--context", type=int, default=32)
    add("--steps", type=int, default=30)
    add("--batch-size", type=int, default=128)
    add("--epsilon", type=float, default=8.0)
    add("--pretraining-steps", type=int, default=300)
    add("--rates", type=float, nargs="+", default=RATES)
    args = parser.parse_args()
    settings = {name: x for name, x in vars(args).items() if name != "rates"}
    example, args.seed = load_example(args), 0
    train, held_out = map(
        example.encode, example.split(example.standard_library_docstrings())
    )
    policy = dpmp.Policy.from_name("float32")
    graphdef, params = nnx.split(example.Transformer(nnx.Rngs(0)), nnx.Param)
    mechanism = dpmp.DPSGD(
        num_examples=len(train),
        expected_batch_size=args.batch_size,
        iterations=args.steps,
        l2_clip_norm=1.0,
        microbatch_size=32,
        num_parameters=sum(x.size for x in jax.tree.leaves(params)),
    ).calibrate(epsilon=args.epsilon, delta=1e-5)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        nats, counts = example.losses(graphdef, params, tokens)
        return nats[0] / counts[0]

    params = example.pretrain(graphdef, params, policy, args)
    before = example.evaluate(graphdef, params, held_out)
    trainers = {
        name: dpmp.DPTrainer(
            mechanism=mechanism, loss_fn=loss_fn, optimizer=optimizer, policy=policy
        )
        for name, optimizer in optimizers(mechanism).items()
    }
    for rate in args.rates:
        for name, trainer in trainers.items():
            found = [fit(trainer, params, train, rate, seed) for seed in SEEDS]
            losses = [example.evaluate(graphdef, x, held_out) for x in found]
            results.append(
                "dp_adam",
                **settings,
                noise_multiplier=mechanism.noise_multiplier,
                optimizer=name,
                learning_rate=rate,
                nats_per_byte_before=round(before, 4),
                nats_per_byte=[round(x, 4) for x in losses],
                mean=round(float(np.mean(losses)), 4),
            )


if __name__ == "__main__":
    main()
