"""Differentially private training with precision-aware accumulation."""

from dpmp import batch_selection, loss_scaling
from dpmp.accounting import _guarantees
from dpmp.clipping._clipped_grad import (
    AuxiliaryOutput,
    BoundedSensitivityCallable,
    clip_pytree,
    clipped_fun,
    clipped_grad,
)
from dpmp.clipping._joint_sums import ReleasedMetrics
from dpmp.engines import book_keeping
from dpmp.mechanism._dpsgd import DPSGD
from dpmp.noise_addition import _privatizers
from dpmp.numerics._float_sums import DoubleWord
from dpmp.numerics._grid import GridArray
from dpmp.precision._autocast import autocast
from dpmp.precision._policy import Policy
from dpmp.tools import devices, memory, microbatches
from dpmp.tools.precision_report import PrecisionReport, precision_report
from dpmp.training._trainer import DPTrainer, SensitiveOutputs, Source, TrainingState

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
