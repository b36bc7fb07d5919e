"""Differentially private training with precision-aware accumulation."""

from dpmp import (
    accounting,
    batch_selection,
    book_keeping,
    microbatches,
    noise_addition,
)
from dpmp._accumulation import DoubleWord
from dpmp._grid import GridArray
from dpmp.clipping import (
    AuxiliaryOutput,
    BoundedSensitivityCallable,
    clip_pytree,
    clipped_fun,
    clipped_grad,
)
from dpmp.mechanism import DPSGD
from dpmp.precision import Policy
from dpmp.training import DPTrainer, SensitiveOutputs, Source, TrainingState

__all__ = [
    "DPSGD",
    "AuxiliaryOutput",
    "BoundedSensitivityCallable",
    "DPTrainer",
    "DoubleWord",
    "GridArray",
    "Policy",
    "SensitiveOutputs",
    "Source",
    "TrainingState",
    "accounting",
    "batch_selection",
    "book_keeping",
    "clip_pytree",
    "clipped_fun",
    "clipped_grad",
    "microbatches",
    "noise_addition",
]
