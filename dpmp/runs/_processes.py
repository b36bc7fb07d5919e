"""What one of several processes does for all of them.

The processes of a job share the directory of a run. The first one writes the ledger.
"""

import hashlib
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpmp import _validate

T = TypeVar("T")


def on_first(action: Callable[[], T]) -> T | None:
    """Runs an action on the first process, while the others wait.

    Raises:
      Exception: on the first process, what the action raises.
      RuntimeError: on the other processes, if the action has failed.
    """
    if jax.process_count() == 1:
        return action()
    result, error = None, None
    if jax.process_index() == 0:
        try:
            result = action()
        except Exception as failure:
            error = failure
    has_failed = agreed(error is not None)
    if error is not None:
        raise error
    _validate.require(
        not has_failed,
        "the first process must be able to write the files of the run",
        process=jax.process_index(),
        fix="The error of the first process says more.",
        error=RuntimeError,
    )
    return result


def described_by_all(text: str) -> str:
    """What all processes say: the text of one, or a hash of the texts of several."""
    if jax.process_count() == 1:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    all_digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint32))
    return np.asarray(all_digests).tobytes().hex()


def agreed(value: bool) -> bool:
    """What the first process says, on all of them."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))
