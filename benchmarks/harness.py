"""What all benchmarks share: the command line, result lines, timing and memory.

A benchmark is a generator function of its flags that yields figures. `main` appends
each of them as a line, with the flags, the device and the versions, to
results/NAME.jsonl.
"""

import argparse
import ctypes
import datetime
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import math
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from dpmp import _timing

RESULTS = pathlib.Path(__file__).parent / "results"

Lines = Iterator[dict[str, Any]]


class Each(NamedTuple):
    """Marks a flag that takes several values, each of which is measured."""

    choices: Iterable[Any] = ()  # any if this is empty
    default: Sequence[Any] = ()  # all choices if this is empty


def main(benchmark: Callable[..., Lines], *, tiny: Mapping[str, Any]) -> None:
    """Runs a benchmark from the command line, and appends a line for all it yields.

    Args:
      benchmark: its parameters are the flags, and the help is the docstring of its
        file. It is called for each combination of the flags marked by `Each`.
      tiny: flags for `--tiny`, which records nothing unless there is `--out FOLDER`.
    """
    parser = argparse.ArgumentParser(
        description=benchmark.__globals__["__doc__"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hints = typing.get_type_hints(benchmark, include_extras=True)
    for name, flag in inspect.signature(benchmark).parameters.items():
        options = _options(hints[name], flag.default)
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--tiny", action="store_true", help="try it out")
    flags = vars(parser.parse_args())
    is_tiny, out = flags.pop("tiny"), flags.pop("out")
    if is_tiny:
        flags |= tiny
    folder = out or (None if is_tiny else RESULTS)
    several = {k: x for k, x in flags.items() if isinstance(x, list)}
    for values in itertools.product(*several.values()):
        flags |= zip(several, values, strict=True)
        for figures in benchmark(**flags):
            stem = pathlib.Path(inspect.getfile(benchmark)).stem
            append(folder, stem, **{**flags, **figures})


def _options(hint: Any, default: Any) -> dict[str, Any]:
    """How the parser reads a flag with this type and default."""
    if hint is bool:
        return {"action": "store_true"}
    types = [x for x in typing.get_args(hint) or [hint] if x is not type(None)]
    if not isinstance(types[-1], Each):
        return {"type": types[0], "default": default}
    value_type, each = types
    choices = [*each.choices]
    options = {"nargs": "+", "type": value_type, "choices": choices or None}
    return {**options, "default": [*each.default] or choices}


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def run_for(command: Sequence[str], seconds: float, **options: Any) -> str:
    """How a process ended, which is stopped in time with all that it started."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        return f"exit status {process.wait(seconds)}"
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} seconds"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        except ProcessLookupError:
            pass  # nothing is left of it


_PACKAGES = (
    "dpmp-jax",
    "jax",
    "jaxlib",
    "jax-privacy",
    "flax",
    "optax",
    "torch",
    "opacus",
)


def append(folder: pathlib.Path | None, benchmark: str, **figures: Any) -> None:
    """Prints figures, and appends them as a line to `<folder>/<benchmark>.jsonl`."""
    if folder is not None:
        environment = {
            "date": datetime.date.today().isoformat(),
            "device": device(),
            "python": platform.python_version(),
            "versions": {name: v for name in _PACKAGES if (v := _version(name))},
        }
        write_line(folder, benchmark, {**figures, **environment})
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    sys.stdout.flush()


def write_line(folder: pathlib.Path, benchmark: str, figures: dict[str, Any]) -> None:
    """Appends one line as it is, and returns when the line is on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{benchmark}.jsonl").open("a") as file:
        file.write(json.dumps(figures) + "\n")
        file.flush()
        os.fsync(file.fileno())


def device() -> str:
    """The device that lines name."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    return f"{_cpu_name()}, {os.cpu_count()} cores"


def _cpu_name() -> str:
    """The model of the processor, and what it lacks of others with the same name.

    Processors of one name differ by a factor of three in bfloat16.
    """
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = {
        key: next((x.split(":")[1].strip() for x in lines if x.startswith(key)), "")
        for key in ("model name", "flags")
    }
    name = found["model name"] or platform.machine()
    if "avx2" in found["flags"] and "avx512" not in found["flags"]:
        return f"{name} with AVX2"
    if "Intel" in name and "amx_bf16" not in found["flags"]:
        return f"{name} without AMX"
    return name


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Measured(NamedTuple):
    """The times of contenders, by name."""

    seconds: Mapping[str, list[float]]  # in each round, in which all run in turn

    def medians(self) -> dict[str, float]:
        """The median seconds of each."""
        return {name: statistics.median(x) for name, x in self.seconds.items()}

    def milliseconds(self) -> dict[str, float]:
        """The medians of the rounds."""
        return rounded(self.medians(), 3, unit=1e-3)

    def ratio(self, name: str, reference: str) -> float:
        """The time of one over that of another, the median of those within a round."""
        seconds = self.seconds[name], self.seconds[reference]
        return round(_timing.median_ratio(*seconds), 3)

    def time_over(self, reference: str) -> dict[str, float]:
        """The ratio of each to one of them."""
        return {name: self.ratio(name, reference) for name in self.seconds}

    def fastest(self, *kinds: str) -> str | None:
        """The fastest of those whose names begin with a kind and a comma, if any."""
        some = {k: x for k, x in self.medians().items() if k.split(",")[0] in kinds}
        return min(some, key=some.__getitem__) if some else None


def in_turn(calls: Mapping[str, Callable[[], Any]], rounds: int) -> Measured:
    """Times functions in turn, after a round that does not count."""
    return Measured(_timing.in_turn(calls, rounds))


def rounded(
    figures: Mapping[str, float | None], digits: int, unit: float = 1
) -> dict[str, float]:
    """Figures in a unit, without those that are missing."""
    return {k: round(x / unit, digits) for k, x in figures.items() if x is not None}


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds, and its standard error; NaN for a single seed."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return statistics.fmean(values), deviation / len(values) ** 0.5


_PROCESS = pathlib.Path("/proc/self")


def growth_in_bytes(call: Callable[[], Any]) -> int | None:
    """By how much the process grows at most while `call` runs; None if not on Linux.

    The compiler's account leaves out what a program of PyTorch takes, and what jax
    keeps beside a program. This asks Linux, which counts the pages in memory.
    """
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # returns pages that are free
        (_PROCESS / "clear_refs").write_text("5")  # the peak begins at what is in use
        before = _status("VmRSS")
    except OSError:
        return None
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    (line,) = (x for x in lines if x.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
