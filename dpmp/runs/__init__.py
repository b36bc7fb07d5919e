"""The files of a training run: its lock and its privacy ledger.

The ledger is an append-only file. It has a record of every step that was ever begun,
written to disk before the step, so that the epsilon that it states is never too small.
A run holds the lock of its directory while it writes. See `Ledger` for an example, and
`python -m dpmp ledger DIR` for a report.
"""

from dpmp.runs._fingerprints import data_tag, key_fingerprint
from dpmp.runs._ledger import Entry, Ledger
from dpmp.runs._lock import locked

__all__ = ["Entry", "Ledger", "data_tag", "key_fingerprint", "locked"]
