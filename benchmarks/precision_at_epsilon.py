"""Does rounding hurt more with privacy than without?

DPQuant (Gao et al., 2025) found that quantised training loses much more accuracy with
DP-SGD than without, and that it helps to round other layers in each step. Here, the two
tasks of `accuracy_by_precision.py` are trained with products in formats of few bits, of
all parameters, or of those for which a coin in each step says so, at two epsilons and
without privacy. Seeds, data and optimizer are those of that benchmark. A third task
adapts a language model, by the settings of `examples/finetune_llm.py` with fewer steps
and shorter records; one coin is for all of its frozen matrices.

    python -m benchmarks.precision_at_epsilon           # an hour on two cores
    python -m benchmarks.precision_at_epsilon --task "SmolLM2 adapters" --seeds 1 \
        --privacy "epsilon 8" none --row mixed_bfloat16 nvfp4 "nvfp4, rotating"

A line has the scores on held-out data of all seeds, computed in float32; those of the
language model with its frozen base in bfloat16. All data are public.
"""

from typing import Annotated, Any

import jax.numpy as jnp

import dpmp
from benchmarks import accuracy_by_precision, harness
from benchmarks.accuracy_by_precision import DELTA, LARGE, TASKS, Row


def _rounded(products: str, share: float = 1.0) -> Row:
    return Row(
        dpmp.Policy(jnp.float32, jnp.bfloat16, products=products, rounded_share=share)
    )


ROWS: dict[str, Row] = {
    "float32": Row("float32"),
    "mixed_bfloat16": Row("mixed_bfloat16"),
    "mixed_float16": Row("mixed_float16", 2.0**24),
    **{name: _rounded(name) for name in ("float8", "mxfp8", "int8", "nvfp4")},
    "int8, rotating": _rounded("int8", 0.5),
    "nvfp4, rotating": _rounded("nvfp4", 0.5),
}
PRIVACY = {"epsilon 8": 8.0, "epsilon 1": 1.0, "none": None}


def benchmark(
    task: Annotated[str, harness.Each([*TASKS, *LARGE], default=tuple(TASKS))],
    privacy: Annotated[str, harness.Each(PRIVACY)],
    row: Annotated[str, harness.Each(ROWS)],
    seeds: int = 5,
    steps: int | None = None,
) -> harness.Lines:
    """A line for each task, epsilon and format."""
    precision: Any = ROWS[row]
    if precision.loss_scale and task in LARGE:  # their losses are weighted with 1
        precision = precision._replace(loss_scale=2.0**7)
    dtype = dpmp.Policy.parse(precision.policy).compute_dtype
    made, mechanism = accuracy_by_precision.prepare(task, steps, dtype)
    epsilon = PRIVACY[privacy]
    if epsilon is None:
        mechanism = mechanism.without_privacy()
    else:
        mechanism = mechanism.calibrate(epsilon=epsilon, delta=DELTA)
    scores: list[Any] = []
    for seed in range(seeds):
        initial = made.initial_params(seed)
        params, *_ = accuracy_by_precision.train(
            made, precision, mechanism, initial, seed
        )
        scores.append(made.evaluate(params))
    yield {"metric": made.metric, "steps": made.steps, "score": scores}


if __name__ == "__main__":
    tiny = {"task": ["digits"], "row": ["nvfp4, rotating"], "privacy": ["epsilon 8"]}
    harness.main(benchmark, tiny=tiny | {"seeds": 1, "steps": 3})
