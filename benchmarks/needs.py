"""What does a private run of 1B, 8B or 70B parameters need? By formulas, and compiled.

    python -m benchmarks.report      # writes the tables of docs/past_one_machine.md

The formulas are for book-keeping in bfloat16 with Adam, as `scaling.py` compiles it:
parameters, optimizer and noise are divided over all devices, and so is the batch.
"""

from typing import NamedTuple

from benchmarks.markdown import Line, read, table, table_of
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


def rounding_share(num_parameters: int) -> float:
    """What rounding takes of the clip norm, for a noise multiplier of 1."""
    sums = parse_arithmetic("bounded", method="book_keeping")
    resolution = choose_resolution(1.0, num_parameters, sums)
    assert resolution is not None
    return sums.rounding_share(num_parameters, resolution)


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


def table_of_checks() -> str:
    """The formulas next to what compiled programs have."""
    keys = ("compiled_for", "devices", "parameters", "num_parameters")
    wanted = {"compiled_for": "virtual CPUs", "lora": None}
    lines = read("scaling", *keys, **wanted)
    columns = """
    billion parameters = num_parameters * 1e-9 | tokens = length | devices |
    parameters are = parameters | state, GB = state * 1e-9 |
    compiled = bytes_of_state * 1e-9 | collectives, GB = moved * 1e-9 |
    compiled = bytes_of_collectives * 1e-9 |
    temporaries, GB, compiled = bytes_of_temporaries * 1e-9
    """
    return table_of(columns, [checked(x) for x in lines if x["devices"] > 1])


def table_of_h100() -> str:
    """What programs for H100s have."""
    keys = ("compiled_for", "model_axis", "num_parameters", "lora")
    lines = read("scaling", *keys)
    h100s = [x for x in lines if x["compiled_for"].startswith("h100")]
    columns = """
    billion parameters = billions | trained = trained | devices |
    of these, on the axis of the model = model_axis |
    state, GB = bytes_of_state * 1e-9 |
    frozen model, GB = bytes_of_frozen_model * 1e-9 |
    temporaries, GB = bytes_of_temporaries * 1e-9 |
    together, GB = together * 1e-9 | collectives, GB = bytes_of_collectives * 1e-9
    """
    sizes = ("bytes_of_state", "bytes_of_frozen_model", "bytes_of_temporaries")
    return table_of(
        columns,
        [
            {
                "model_axis": 1,
                **x,
                "billions": x.get("num_frozen", x["num_parameters"]) / 1e9,
                "trained": f"rank {x['lora']}" if x.get("lora") else "all",
                "together": sum(x.get(name, 0) for name in sizes),
            }
            for x in h100s
        ],
    )


def checked(line: Line) -> Line:
    """A line with the bytes of the state and of the collectives by the formulas."""
    num_parameters = line["num_parameters"]
    parts = line["devices"] if line["parameters"] == "sharded" else 1
    # The CPU's compiler gathers in float32.
    moved = collective_bytes(num_parameters, parts, bytes_of_an_entry=4)
    return {**line, "state": state_bytes(num_parameters, parts), "moved": moved}
