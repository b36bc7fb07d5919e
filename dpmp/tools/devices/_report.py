"""From what was measured of a device to verdicts, advice and a table."""

import dataclasses
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import rich.console
import rich.table

# In times of float32. What is emulated computes in float32, and is seldom faster than
# that by a fifth because of other work on the machine.
_FASTER = 0.8
_TWICE_AS_WIDE = 3.0

# Float32 products of the kind measured err by less, TF32 ones by more.
_CHANGES_BITS = 2.0**-18

# The presets that are faster than float32 if a product is "native"; bfloat16 comes
# first, as it needs no loss scale.
_PRESETS = {
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
    "tf32": "tf32",
}


@dataclass(frozen=True)
class Row:
    """What was measured of one kind of product; None where it does not run.

    Attributes:
      name: the dtype of the operands, and after "->" that of the result if it differs.
        "float32" is in full precision; "float32 by default" and "tf32" may not be.
      error: the exception that was raised, or what is wrong with the result.
      seconds: the median time.
      operations_per_second: multiplications and additions.
      time_ratio: the median over rounds of its time over that of float32.
      rounding_error: the largest relative error of sums of 16 products of float32
        numbers, which are first rounded to the dtype.
      sum_error: the largest relative error of sums of 4096 products that float32 adds
        without error.
      too_large: which of the two errors are larger than the dtype explains.
    """

    name: str
    error: str | None = None
    seconds: float | None = None
    operations_per_second: float | None = None
    time_ratio: float | None = None
    rounding_error: float | None = None
    sum_error: float | None = None
    too_large: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """One of "native", "emulated" and "unavailable", as in `measure_dtypes`."""
        if self.time_ratio is None or self.rounding_error is None:
            return "unavailable"
        is_native = {
            "float32": True,
            "float32 by default": True,
            "tf32": self.rounding_error > _CHANGES_BITS,
            "float64": self.time_ratio <= _TWICE_AS_WIDE,
        }.get(self.name, self.time_ratio <= _FASTER)
        return "native" if is_native else "emulated"


@dataclass(frozen=True)
class DeviceReport:
    """What a device does with products of each dtype; `str` gives table and advice.

    Attributes:
      device_kind: as jax names it.
      platform: as jax names it.
      num_devices: of the platform, in this process.
      jax_version: the version.
      size: of the square matrices whose products were timed.
      rounds: that were timed.
      rows: one for each kind of product.
    """

    device_kind: str
    platform: str
    num_devices: int
    jax_version: str
    size: int
    rounds: int
    rows: tuple[Row, ...]

    @property
    def policy(self) -> str:
        """The preset of `dpmp.Policy` that suits the device."""
        return recommended_policy(self.rows)

    @property
    def advice(self) -> tuple[str, ...]:
        """What follows for training, in sentences."""
        return tuple(_advice(self.rows))

    def to_json(self) -> str:
        """All fields, with verdicts, policy and advice."""
        rows = [{**dataclasses.asdict(x), "verdict": x.verdict} for x in self.rows]
        content = {**dataclasses.asdict(self), "rows": rows}
        content |= {"policy": self.policy, "advice": self.advice}
        return json.dumps(content, indent=2, allow_nan=False)

    def __str__(self) -> str:
        file = io.StringIO()
        console = rich.console.Console(file=file, width=80, color_system=None)
        for part in (
            f"{self.device_kind} ({self.platform}), number of devices: "
            f"{self.num_devices}, jax {self.jax_version}",
            "",
            _table(self.rows),
            "",
            f"Time is that of {self.size} x {self.size} matrices, over that of float32 "
            f"({self.rounds} rounds). Errors are relative: with operands rounded to "
            "the dtype, and of sums that float32 adds without error; ! marks those "
            "that the dtype does not explain.",
            *(f"{x.name}: {x.error}" for x in self.rows if x.error),
            "",
            *(f"- {sentence}" for sentence in self.advice),
        ):
            console.print(part, markup=False, highlight=False)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _table(rows: Sequence[Row]) -> rich.table.Table:
    table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "verdict"):
        table.add_column(name, no_wrap=True)
    for name in ("Gop/s", "time", "rounding", "sums"):
        table.add_column(name, justify="right", no_wrap=True)
    for x in rows:
        rate = x.operations_per_second
        table.add_row(
            x.name,
            x.verdict,
            "-" if rate is None else f"{rate / 1e9:,.1f}",
            "-" if x.time_ratio is None else f"{x.time_ratio:.2f}",
            *(_marked(x, name) for name in ("rounding_error", "sum_error")),
        )
    return table


def _marked(row: Row, name: str) -> str:
    error = getattr(row, name)
    mark = "!" if name in row.too_large else ""
    return "-" if error is None else f"{error:.1e}{mark}"


def recommended_policy(rows: Sequence[Row]) -> str:
    """The first preset with products that are faster, and no worse than their dtype."""
    is_good = {
        x.name: x.verdict == "native"
        and x.time_ratio is not None
        and x.time_ratio <= _FASTER
        and not x.too_large
        for x in rows
    }
    found = (preset for name, preset in _PRESETS.items() if is_good.get(name))
    return next(found, "float32")


def _advice(rows: Sequence[Row]) -> Iterator[str]:
    by_name = {x.name: x for x in rows}
    policy = recommended_policy(rows)
    yield f'Use dpmp.Policy.from_name("{policy}"): {_reason(policy, by_name)}.'
    yield _of_bfloat16(by_name["bfloat16"], by_name["bfloat16 -> float32"])
    yield _of_float16(by_name["float16"])
    yield _of_tf32(by_name["tf32"])
    yield from _of_default(by_name["float32 by default"])
    yield _of_float8(by_name["float8_e4m3fn -> float32"])
    if float64 := by_name.get("float64"):
        yield f'float64: {_in_time(float64)}. For sums, "float32x2" is as good.'
    yield _of_sums(rows)


def _reason(policy: str, by_name: dict[str, Row]) -> str:
    reasons = {preset: _in_time(by_name[x]) for x, preset in _PRESETS.items()}
    return reasons.get(policy, "no preset with narrower products is faster here")


def _in_time(row: Row) -> str:
    if row.time_ratio is None:
        return "products do not run here"
    return f"products take {row.time_ratio:.2f} of the time of float32"


def _of_bfloat16(row: Row, with_float32_result: Row) -> str:
    text = f"bfloat16: {_in_time(row)}"
    if row.verdict == "native":
        return f"{text}, with the range of float32, and half the memory."
    if row.verdict == "unavailable":
        return f"{text}."
    text += '. "mixed_bfloat16" saves memory, not time.'
    if with_float32_result.verdict != "native":
        return text
    return (
        f"{text} But with a float32 result {_in_time(with_float32_result)}, and "
        'method="book_keeping" asks for that on CPUs: with it, try both.'
    )


def _of_float16(row: Row) -> str:
    text = f"float16: {_in_time(row)}"
    if row.verdict == "unavailable":
        return f"{text}."
    return f'{text}. "mixed_float16" needs a loss scale: dpmp.loss_scaling.by_loss().'


def _of_tf32(row: Row) -> str:
    if row.verdict == "emulated":
        return 'tf32: no effect here. "tf32" computes in float32.'
    return f"tf32: {_in_time(row)}" + (
        f", with an error of {row.rounding_error:.1g}."
        if row.verdict == "native"
        else "."
    )


def _of_default(row: Row) -> Iterator[str]:
    if row.rounding_error is not None and row.rounding_error > _CHANGES_BITS:
        yield (
            "float32: what jax does by default is less here, with an error of "
            f'{row.rounding_error:.1g}. dpmp.Policy.from_name("float32") asks for all.'
        )


def _of_float8(row: Row) -> str:
    hint = ", emulated" if row.verdict == "emulated" else ""
    return (
        f"float8_e4m3fn: {_in_time(row)}{hint}. "
        'The preset "float8" asks for them on GPUs of compute capability 8.9 and '
        "later, and computes in bfloat16 with operands rounded to it elsewhere, to see "
        "what that does to accuracy."
    )


def _of_sums(rows: Sequence[Row]) -> str:
    if names := [x.name for x in rows if x.too_large]:
        return (
            f"Less precise than their dtype explains: {', '.join(names)}. Their sums, "
            "or operands, are rounded to something narrower."
        )
    return "Sums inside of products are in float32 or wider, for all that run."
