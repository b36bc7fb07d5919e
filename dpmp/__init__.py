"""Differentially private training with precision-aware accumulation."""

from dpmp import (
    accounting,
    batch_selection,
    book_keeping,
    devices,
    loss_scaling,
    memory,
    microbatches,
    noise_addition,
)
from dpmp._accumulation import DoubleWord
from dpmp._grid import GridArray
from dpmp.autocast import autocast
from dpmp.clipping import (
    AuxiliaryOutput,
    BoundedSensitivityCallable,
    clip_pytree,
    clipped_fun,
    clipped_grad,
)
from dpmp.mechanism import DPSGD
from dpmp.precision import Policy
from dpmp.precision_report import PrecisionReport, precision_report
from dpmp.released_metrics import ReleasedMetrics
from dpmp.training import DPTrainer, SensitiveOutputs, Source, TrainingState

__all__ = [
    "DPSGD",
    "AuxiliaryOutput",
    "BoundedSensitivityCallable",
    "DPTrainer",
    "DoubleWord",
    "GridArray",
    "Policy",
    "PrecisionReport",
    "ReleasedMetrics",
    "SensitiveOutputs",
    "Source",
    "TrainingState",
    "accounting",
    "autocast",
    "batch_selection",
    "book_keeping",
    "clip_pytree",
    "clipped_fun",
    "clipped_grad",
    "devices",
    "loss_scaling",
    "memory",
    "microbatches",
    "noise_addition",
    "precision_report",
]
