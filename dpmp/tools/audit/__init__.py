"""Audits: attacks on your own run, which a false claim does not survive.

`canaries` attacks the noise and the sampling of a mechanism, and finds a lower bound on
epsilon. `replay` checks that nothing but the noisy gradients depends on the data.
`sums` checks the sums of a loop of your own. `batches` checks that batches are drawn as
the accountant assumes. `memorization` finds a lower bound from the losses of a finished
model on made-up records. `save` writes results to a file, for `python -m dpmp report`.
"""

from dpmp.tools.audit._batches import BatchAudit, batches
from dpmp.tools.audit._canaries import CanaryAudit, canaries
from dpmp.tools.audit._command import add_audit_command
from dpmp.tools.audit._memorization import MemorizationAudit, memorization
from dpmp.tools.audit._replay import ReplayAudit, replay
from dpmp.tools.audit._sums import SumsAudit, sums
from dpmp.tools.checks import save

__all__ = [
    "BatchAudit",
    "CanaryAudit",
    "MemorizationAudit",
    "ReplayAudit",
    "SumsAudit",
    "add_audit_command",
    "batches",
    "canaries",
    "memorization",
    "replay",
    "save",
    "sums",
]
