"""What does a private run of 1B, 8B or 70B parameters need? By formulas, and compiled.

    python -m benchmarks.report      # writes the tables of docs/past_one_machine.md

The formulas are for book-keeping in bfloat16 with Adam, as `scaling.py` compiles it:
parameters, optimizer and noise are divided over all devices, and so is the batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.markdown import Line, read, table, table_of
from dpmp.numerics._arithmetic import parse_arithmetic
from dpmp.numerics._grid import LARGEST_RESOLUTION

BATCH_SIZE, LENGTH = 4096, 1024
FLOPS_OF_A_DEVICE = 400e12  # per second: 0.4 of the peak of an H100 in bfloat16


class Model(NamedTuple):
    """A decoder, and the devices to train it on."""

    name: str
    layers: int
    width: int
    vocabulary: int
    devices: int

    @property
    def num_parameters(self) -> int:
        """Embeddings of tokens and positions, layers with two scales, and the head."""
        layer = 12 * self.width**2 + 2 * self.width
        return self.layers * layer + (2 * self.vocabulary + LENGTH) * self.width


MODELS = (
    Model("1B", 18, 2048, 32768, 8),
    Model("8B", 32, 4096, 128256, 64),
    Model("70B", 80, 8192, 128256, 256),
)


class Needs(NamedTuple):
    """Bytes and operations; those of a device unless stated otherwise."""

    state_bytes: float
    gathered_bytes: float
    sum_bytes: float
    received_bytes: float
    flops_of_all: float
    norm_share: float
    noise_entries: float


def state_bytes(num_parameters: int, parts: int) -> float:
    """Float32 parameters and Adam's two averages."""
    return 12 * num_parameters / parts


def collective_bytes(
    num_parameters: int, parts: int, *, bytes_of_an_entry: int
) -> float:
    """What the collectives of a step return on a device."""
    # Whole parameters on each device need one sum of 32-bit integers. Parameters in
    # parts are gathered, and the sum is scattered.
    if parts == 1:
        return 4 * num_parameters
    return bytes_of_an_entry * num_parameters + 4 * num_parameters / parts


def needs(model: Model) -> Needs:
    """The needs of one step."""
    num, parts = model.num_parameters, model.devices
    norms = BATCH_SIZE * _norm_flops(model)
    # Forward, backward, and the weighted sum in place of the gradients of parameters.
    passes = BATCH_SIZE * LENGTH * (6 * num + 6 * model.layers * LENGTH * model.width)
    return Needs(
        state_bytes=state_bytes(num, parts),
        gathered_bytes=2 * num,
        # That of a microbatch before it is rounded, and that of all in integers.
        sum_bytes=8 * num,
        # In rings, a device receives all parts but its own.
        received_bytes=(2 + 4) * num * (1 - 1 / parts),
        flops_of_all=passes + norms,
        norm_share=norms / (passes + norms),
        noise_entries=num / parts,
    )


def rounding_share(num_parameters: int) -> float:
    """What rounding to the finest grid takes of the clip norm."""
    return parse_arithmetic("bounded", method="book_keeping").rounding_share(
        num_parameters, LARGEST_RESOLUTION
    )


def _norm_flops(model: Model) -> float:
    """Inner products of positions, or the gradient where that is cheaper."""
    width, length = model.width, LENGTH
    layer = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    matrices = [*model.layers * layer, (width, model.vocabulary)]
    return 2 * length * sum(min(length * (i + o), i * o) for i, o in matrices)


def table_of_needs() -> str:
    """One row for each quantity."""
    found = [(model, needs(model)) for model in MODELS]
    quantities: dict[str, Callable[[Model, Needs], Any]] = {
        "parameters, billions": lambda m, n: m.num_parameters / 1e9,
        "devices": lambda m, n: m.devices,
        "state, GB": lambda m, n: n.state_bytes / 1e9,
        "gathered parameters in bfloat16, GB": lambda m, n: n.gathered_bytes / 1e9,
        "sums of its own examples, GB": lambda m, n: n.sum_bytes / 1e9,
        "these together, GB": lambda m, n: (
            (n.state_bytes + n.gathered_bytes + n.sum_bytes) / 1e9
        ),
        "received from other devices, GB": lambda m, n: n.received_bytes / 1e9,
        "operations of a step, 10^18": lambda m, n: n.flops_of_all / 1e18,
        "of it for norms, %": lambda m, n: 100 * n.norm_share,
        "seconds of a step, at least": lambda m, n: (
            n.flops_of_all / m.devices / FLOPS_OF_A_DEVICE
        ),
        "rounding to the finest grid, % of the clip norm": lambda m, n: (
            100 * rounding_share(m.num_parameters)
        ),
        "noise for, million entries": lambda m, n: n.noise_entries / 1e6,
    }
    rows = [(k, *(fun(m, n) for m, n in found)) for k, fun in quantities.items()]
    return table(["each device, each step", *(m.name for m in MODELS)], rows)


def table_of_checks() -> str:
    """The formulas next to what compiled programs have."""
    keys = ("compiled_for", "devices", "parameters", "num_parameters")
    lines = read("scaling", *keys, part="compiled", compiled_for="virtual CPUs")
    columns = """
    billion parameters = num_parameters * 1e-9 | tokens = length | devices |
    parameters are = parameters | state, GB = state * 1e-9 |
    compiled = bytes_of_state * 1e-9 | collectives, GB = moved * 1e-9 |
    compiled = bytes_of_collectives * 1e-9 |
    temporaries, GB, compiled = bytes_of_temporaries * 1e-9
    """
    return table_of(columns, [checked(x) for x in lines if x["devices"] > 1])


def checked(line: Line) -> Line:
    """A line with the bytes of the state and of the collectives by the formulas."""
    num_parameters = line["num_parameters"]
    parts = line["devices"] if line["parameters"] == "sharded" else 1
    # The CPU's compiler gathers in float32.
    moved = collective_bytes(num_parameters, parts, bytes_of_an_entry=4)
    return {**line, "state": state_bytes(num_parameters, parts), "moved": moved}
