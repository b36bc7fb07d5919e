"""Coordinates the processes of a job: actions of the first one, and shared values.

The processes of a job share the directory of a run. The first one writes the ledger.
"""

import hashlib
import os
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpmp import _validate

T = TypeVar("T")


def on_first(action: Callable[[], T]) -> T | None:
    """Runs an action on the first process, while the others wait."""
    if jax.process_count() == 1:
        return action()
    result, error = None, None
    if jax.process_index() == 0:
        try:
            result = action()
        except Exception as failure:
            error = failure
    has_failed = bool(broadcast(np.int32(error is not None)))
    if error is not None:
        raise error
    if has_failed:
        _validate.fail(
            "the first process must be able to write the files of the run",
            process=jax.process_index(),
            fix="The error of the first process says more.",
            error=RuntimeError,
        )
    return result


def broadcast(value: np.ndarray | np.generic) -> np.ndarray:
    """Broadcasts the value of the first process to all processes."""
    if jax.process_count() == 1:
        return np.asarray(value)
    _check_devices()
    return np.asarray(multihost_utils.broadcast_one_to_all(value))


def are_equal(*facts: bytes) -> bool:
    """Whether all processes pass the same bytes, compared by a hash."""
    if jax.process_count() == 1:
        return True
    digest = hashlib.blake2b(b"".join(hashlib.blake2b(x).digest() for x in facts))
    digests = gathered(np.frombuffer(digest.digest(), np.uint32))
    return bool(np.all(digests == digests[0]))


def span_all(sharding: jax.sharding.Sharding) -> bool:
    """Whether every process has a device of a sharding."""
    found = {device.process_index for device in sharding.device_set}
    return len(found) == jax.process_count()


def gathered(words: np.ndarray) -> np.ndarray:
    """The words of all processes, with a leading axis of processes."""
    _check_devices()
    return np.asarray(multihost_utils.process_allgather(words))


def _check_devices() -> None:
    """Raises ValueError for devices that jax cannot exchange values over."""
    numbers = [0] * jax.process_count()
    for device in jax.devices():
        numbers[device.process_index] += 1
    if len(set(numbers)) != 1:
        _validate.fail(
            "all processes must have the same number of devices. Start each with as "
            "many.",
            num_devices=numbers,
        )


def all_say(condition: bool) -> bool:
    """Whether a condition holds on all processes."""
    if jax.process_count() == 1:
        return condition
    return bool(np.all(gathered(np.array([condition], np.uint32))))


def random_id() -> str:
    """32 random hexadecimal digits, the same on all processes; they are public."""
    words = np.frombuffer(os.urandom(16), np.uint32)
    return broadcast(words).astype(np.uint32).tobytes().hex()
