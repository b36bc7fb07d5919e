"""Files of a run: checkpoints and the ledger."""
