"""What matrix products cost by dtype, and how exactly they are computed."""

import dataclasses
import functools

import jax

from benchmarks.gpu import programs
from benchmarks.gpu.programs import Program
from benchmarks.gpu.session import Session
from dpmp import devices
from dpmp.tools.devices import _products

_QUEUED = 10


def run(session: Session) -> None:
    """Rates for several sizes, then what `dpmp.devices` says of the device."""
    sizes = (64,) if session.is_tiny else (8192, 4096, 2048, 16384)
    if session.compile_only:
        programs.compile_all(session, _programs(sizes))
        return
    for size in sizes:
        _measure_rates(session, size)
    report = devices.measure_dtypes(size=sizes[0])
    rows = {row.name: dataclasses.asdict(row) for row in report.rows}
    session.record("measured dtypes", size=sizes[0], rows=rows)


def _programs(sizes: tuple[int, ...]) -> dict[str, Program]:
    return {
        f"product of {kind.name}, {size}": Program(
            kind, (jax.ShapeDtypeStruct((size, size), kind.dtype),) * 2
        )
        for size in sizes
        for kind in _products.KINDS
    }


def _measure_rates(session: Session, size: int) -> None:
    """The fastest of five times, of products that wait in line for the device."""
    shapes = (size, size), (size, size)
    calls, errors = _products.compile_all(_products.KINDS, shapes)
    timed = functools.partial(programs.seconds_of, queued=_QUEUED)
    seconds = {name: min(timed(call) for _ in range(5)) for name, call in calls.items()}
    session.record(
        "rate",
        size=size,
        teraflops_per_second={
            name: round(2 * size**3 / x / 1e12, 1) for name, x in seconds.items()
        },
        time_of_bfloat16={
            name: round(x / seconds["bfloat16"], 3) for name, x in seconds.items()
        },
        errors=errors,
    )
