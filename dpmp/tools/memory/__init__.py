"""What a training step takes: memory, and operations of clipped sums.

Modules import only from rows below their own:

    _command
    _estimate   _overhead
    _step
    _gradients
    _liveness
    _program
"""

from dpmp.tools.memory._command import add_memory_command as add_memory_command
from dpmp.tools.memory._estimate import CompiledMemory as CompiledMemory
from dpmp.tools.memory._estimate import MemoryEstimate as MemoryEstimate
from dpmp.tools.memory._estimate import MemoryLine as MemoryLine
from dpmp.tools.memory._estimate import compiled_memory as compiled_memory
from dpmp.tools.memory._estimate import estimate_memory as estimate_memory
from dpmp.tools.memory._overhead import AccumulationOverhead as AccumulationOverhead
from dpmp.tools.memory._overhead import accumulation_overhead as accumulation_overhead
from dpmp.tools.memory._overhead import (
    measure_accumulation_share as measure_accumulation_share,
)
