"""What a device can do: the self-check, matrix products by dtype, and noise."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from benchmarks import harness
from benchmarks.gpu import programs
from benchmarks.gpu.programs import Session
from benchmarks.large_runs import noisy_sums
from dpmp import devices
from dpmp.tools.selfcheck import command
from dpmp.tools.selfcheck._subjects import Sizes, dpmp_subjects


def run_selfcheck(session: Session) -> None:
    """A line for each measurement, with the claims that do not hold."""
    subjects, sizes = dpmp_subjects(), Sizes()
    if session.is_tiny:
        sizes = Sizes(2000, 8, 256, 2**20, 2**17)
        subjects = subjects._replace(sums=subjects.sums[:1], releases=())
    for results in command.parts(subjects, sizes):
        claims = [x for x in results if x.is_claimed]
        session.record(
            "claims of the self-check",
            claims=len(claims),
            broken=[
                f"{x.measurement}; {x.subject}; {x.value}; {x.worst_case}"
                for x in command.broken_claims(results)
            ],
            measured={f"{x.measurement}; {x.subject}": x.value for x in claims},
        )


def run_products(session: Session) -> None:
    """Rates for several sizes, then what `dpmp.devices` says of the device."""
    sizes = (64,) if session.is_tiny else (8192, 4096, 2048, 16384)
    for size in sizes:
        shapes = ((size, size), (size, size))
        calls, errors = devices.compile_all(devices.KINDS, shapes)
        seconds = {k: programs.fastest_seconds(call) for k, call in calls.items()}
        rates = {k: 2 * size**3 / x for k, x in seconds.items()}
        session.record(
            "rate",
            size=size,
            teraflops_per_second=harness.rounded(rates, 1, unit=1e12),
            time_of_bfloat16=harness.rounded(seconds, 3, unit=seconds["bfloat16"]),
            errors=errors,
        )
    report = devices.measure_dtypes(size=sizes[0])
    rows = {row.name: dataclasses.asdict(row) for row in report.rows}
    session.record("measured dtypes", size=sizes[0], rows=rows)


def run_noise(session: Session) -> None:
    """Noise for a billion entries, beside `jax.random.normal`.

    A sum of 2^30 integers takes 4 GiB, and as much again with noise, in float32.
    """
    size = 2**12 if session.is_tiny else 2**30

    def more(milliseconds: dict[str, float]) -> dict[str, Any]:
        rates = {k: round(size / x / 1e6, 3) for k, x in milliseconds.items()}
        return {"entries": size, "gigaentries_per_second": rates}

    programs.compare(
        session,
        noisy_sums(),
        (jnp.zeros(size, jnp.int32), jnp.int32(0)),
        reference="jax.random.normal",
        rounds=7,
        more=more,
    )
