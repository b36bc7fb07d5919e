"""The memory of a training step.

`estimate_memory` counts the memory that follows from shapes alone, part by part.
`compiled_memory` compiles a step without running it, and reads the compiler's figures.
`largest_microbatch` finds the largest microbatch that fits into a given memory.
`python -m dpmp plan` shows the memory of language models.
"""

from dpmp.planning._compiled_memory import (
    CompiledMemory,
    compiled_memory,
    largest_microbatch,
)
from dpmp.planning._memory_estimate import MemoryEstimate, MemoryLine, estimate_memory

__all__ = [
    "CompiledMemory",
    "MemoryEstimate",
    "MemoryLine",
    "compiled_memory",
    "estimate_memory",
    "largest_microbatch",
]
