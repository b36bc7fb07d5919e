"""What does a private run of 1B, 8B or 70B parameters need? By formulas, and compiled.

    python -m benchmarks.report      # writes the tables of docs/past_one_machine.md

The formulas are for book-keeping in bfloat16 with Adam, as `scaling.py` compiles it:
parameters, optimizer and noise are divided over all devices, and so is the batch.
"""

from typing import Any, NamedTuple

from benchmarks.markdown import Line, table
from dpmp.noise_addition import choose_resolution
from dpmp.numerics._arithmetic import parse_arithmetic

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


def needs(model: Model) -> dict[str, float]:
    """The needs of one step, of each device unless stated otherwise."""
    num, parts = model.num_parameters, model.devices
    norms = BATCH_SIZE * _norm_flops(model)
    # Forward, backward, and the weighted sum in place of the gradients of parameters.
    passes = BATCH_SIZE * LENGTH * (6 * num + 6 * model.layers * LENGTH * model.width)
    flops_of_all = passes + norms
    state, gathered = state_bytes(num, parts), 2 * num
    sums = 8 * num  # that of a microbatch before it is rounded, of all in integers
    received = (2 + 4) * num * (1 - 1 / parts)  # in rings, all parts but its own
    return {
        "parameters, billions": num / 1e9,
        "devices": parts,
        "state, GB": state / 1e9,
        "gathered parameters in bfloat16, GB": gathered / 1e9,
        "sums of its own examples, GB": sums / 1e9,
        "these together, GB": (state + gathered + sums) / 1e9,
        "received from other devices, GB": received / 1e9,
        "operations of a step, 10^18": flops_of_all / 1e18,
        "of it for norms, %": 100 * norms / flops_of_all,
        "seconds of a step, at least": flops_of_all / parts / FLOPS_OF_A_DEVICE,
        "rounding to the grid, % of the clip norm": 100 * rounding_share(num),
        "noise for, million entries": num / parts / 1e6,
    }


def rounding_share(num_parameters: int, arithmetic: str = "bounded") -> float:
    """What rounding to the grid takes of the clip norm, for a noise multiplier of 1."""
    sums = arithmetic_of(arithmetic)
    resolution = choose_resolution(1.0, num_parameters, sums)
    return sums.rounding_share(num_parameters, resolution or 0)


def arithmetic_of(name: str) -> Any:
    """The arithmetic with this name, for the method that it is the default of."""
    method = "book_keeping" if name == "bounded" else "per_example"
    return parse_arithmetic(name, method=method)


def _norm_flops(model: Model) -> float:
    """Inner products of positions, or the gradient where that is cheaper."""
    width, length = model.width, LENGTH
    layer = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    matrices = [*model.layers * layer, (width, model.vocabulary)]
    return 2 * length * sum(min(length * (i + o), i * o) for i, o in matrices)


def table_of_needs() -> str:
    """One row for each quantity."""
    columns = [needs(model) for model in MODELS]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    return table(["each device, each step", *(m.name for m in MODELS)], rows)


def checked(line: Line) -> Line:
    """A line with the bytes of the state and of the collectives by the formulas."""
    num_parameters = line["num_parameters"]
    parts = line["devices"] if line["parameters"] == "sharded" else 1
    # The CPU's compiler gathers in float32.
    moved = collective_bytes(num_parameters, parts, bytes_of_an_entry=4)
    return {**line, "state": state_bytes(num_parameters, parts), "moved": moved}


def together(line: Line) -> Line:
    """A line with all that a device holds, and with what is trained."""
    held = [k for k in line if k.startswith("bytes_of_") and "collectives" not in k]
    return {
        "model_axis": 1,
        **line,
        "billions": line.get("num_frozen", line["num_parameters"]) / 1e9,
        "trained": f"rank {line['lora']}" if line.get("lora") else "all",
        "together": sum(line[name] for name in held),
    }
