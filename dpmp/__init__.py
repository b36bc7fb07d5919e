"""Differentially private training with precision-aware accumulation."""

from dpmp import (
    accounting,
    batch_selection,
    lora,
    loss_scaling,
    noise_addition,
    planning,
    runs,
    strategies,
)
from dpmp.clipping import (
    AdaptiveClipNorm,
    AutomaticClipping,
    AuxiliaryOutput,
    BoundedSensitivityCallable,
    ReleasedMetrics,
    clip_pytree,
    clipped_fun,
    clipped_grad,
)
from dpmp.engines import book_keeping
from dpmp.mechanism import DPSGD
from dpmp.numerics import GridArray
from dpmp.planning import memory
from dpmp.precision import Policy, autocast, in_8_bits
from dpmp.sources import Source, check_source
from dpmp.tools import audit, devices
from dpmp.tools.precision_report import (
    PrecisionReport,
    compare_policies,
    precision_report,
)
from dpmp.training import DPTrainer, SensitiveOutputs, TrainingState

__version__ = "0.1.0"

__all__ = [
    "DPSGD",
    "AdaptiveClipNorm",
    "AutomaticClipping",
    "AuxiliaryOutput",
    "BoundedSensitivityCallable",
    "DPTrainer",
    "GridArray",
    "Policy",
    "PrecisionReport",
    "ReleasedMetrics",
    "SensitiveOutputs",
    "Source",
    "TrainingState",
    "accounting",
    "audit",
    "autocast",
    "batch_selection",
    "book_keeping",
    "check_source",
    "clip_pytree",
    "clipped_fun",
    "clipped_grad",
    "compare_policies",
    "devices",
    "in_8_bits",
    "lora",
    "loss_scaling",
    "memory",
    "noise_addition",
    "planning",
    "precision_report",
    "runs",
    "strategies",
]
