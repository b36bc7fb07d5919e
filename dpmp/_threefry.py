"""Threefry-4x32 makes 128 random bits from a 128-bit key and a 128-bit counter.

References:
  [Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, section
  3](https://doi.org/10.1145/2063384.2063405)
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

_NUM_ROUNDS = 20
_ROTATIONS = (
    (10, 26),
    (11, 21),
    (13, 27),
    (23, 5),
    (6, 20),
    (17, 11),
    (25, 10),
    (18, 20),
)
_KEY_PARITY = np.uint32(0x1BD11BDA)


def threefry4x32(key: Sequence[Any], counter: Sequence[Any]) -> list[Any]:
    """Encrypts a counter, elementwise and in constant time.

    Key, counter and result are four uint32 arrays each, of jax or of NumPy; key and
    counter broadcast.
    """
    schedule = [*key, key[0] ^ key[1] ^ key[2] ^ key[3] ^ _KEY_PARITY]
    x = [word + k for word, k in zip(counter, schedule[:4], strict=True)]
    for i in range(_NUM_ROUNDS):
        left, right = _ROTATIONS[i % len(_ROTATIONS)]
        first, second = (1, 3) if i % 2 == 0 else (3, 1)
        x[0] = x[0] + x[first]
        x[first] = _rotate(x[first], left) ^ x[0]
        x[2] = x[2] + x[second]
        x[second] = _rotate(x[second], right) ^ x[2]
        if i % 4 == 3:
            injection = i // 4 + 1
            x = [word + schedule[(injection + j) % 5] for j, word in enumerate(x)]
            x[3] = x[3] + np.uint32(injection)
    return x


def _rotate(x: jax.Array, distance: int) -> jax.Array:
    return x << np.uint32(distance) | x >> np.uint32(32 - distance)
