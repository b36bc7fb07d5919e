"""The directory of a training run: its lock, privacy ledger, checkpoints and metrics.

A step is released when the checkpoint that holds it is on the disk, and only then does
it cost anything. The ledger is an append-only file of everything that was released.
`python -m dpmp ledger DIR` prints it.
"""

from dpmp.runs._directory import (
    RunDirectory,
    check_people,
    checked_path,
    opened,
    steps_within,
)
from dpmp.runs._ledger import Ledger
from dpmp.runs._metrics import read as read_metrics
from dpmp.runs._spent import Segment, Spent

__all__ = [
    "Ledger",
    "RunDirectory",
    "Segment",
    "Spent",
    "check_people",
    "checked_path",
    "opened",
    "read_metrics",
    "steps_within",
]
