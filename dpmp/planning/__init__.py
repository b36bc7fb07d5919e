"""Answers "what do I run?" before any data is touched: noise, memory, microbatches.

With a given number of processed examples, a run can make many steps with small batches
or few steps with large batches. `compare_batch_sizes` finds the noise for each choice,
and `plan_to_start_from` chooses one. `python -m dpmp plan` prints both as a table, and
chooses between full fine-tuning and LoRA for the memory of a device.
`dpmp.memory` counts the memory of a step, and `tune` times its alternatives.
`BestOfRuns` accounts for a search among settings that publishes only its best run.

>>> plans = compare_batch_sizes(
...     num_examples=10_000,
...     epsilon=3.0,
...     delta=1e-6,
...     num_processed=100_000,
...     sizes=[100, 1_000],
... )
>>> for plan in plans:
...     print(plan.batch_size, plan.iterations, f"{plan.noise_multiplier:.2f}")
100 1000 0.87
1000 100 1.84
"""

from dpmp.planning import memory, noise_commands, plan_command
from dpmp.planning._best_of_runs import BestOfRuns
from dpmp.planning._compiled_steps import Candidate, Tuning, tune
from dpmp.planning._plans import (
    NoiseChoice,
    Plan,
    compare_batch_sizes,
    compare_noise,
    plan_to_start_from,
)

__all__ = [
    "BestOfRuns",
    "Candidate",
    "NoiseChoice",
    "Plan",
    "Tuning",
    "compare_batch_sizes",
    "compare_noise",
    "memory",
    "noise_commands",
    "plan_command",
    "plan_to_start_from",
    "tune",
]
