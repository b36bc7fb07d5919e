"""Result lines: figures with the device and the versions they were measured on."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
from typing import Any

import jax

_PACKAGES = ("dpmp", "jax", "jaxlib", "jax-privacy", "flax", "optax", "torch", "opacus")


RESULTS = pathlib.Path(__file__).parent / "results"


def append(benchmark: str, **figures: Any) -> None:
    """Appends one line to `results/<benchmark>.jsonl`, and prints the figures."""
    append_to(RESULTS, benchmark, **figures)


def append_to(folder: pathlib.Path, benchmark: str, **figures: Any) -> None:
    """Appends one line to `<folder>/<benchmark>.jsonl`, and prints the figures."""
    write_line(folder, benchmark, {**figures, **_environment()})
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    sys.stdout.flush()


def write_line(folder: pathlib.Path, benchmark: str, figures: dict[str, Any]) -> None:
    """Appends one line as it is, and returns when the line is on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{benchmark}.jsonl").open("a") as file:
        file.write(json.dumps(figures) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _environment() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "device": device(),
        "python": platform.python_version(),
        "versions": {name: v for name in _PACKAGES if (v := _version(name))},
    }


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
