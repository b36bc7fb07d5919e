"""Measures products of all dtypes on a device."""

import argparse
import statistics
import sys
from typing import Any

import jax.numpy as jnp

from dpmp import _timing, _validate
from dpmp.tools.devices import _products
from dpmp.tools.devices._report import DeviceReport, Row

_ROUNDS = 5


def measure_dtypes(*, size: int | None = None) -> DeviceReport:
    """Measures the speed and the accuracy of products of each dtype on a device.

    The device is the one that jax uses by default; `jax.default_device` chooses
    another. Times are those of compiled products of square matrices, which run in turn.
    Errors are those of smaller products, compared with float64. A kind of product is

    - "unavailable" if it does not compile or run;
    - "imprecise" if it sums in a dtype that is narrower than float32;
    - "float32" if its results are as exact as those of float32, whatever dtype and
      precision were requested;
    - "native" if it takes at most 0.8 of the time of float32;
    - "emulated" otherwise: it runs, but saves no time.

    >>> report = measure_dtypes(size=32)
    >>> print([row.name for row in report.rows][2:4])
    ['tf32', 'bfloat16']

    Args:
      size: the number of rows and columns of the matrices that are timed; None for 1024
        on CPUs and 8192 elsewhere. An accelerator takes longer to start a smaller
        product than to compute it.

    Returns:
      The report. `print` shows it as a table, with advice.

    Raises:
      ValueError: if the size is not a positive integer, or float32 products fail.
    """
    device = next(iter(jnp.zeros(()).devices()))
    if size is None:
        size = 1024 if device.platform == "cpu" else 8192
    size = _validate.positive_integer(size=size, fix="Leave it out for one that fits.")
    shapes = (size, size), (size, size)
    programs, errors = _products.compile_all(_products.KINDS, shapes)
    _validate.require(
        "float32" in programs,
        "products of float32 must run on the device",
        size=size,
        error_of_product=errors.get("float32"),
        fix="Use another device, or a smaller size.",
    )
    seconds = _timing.in_turn(programs, _ROUNDS)
    rows = tuple(
        Row(
            kind.name,
            operations_per_second=2 * size**3 / statistics.median(seconds[kind.name]),
            time_ratio=_timing.median_ratio(seconds[kind.name], seconds["float32"]),
            rounding_error=_products.rounding_error(kind),
            adds_in_float32=_products.adds_in_float32(kind),
        )
        if kind.name in programs
        else Row(kind.name, error=errors[kind.name])
        for kind in _products.KINDS
    )
    return DeviceReport(device.device_kind, device.platform, size, rows)


def add_devices_command(commands: Any) -> None:
    """Adds the command to the subparsers of `argparse`."""
    parser = commands.add_parser(
        "devices",
        help="Measures the speed and the accuracy of each dtype on this machine.",
        description=(
            "Measures products of float32, TF32, bfloat16, float16 and float8 on the "
            "first device of this machine: whether they run, how fast they are, and "
            "how exact. Then it says which policy to use. It takes some seconds."
        ),
    )
    parser.add_argument(
        "--size", type=int, metavar="N", help="rows and columns of the timed matrices"
    )
    parser.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> int:
    sys.stdout.write(f"{measure_dtypes(size=args.size)}\n")
    return 0
