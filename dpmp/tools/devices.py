"""Measures which dtypes a device multiplies, how fast and how exactly.

`print(measure_dtypes())`, or `python -m dpmp devices`, measures this device in some
seconds and says which policy to train with.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _plain_text, _timing, _validate

__all__ = ["DeviceReport", "Row", "add_devices_command", "measure_dtypes"]

# Errors are measured on results of this many rows and columns. Their entries are sums
# of few terms, or of many.
_SIDE, _FEW, _MANY = 128, 16, 4096

_ROUNDS = 5

# An emulated product computes in float32. Other work on the machine seldom makes it
# appear faster than float32 by a fifth.
_FASTER = 0.8

# Float32 products of the kind that is measured have smaller errors than this, and TF32
# products have larger ones.
_FLOAT32_ERROR = 2.0**-18

# The preset for each kind of product that may be faster than float32. Bfloat16 comes
# first, as it needs no loss scale.
_PRESETS = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16", "tf32": "tf32"}

# Advice for training, for a kind of product with one of the verdicts.
_HINTS = {
    ("float32 by default", "native, emulated"): "By default, jax rounds float32 "
    'operands here. dpmp.Policy.from_name("float32") asks for full precision.',
    ("tf32", "float32"): 'The preset "tf32" changes nothing here.',
    ("bfloat16", "native"): "It has the range of float32, and takes half the memory.",
    ("bfloat16", "emulated"): 'With these alone, "mixed_bfloat16" saves memory, but no '
    "time.",
    ("bfloat16 -> float32", "native"): 'On CPUs, method="book_keeping" computes these '
    'products. Where other bfloat16 products are slow, "mixed_bfloat16" may be faster '
    "or slower than float32: compare the examples a second that fit shows.",
    ("float16", "native, emulated"): 'The preset "mixed_float16" needs a loss scale: '
    "dpmp.loss_scaling.by_loss().",
    ("float8_e4m3fn -> float32", "native, emulated"): 'The preset "float8" uses these '
    "products on GPUs of compute capability 8.9 and later. Elsewhere it computes in "
    "bfloat16 with rounded operands, which shows the effect of float8 on accuracy.",
}


@dataclass(frozen=True)
class Row:
    """The measurements of one kind of product. They are None if it does not run.

    Attributes:
      name: the dtype of the operands, and after "->" the dtype of the result if it is
        different. "float32" asks for full precision. "float32 by default" and "tf32"
        have float32 operands, but may compute with less.
      error: the exception that the product raised, if any.
      operations_per_second: the rate of multiplications and additions.
      time_ratio: the time of the product over that of float32: the median over rounds.
      rounding_error: the largest relative error of sums of 16 products of float32
        numbers, which are rounded to the dtype first.
      adds_in_float32: whether sums within the product are in float32 or wider.
    """

    name: str
    error: str | None = None
    operations_per_second: float | None = None
    time_ratio: float | None = None
    rounding_error: float | None = None
    adds_in_float32: bool | None = None

    @property
    def verdict(self) -> str:
        """One of the verdicts that `measure_dtypes` explains."""
        if self.time_ratio is None or self.rounding_error is None:
            return "unavailable"
        if not self.adds_in_float32:
            return "imprecise"
        if self.rounding_error <= _FLOAT32_ERROR:
            return "float32"
        return "native" if self.time_ratio <= _FASTER else "emulated"


@dataclass(frozen=True)
class DeviceReport:
    """The speed and the accuracy of products on a device. `print` shows a table.

    Attributes:
      device_kind: the name that jax gives to the device.
      platform: the name that jax gives to its platform.
      size: the number of rows and columns of the matrices that were timed.
      rows: the measurements, one row for each kind of product.
    """

    device_kind: str
    platform: str
    size: int
    rows: tuple[Row, ...]

    @property
    def policy(self) -> str:
        """The preset of `dpmp.Policy` that suits the device."""
        native = [row.name for row in self.rows if row.verdict == "native"]
        suitable = (preset for name, preset in _PRESETS.items() if name in native)
        return next(suitable, "float32")

    @property
    def advice(self) -> tuple[str, ...]:
        """Advice for training that follows from the measurements."""
        found = [f'Use dpmp.Policy.from_name("{self.policy}").']
        for row in self.rows:
            if row.error is not None:
                found.append(f"{row.name}: products do not run here ({row.error}).")
            for (name, verdicts), hint in _HINTS.items():
                if row.name == name and row.verdict in verdicts.split(", "):
                    time = f"products take {row.time_ratio:.2f} of the time of float32"
                    found.append(f"{name}: {time}. {hint}")
        sums = "Sums within all products that run are in float32 or wider."
        if names := ", ".join(x.name for x in self.rows if x.verdict == "imprecise"):
            sums = f"Sums within these products are narrower than float32: {names}."
        return (*found, sums)

    def __str__(self) -> str:
        header = ("product", "verdict", "Gop/s", "time", "error", "sums")
        legend = (
            f"The time is that of a product of {self.size} x {self.size} matrices, "
            "relative to float32. The error comes from rounding the operands, and is "
            "relative to the result."
        )
        parts = [
            f"{self.device_kind} ({self.platform})",
            _plain_text.table([header, *map(_cells, self.rows)], "<<>>><"),
            _plain_text.paragraph(legend),
            "\n".join(_plain_text.paragraph(x, bullet="- ") for x in self.advice),
        ]
        return "\n\n".join(parts)


def _cells(row: Row) -> tuple[str, ...]:
    if row.operations_per_second is None:
        return row.name, row.verdict, "-", "-", "-", "-"
    return (
        row.name,
        row.verdict,
        f"{row.operations_per_second / 1e9:,.1f}",
        f"{row.time_ratio:.2f}",
        f"{row.rounding_error:.1e}",
        "in float32" if row.adds_in_float32 else "narrower",
    )


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
    programs, errors = compile_all(KINDS, shapes)
    if "float32" not in programs:
        _validate.fail(
            "products of float32 must run on the device. Use another device, or a "
            "smaller size.",
            size=size,
            error_of_product=errors.get("float32"),
        )
    seconds = _timing.in_turn(programs, _ROUNDS)
    rows = tuple(
        Row(
            kind.name,
            operations_per_second=2 * size**3 / statistics.median(seconds[kind.name]),
            time_ratio=_timing.median_ratio(seconds[kind.name], seconds["float32"]),
            rounding_error=rounding_error(kind),
            adds_in_float32=adds_in_float32(kind),
        )
        if kind.name in programs
        else Row(kind.name, error=errors[kind.name])
        for kind in KINDS
    )
    return DeviceReport(device.device_kind, device.platform, size, rows)


def add_devices_command(commands: Any) -> None:
    """Adds the command to the subparsers of `argparse`."""
    parser = commands.add_parser(
        "devices",
        help="Measures the speed and the accuracy of each dtype on this machine.",
        description="Measures products of float32, TF32, bfloat16, float16 and float8 "
        "on the first device of this machine: whether they run, how fast they are, and "
        "how exact. Then it says which policy to use. It takes some seconds.",
    )
    text = "rows and columns of the timed matrices"
    parser.add_argument("--size", type=int, metavar="N", help=text)
    parser.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> int:
    sys.stdout.write(f"{measure_dtypes(size=args.size)}\n")
    return 0


class Kind(NamedTuple):
    """A product of two operands of one dtype; its result may have another one."""

    name: str
    dtype: str
    result: str
    precision: str | None = None  # a value of `jax.default_matmul_precision`

    def __call__(self, a: Any, b: Any) -> jax.Array:
        """Computes the product of two matrices."""
        return jnp.matmul(
            a, b, precision=self.precision, preferred_element_type=self.result
        )


KINDS = (
    Kind("float32", "float32", "float32", "float32"),
    Kind("float32 by default", "float32", "float32"),
    Kind("tf32", "float32", "float32", "tensorfloat32"),
    Kind("bfloat16", "bfloat16", "bfloat16"),
    Kind("bfloat16 -> float32", "bfloat16", "float32"),
    Kind("float16", "float16", "float16"),
    Kind("float16 -> float32", "float16", "float32"),
    Kind("float8_e4m3fn -> float32", "float8_e4m3fn", "float32"),
)


def compile_product(
    kind: Kind, a: np.ndarray, b: np.ndarray
) -> Callable[[], jax.Array]:
    """Compiles a product of two arrays of the host, and runs it once."""
    # Every program has operands of its own, so that no program finds its operands in a
    # cache because another one has just used them.
    operands = [jnp.asarray(x.astype(jnp.dtype(kind.dtype))) for x in (a, b)]
    program = jax.jit(lambda a, b: kind(a, b)).lower(*operands).compile()
    jax.block_until_ready(program(*operands))  # some products fail only here
    return functools.partial(program, *operands)


def compile_all(
    kinds: Iterable[Kind],
    shapes: tuple[tuple[int, int], tuple[int, int]],
) -> tuple[dict[str, Callable[[], jax.Array]], dict[str, str]]:
    """By kind, the programs of products that run, and the exceptions of the others."""
    # A few numbers are repeated, since the time does not depend on them.
    numbers = np.random.default_rng(0).standard_normal(4099, np.float32)
    a, b = (np.resize(numbers, shape) for shape in shapes)
    programs, errors = {}, {}
    for kind in kinds:
        try:
            programs[kind.name] = compile_product(kind, a, b)
        except Exception as error:  # backends do not document what they raise
            message = str(error).strip().partition("\n")[0]
            errors[kind.name] = f"{type(error).__name__}: {message[:200]}"
    return programs, errors


def rounding_error(kind: Kind) -> float:
    """The largest relative error of sums of few products of numbers from 1 to 2.

    The numbers have all bits of float32, so the error shows how operands are rounded,
    before the product or inside of it.
    """
    rng = np.random.default_rng(0)
    return _error(kind, *rng.uniform(1, 2, (2, _SIDE, _FEW)).astype(np.float32))


def adds_in_float32(kind: Kind) -> bool:
    """Whether long sums of products are in float32 or wider until they are rounded.

    The operands are eighths from 1 to 15/8, which all dtypes hold. Float32 adds their
    products without error in any order, because the sums have at most 20 bits. So the
    only error that float32 explains is that of rounding the result once.
    """
    rng = np.random.default_rng(0)
    operands = 1 + rng.integers(0, 8, (2, _SIDE, _MANY)) / 8
    return _error(kind, *operands) <= float(jnp.finfo(kind.result).eps) / 2


def _error(kind: Kind, a: np.ndarray, b: np.ndarray) -> float:
    actual = np.asarray(compile_product(kind, a, b.T)()).astype(np.float64)
    # Float64 is exact for products of float32 numbers, which have 48 bits.
    exact = a.astype(np.float64) @ b.T.astype(np.float64)
    return float(np.max(np.abs(actual / exact - 1)))
