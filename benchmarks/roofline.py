"""What a program that was compiled for a GPU asks of it, read from the program's text.

Each kernel reads its operands and writes its results once; of an array that is sliced,
or changed in place, what it needs. Its roofline time is the
time that its matrix products take at the rate of tensor cores, or its bytes at the
bandwidth of the memory, whichever is longer. The sum over kernels is below the time of
any run. The compiler's own analysis (`cost_analysis`) counts a loop once, and does not
know the products of cuBLAS.
"""

import math
import re
from typing import NamedTuple

# An H100 SXM: bfloat16 products without sparsity, and HBM3 (NVIDIA's data sheet).
OPERATIONS_PER_SECOND, BYTES_PER_SECOND = 989e12, 3.35e12

_COMPUTATION = re.compile(r"(ENTRY )?%(\S+) .*\{$")
_INSTRUCTION = re.compile(r" +(ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*?)\)(.*)")
_ARRAY = re.compile(r"([a-z]+)(\d*)\[([\d,]*)\]")
_NAME = re.compile(r"%([^\s,})]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_CONTRACTED = re.compile(r'lhs_contracting_dimensions":\[([^\]]*)\]')
_CALLED = re.compile(
    r"(body|to_apply|(?:true|false)_computation|branch_computations)="
    r"(\{[^}]*\}|[^\s,]+)"
)
_NO_KERNELS = {"parameter", "bitcast", "get-tuple-element", "constant", "tuple"}
_SLICES = {"slice", "dynamic-slice", "gather"}
_IN_PLACE = {"scatter": 2, "dynamic-update-slice": 1}  # the operand with the changes


class _Instruction(NamedTuple):
    type: str
    operation: str
    operands: list[str]
    rest: str  # attributes
    is_root: bool


class Costs(NamedTuple):
    """What kernels ask for."""

    kernels: float = 0.0
    operations: float = 0.0  # of matrix products
    bytes: float = 0.0  # of the device's memory
    seconds: float = 0.0  # the roofline time

    def __add__(self, other: tuple) -> "Costs":
        return Costs(*(x + y for x, y in zip(self, other, strict=True)))

    def times(self, number: float) -> "Costs":
        """Those of a loop."""
        return Costs(*(number * x for x in self))

    def figures(self) -> dict[str, float]:
        """For result lines; none if a loop has no known number of iterations."""
        if math.isnan(self.bytes):
            return {}
        return {
            "kernels": round(self.kernels),
            "product_teraflops": round(self.operations / 1e12, 3),
            "gigabytes": round(self.bytes / 1e9, 3),
            "roofline_milliseconds": round(1e3 * self.seconds, 3),
        }


def costs_of(text: str) -> Costs:
    """The costs of an optimized program (`compiled.as_text()`)."""
    computations: dict[str, dict[str, _Instruction]] = {}
    entry, body = "", {}
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            body = computations[found[2]] = {}
            entry = found[2] if found[1] else entry
        elif found := _INSTRUCTION.match(line):
            root, name, type_, operation, operands, rest = found.groups()
            is_parameter = operation == "parameter"  # which has a number
            names = [operands] if is_parameter else _NAME.findall(operands)
            body[name] = _Instruction(type_, operation, names, rest, bool(root))
    return _costs_of(computations, entry)


def _costs_of(computations: dict[str, dict[str, _Instruction]], name: str) -> Costs:
    total, body = Costs(), computations[name]
    for x in body.values():
        called = [
            y for match in _CALLED.finditer(x.rest) for y in _NAME.findall(match[2])
        ]
        if x.operation in ("while", "call", "conditional"):
            parts = (_costs_of(computations, y) for y in called)
            # Of the branches of a condition, the longest.
            costs = max(parts, key=lambda costs: costs.seconds, default=Costs())
            trips = _TRIPS.search(x.rest)
            is_loop = x.operation == "while"
            number = float(trips[1]) if trips else math.nan if is_loop else 1.0
            total += costs.times(number)
        elif x.operation not in _NO_KERNELS:
            operations = _operations(x, body)
            num_bytes = _moved(computations, x, body)
            seconds = max(
                operations / OPERATIONS_PER_SECOND, num_bytes / BYTES_PER_SECOND
            )
            total += Costs(1, operations, num_bytes, seconds)
    return total


def _operations(x: _Instruction, body: dict[str, _Instruction]) -> float:
    """Of a product by cuBLAS."""
    contracted = _CONTRACTED.search(x.rest)
    if contracted is None:
        return 0.0
    (result, *_), (left, *_) = _arrays(x.type), _arrays(body[x.operands[0]].type)
    sizes = [left[1][int(i)] for i in re.findall(r"\d+", contracted[1])]
    return 2.0 * math.prod(result[1]) * math.prod(sizes)


def _moved(
    computations: dict[str, dict[str, _Instruction]],
    x: _Instruction,
    body: dict[str, _Instruction],
) -> int:
    """The bytes that a kernel reads and writes."""
    fused = re.search(r"calls=%([^\s,]+)", x.rest)
    if fused is None:
        # A product writes to its workspace too, which is left out.
        written = _arrays(x.type)[: 1 if _CONTRACTED.search(x.rest) else None]
        return _num_bytes(written) + sum(_num_bytes_of(body[y]) for y in x.operands)
    inner = computations[fused[1]]
    inputs = {
        int(y.operands[0]): name
        for name, y in inner.items()
        if y.operation == "parameter"
    }
    total, changed = _num_bytes_of(x), ""
    (root,) = (y for y in inner.values() if y.is_root)
    if root.operation in _IN_PLACE and root.operands[0] in inputs.values():
        changed = root.operands[0]
        changes = inner[root.operands[_IN_PLACE[root.operation]]]
        total = _num_bytes_of(changes) * (2 if root.operation == "scatter" else 1)
    for i, operand in enumerate(x.operands):
        users = [y for y in inner.values() if inputs[i] in y.operands]
        slices = [
            _num_bytes_of(y)
            for y in users
            if y.operation in _SLICES and y.operands[0] == inputs[i]
        ]
        whole = _num_bytes_of(body[operand])
        if inputs[i] != changed or len(users) > 1:
            is_sliced = bool(users) and len(slices) == len(users)
            total += min(whole, sum(slices)) if is_sliced else whole
    return total


def _num_bytes_of(x: _Instruction) -> int:
    return _num_bytes(_arrays(x.type))


def _arrays(type_: str) -> list[tuple[int, list[int]]]:
    """The bits of an entry and the dimensions, of each array of a type."""
    return [
        (int(bits or 8), [int(n) for n in dims.split(",") if n])
        for kind, bits, dims in _ARRAY.findall(type_)
        if kind not in ("token", "opaque")
    ]


def _num_bytes(arrays: list[tuple[int, list[int]]]) -> int:
    return sum(bits // 8 * math.prod(dims) for bits, dims in arrays)
