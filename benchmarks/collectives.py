"""What do the devices of a compiled program send each other?"""

import collections
import math
import re
from typing import NamedTuple

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_LINE = re.compile(rf"= (.*?) ({_KINDS}|collective-broadcast)(?:-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


class Collective(NamedTuple):
    """An array that a collective operation returns on each device."""

    kind: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_entries(self) -> int:
        """The number of entries of the array."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size of the array."""
        return self.num_entries * _BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype}{list(self.shape)}"


def collectives(program: str) -> collections.Counter[Collective]:
    """Counts the collectives in the text of a compiled program (HLO).

    An operation in a loop counts once.
    """
    found = collections.Counter()
    for line in program.splitlines():
        if match := _LINE.search(line):
            arrays, kind = match.groups()
            for dtype, dims in _ARRAY.findall(arrays):
                shape = tuple(int(n) for n in dims.split(",") if n)
                found[Collective(kind, dtype, shape)] += 1
    return found
