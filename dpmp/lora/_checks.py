"""Checks that adapters were trained, and that their base model was not."""

import jax
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.lora._adapters import Adapters, check_adapters, check_base
from dpmp.lora._fingerprint import fingerprint


def check_trained(trained: Adapters, *, initial: Adapters, params: PyTree) -> None:
    """Raises ValueError unless training has changed every factor, and nothing else.

    Adapters after private training are released values, so these checks reveal nothing
    more.

    Args:
      trained: the adapters after training, for example `state.params`.
      initial: the adapters before training.
      params: the frozen parameters, as they are after training.

    Raises:
      ValueError: if a factor did not move or is not finite, if the adapters have other
        targets, or if training has changed the frozen parameters. The message names the
        array.
    """
    check_adapters(trained)
    check_adapters(initial)
    _validate.require(
        jax.tree.structure(trained) == jax.tree.structure(initial),
        "trained and initial adapters must be of the same targets, rank and base. Pass "
        "the adapters that training started from.",
        trained=[path for path, _ in trained.axes],
        initial=[path for path, _ in initial.axes],
    )
    check_base(trained, fingerprint(params))
    still = [
        name
        for (name, x), (_, y) in zip(_named(trained), _named(initial), strict=True)
        if np.array_equal(x, y)
    ]
    _validate.require(
        not still,
        "training must move every factor of the adapters. If these are the adapters "
        "after training, look at the learning rate, and at whether the loss depends on "
        "these targets. (Without noise, the factors A move from the second step on.)",
        not_moved=still,
    )
    check_finite(trained)


def check_finite(adapters: Adapters) -> None:
    """Raises ValueError if an entry of a factor is infinite or NaN."""
    bad = [name for name, x in _named(adapters) if not np.all(np.isfinite(x))]
    _validate.require(
        not bad,
        "every entry of an adapter must be finite. Train with a lower learning rate.",
        not_finite=bad,
    )


def _named(adapters: Adapters) -> list[tuple[str, np.ndarray]]:
    return [
        (f"{path}.{name}", np.asarray(x))
        for path, factors in adapters.factors.items()
        for name, x in factors._asdict().items()
    ]
