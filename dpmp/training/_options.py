"""How to run the steps of a run, as the user of `DPTrainer.fit` wants it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from dpmp import _validate
from dpmp.mechanism import DPSGD
from dpmp.sources import check_sharding
from dpmp.training._state import Callback, SensitiveOutputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `DPTrainer.fit`, which documents them."""

    mechanism: DPSGD
    batch_sharding: Any
    callback: Callback | None
    sensitive_callback: Callable[[SensitiveOutputs], None] | None
    progress: bool
    checkpoint_dir: Any
    every: int
    keep: int
    epsilon_budget: float | None
    prefetch: int

    def __post_init__(self):
        for name in ("callback", "sensitive_callback"):
            function = getattr(self, name)
            _validate.require(
                function is None or callable(function),
                f"{name} must be a function of one argument",
                fix="Leave it out, or pass a function.",
                type=type(function).__name__,
            )
        _validate.boolean(progress=self.progress, fix="Use True or False.")
        _validate.nonnegative_integer(
            prefetch=self.prefetch, fix="Use 2, or 0 for no thread."
        )
        _validate.positive_integer(every=self.every, fix="Use 100, for example.")
        _validate.positive_integer(keep=self.keep, fix="Use 3, for example.")
        check_sharding(self.batch_sharding, self.mechanism)
        if self.epsilon_budget is None:
            return
        _validate.positive(
            epsilon_budget=self.epsilon_budget, fix="Use 8, for example."
        )
        _validate.require(
            self.checkpoint_dir is not None and self.mechanism.delta is not None,
            "a budget needs a directory, whose ledger has all steps, and a delta",
            checkpoint_dir=self.checkpoint_dir,
            delta=self.mechanism.delta,
            fix="Pass checkpoint_dir too, and use mechanism.calibrate(epsilon=, "
            "delta=), or DPSGD(delta=).",
        )
