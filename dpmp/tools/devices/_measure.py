"""Measures products of all dtypes, and refuses those that do not run."""

import argparse
import functools
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp.tools import _timing
from dpmp.tools.devices import _products
from dpmp.tools.devices._products import Kind
from dpmp.tools.devices._report import DeviceReport, Row


def measure_dtypes(
    device: Any = None, *, size: int | None = None, rounds: int = 5
) -> DeviceReport:
    """Measures products of all dtypes that models are trained in, on one device.

    Timed are compiled products of square matrices, in turn. Errors are those of smaller
    products, against float64. A dtype is

    - "unavailable" if its product does not compile, run or give finite numbers;
    - "native" if its product takes at most 0.8 of the time of one in float32. For
      "tf32" its results count instead: they have to differ from those of float32, by
      an error above 2^-18. "float64" may take 3 times as long, and float32 is native;
    - "emulated" otherwise: it runs, and saves no time.

    >>> report = measure_dtypes(size=32, rounds=1)
    >>> print(report.rows[0].name, report.rows[0].verdict)
    float32 native

    Args:
      device: to measure on; None for the one that jax uses by default.
      size: of the matrices; None for 1024 on CPUs, and 8192 on devices on which smaller
        products end before the next one is on its way.
      rounds: how often each product is timed.

    Returns:
      The report; `print` shows it as a table, with advice.

    Raises:
      ValueError: for what is no device, for a size or rounds that are no positive
        integers, and for a device without float32.
    """
    device = _as_device(device)
    if size is None:
        size = 1024 if device.platform == "cpu" else 8192
    size = _validate.positive_integer(size=size, fix="Leave it out for one that fits.")
    rounds = _validate.positive_integer(rounds=rounds, fix="Use 5.")
    return DeviceReport(
        device.device_kind,
        device.platform,
        len(jax.local_devices(backend=device.platform)),
        jax.__version__,
        size,
        rounds,
        _measure(device, size, rounds),
    )


def _measure(device: Any, size: int, rounds: int) -> tuple[Row, ...]:
    kinds = _products.all_kinds()
    shapes = (size, size), (size, size)
    programs, refusals = _products.compile_all(kinds, shapes, device)
    errors = {}
    for kind in [kind for kind in kinds if kind.name in programs]:
        errors[kind.name], refusal = _products.attempt(
            functools.partial(_errors, kind, device)
        )
        if refusal is not None:
            refusals[kind.name] = refusal
            del programs[kind.name]
    _validate.require(
        "float32" in programs,
        "products of float32 must run on the device",
        device=_name(device),
        refusal=refusals.get("float32"),
        fix="Use another device.",
    )
    seconds = _timing.in_turn(programs, rounds)
    return tuple(
        _row(kind, errors[kind.name], seconds, 2 * size**3)
        if kind.name in programs
        else Row(kind.name, error=refusals[kind.name])
        for kind in kinds
    )


def _errors(kind: Kind, device: Any) -> tuple[float, float]:
    rounding_error = _products.rounding_error(kind, device)
    return rounding_error, _products.sum_error(kind, device)


def _row(
    kind: Kind,
    errors: tuple[float, float],
    seconds: dict[str, list[float]],
    num_operations: int,
) -> Row:
    median = statistics.median(seconds[kind.name])
    rounding_error, sum_error = errors
    is_too_large = {
        "rounding_error": rounding_error > kind.largest_rounding_error,
        "sum_error": sum_error > kind.largest_sum_error,
    }
    return Row(
        kind.name,
        seconds=median,
        operations_per_second=num_operations / median,
        time_ratio=_timing.median_ratio(seconds[kind.name], seconds["float32"]),
        rounding_error=rounding_error,
        sum_error=sum_error,
        too_large=tuple(name for name, yes in is_too_large.items() if yes),
    )


def check_device_runs(dtype: Any, device: Any = None) -> None:
    """Checks that a device multiplies matrices of a dtype.

    A small product is compiled and run, once for each dtype and kind of device.

    >>> check_device_runs(jnp.bfloat16)

    Args:
      dtype: of operands and result.
      device: to check; None for the one that jax uses by default.

    Raises:
      ValueError: if it does not, for what is no device, and for float64 outside of
        64-bit mode.
    """
    dtype = jnp.dtype(dtype)
    _validate.check_x64(dtype, "float64 products")
    device = _as_device(device)
    run = functools.partial(_run, dtype.name, device.platform, device.device_kind)
    _, refusal = _products.attempt(run)
    _validate.require(
        refusal is None,
        f"products of {dtype.name} must run on the device",
        device=_name(device),
        refusal=refusal,
        fix="Compute in another one: print(dpmp.devices.measure_dtypes()) shows which "
        "run here.",
    )


@functools.cache  # of what succeeds: exceptions are not kept
def _run(dtype: str, platform: str, device_kind: str) -> None:
    devices = jax.local_devices(backend=platform)
    device = next(x for x in devices if x.device_kind == device_kind)
    kind = Kind(dtype, dtype, dtype)
    jax.block_until_ready(_products.run_tiny(kind, device))


def _as_device(device: Any) -> Any:
    if device is None:
        return min(jnp.zeros(()).devices(), key=lambda x: x.id)
    _validate.require(
        isinstance(device, jax.Device),
        "device must be a jax device",
        device=device,
        fix="Use one of jax.devices(), or leave it out.",
    )
    return device


def _name(device: Any) -> str:
    return f"{device.device_kind} ({device.platform})"


def add_devices_command(
    commands: Any, *, file_type: Callable[[str], pathlib.Path]
) -> None:
    """Adds `devices` to the commands of an argument parser.

    Args:
      commands: what `add_subparsers` of the parser returned.
      file_type: makes a path of what follows `--json`, or refuses it.
    """
    parser = commands.add_parser(
        "devices",
        help="measure which dtypes this machine's device multiplies, and how fast",
        description=(
            "Measures products of float32, TF32, bfloat16, float16 and float8 on the "
            "first device of this machine: whether they run, how fast, and how much "
            "they round; and says what to train in. It takes some seconds."
        ),
    )
    parser.add_argument(
        "--size", type=int, metavar="N", help="rows and columns of the matrices timed"
    )
    parser.add_argument(
        "--json", type=file_type, metavar="FILE", help="also write the results there"
    )
    parser.set_defaults(command=_devices_command)


def _devices_command(args: argparse.Namespace) -> int:
    report = measure_dtypes(size=args.size)
    sys.stdout.write(f"{report}\n")
    if args.json is not None:
        args.json.write_text(report.to_json() + "\n")
    return 0
