"""The directory of a training run: its lock, privacy ledger, checkpoints and metrics.

A step costs nothing until a checkpoint releases it, or until something that depends on
it may be seen. The ledger is an append-only file of everything that was paid for.
`python -m dpmp ledger DIR` prints it.
"""

from dpmp.runs._arrays import check_same_types, types_of
from dpmp.runs._directory import (
    RunDirectory,
    has_files_of,
    ledger_of,
    opened,
)
from dpmp.runs._files import checked_path
from dpmp.runs._ledger import Ledger
from dpmp.runs._metrics import MetricsFile
from dpmp.runs._metrics import read as read_metrics
from dpmp.runs._spent import Segment, Spent

__all__ = [
    "Ledger",
    "MetricsFile",
    "RunDirectory",
    "Segment",
    "Spent",
    "check_same_types",
    "checked_path",
    "has_files_of",
    "ledger_of",
    "opened",
    "read_metrics",
    "types_of",
]
