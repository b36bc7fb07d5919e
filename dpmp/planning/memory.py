"""The memory of a training step, and the operations of clipped sums.

`estimate_memory` counts the memory that follows from shapes alone, part by part.
`compiled_memory` compiles a step without running it, and reads the compiler's figures.
`largest_microbatch` finds the largest microbatch that fits into a given memory.
`accumulation_overhead` counts the operations that clipping adds to training, and
`measure_accumulation_share` times them. `python -m dpmp memory` shows memory and
operations for a transformer.
"""

from dpmp.planning._compiled_memory import (
    CompiledMemory,
    compiled_memory,
    largest_microbatch,
)
from dpmp.planning._memory_estimate import MemoryEstimate, MemoryLine, estimate_memory
from dpmp.planning._operations import (
    AccumulationOverhead,
    accumulation_overhead,
    measure_accumulation_share,
)

__all__ = [
    "AccumulationOverhead",
    "CompiledMemory",
    "MemoryEstimate",
    "MemoryLine",
    "accumulation_overhead",
    "compiled_memory",
    "estimate_memory",
    "largest_microbatch",
    "measure_accumulation_share",
]
