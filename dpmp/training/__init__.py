"""DPTrainer trains with a privacy mechanism, a loss and an optimizer.

`init` makes the first state of a run. `fit` samples the batches, makes all steps and
reports epsilon, and `train_step` makes one step. See `DPTrainer` for an example.
"""

from dpmp.training._state import SensitiveOutputs, TrainingState
from dpmp.training._tickets import check_copy, root_of
from dpmp.training._trainer import DPTrainer

__all__ = [
    "DPTrainer",
    "SensitiveOutputs",
    "TrainingState",
    "check_copy",
    "root_of",
]
