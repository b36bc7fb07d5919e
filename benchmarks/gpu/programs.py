"""Programs: compiled for the device at hand or for an H100, and run with care."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from benchmarks.gpu.session import Session

# Of programs that must give the same result whenever they run: XLA then leaves out
# what adds up in an order that the hardware chooses. (`xla_gpu_deterministic_ops` does
# so too, but no longer tries out which kernels are fastest.)
REPEATABLE = {"xla_gpu_exclude_nondeterministic_ops": True}


class Program(NamedTuple):
    """A function to compile.

    Attributes:
      fun: of arrays.
      args: trees of arrays, or of their shapes.
      options: of the compiler, on GPUs.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any] = {}


class Compiled(NamedTuple):
    """A program, and what it took to make it.

    Attributes:
      run: the program, a function of arrays like those it was compiled for.
      figures: for result lines.
    """

    run: Callable[..., Any]
    figures: dict[str, float]


def compile_program(session: Session, program: Program) -> Compiled:
    """Compiles for the device at hand, or for an H100 where that is all to be done."""
    if session.compile_only:
        sharding, options = _h100_sharding(), {**program.options, **_WITHOUT_TRIALS}
    else:
        is_gpu = jax.default_backend() == "gpu"
        sharding, options = None, dict(program.options) if is_gpu else {}
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        program.args,
    )
    start = time.perf_counter()
    lowered = jax.jit(lambda *xs: program.fun(*xs)).lower(*shapes)
    lowering_seconds = time.perf_counter() - start
    compiled = lowered.compile(compiler_options=options)
    return Compiled(
        compiled,
        {
            "lowering_seconds": round(lowering_seconds, 1),
            "compile_seconds": round(time.perf_counter() - start - lowering_seconds, 1),
            **_memory(compiled),
        },
    )


# Triton's kernels need a device to be tried out on, and without that some tiles fit no
# product.
_WITHOUT_TRIALS = {"xla_gpu_enable_triton_gemm": False}


@functools.cache
def _h100_sharding() -> Any:
    from benchmarks import h100

    return h100.sharding()


def _memory(compiled: Any) -> dict[str, float]:
    analysis = compiled.memory_analysis()
    return {
        "temp_megabytes": round(analysis.temp_size_in_bytes / 1e6, 1),
        "argument_megabytes": round(analysis.argument_size_in_bytes / 1e6, 1),
        "output_megabytes": round(analysis.output_size_in_bytes / 1e6, 1),
    }


class Trial(NamedTuple):
    """A program that ran.

    Attributes:
      call: runs it.
      seconds: of its second run.
      figures: for its result line.
    """

    call: Callable[[], Any]
    seconds: float
    figures: dict[str, Any]


def try_once(session: Session, program: Program, args: tuple[Any, ...]) -> Trial:
    """Compiles a program and runs it twice."""
    compiled = compile_program(session, program)
    call = functools.partial(compiled.run, *args)
    peak_before = _peak_bytes()
    seconds_of(call)
    seconds = seconds_of(call)
    peak = _peak_bytes()
    figures = {
        **compiled.figures,
        # Of the process: it tells of a program that takes more than all before it.
        "peak_megabytes": round(peak / 1e6, 1)
        if peak and peak != peak_before
        else None,
        "milliseconds": round(1e3 * seconds, 2),
    }
    return Trial(call, seconds, figures)


def try_all(
    session: Session,
    programs: Mapping[str, Program],
    args: tuple[Any, ...],
    *,
    share_for_rounds: float = 0.25,
) -> Iterator[tuple[str, Trial]]:
    """Tries programs while there is time, with a line for each.

    Args:
      session: the time there is.
      programs: by name, the most important first.
      args: of all of them.
      share_for_rounds: of the time of the session, which is left for later.

    Yields:
      The name and the trial of each that ran.
    """
    slowest = 0.0
    for name, program in programs.items():
        spare = session.seconds_left() - share_for_rounds * session.seconds
        if spare < slowest:
            session.record("trial", name=name, error="not tried: no time left")
            continue
        start = time.monotonic()
        trial, error = attempt(lambda p=program: try_once(session, p, args))
        slowest = max(slowest, time.monotonic() - start)
        session.record(
            "trial", name=name, **(trial.figures if trial else {"error": error})
        )
        if trial:
            yield name, trial


def compile_all(session: Session, programs: Mapping[str, Program]) -> None:
    """Compiles programs for an H100, with a line for each."""
    from benchmarks import h100

    for name, program in programs.items():
        compiled, error = attempt(lambda p=program: compile_program(session, p))
        session.record(
            "program",
            compiled_for=h100.device_kind(),
            name=name,
            **(compiled.figures if compiled else {"error": error}),
        )


def attempt(run: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `run` returns, or None and the beginning of the exception that it raises."""
    try:
        return run(), None
    except Exception as error:  # a part goes on without what does not fit or compile
        return None, f"{type(error).__name__}: {str(error).strip()[:600]}"


def seconds_of(call: Callable[[], Any], *, queued: int = 1) -> float:
    """The time of a call, of several that are handed to the device at once."""
    start = time.perf_counter()
    jax.block_until_ready([call() for _ in range(queued)])
    return (time.perf_counter() - start) / queued


def in_turn(
    session: Session,
    calls: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    seconds_to_leave: float = 5.0,
) -> dict[str, list[float]]:
    """Seconds of all calls, round by round, while there is time for one more round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    longest = 0.0
    for _ in range(rounds):
        if session.seconds_left() < seconds_to_leave + longest:
            break
        start = time.perf_counter()
        for name, call in calls.items():
            seconds[name].append(seconds_of(call))
        longest = max(longest, time.perf_counter() - start)
    return seconds


def summarize(
    seconds: Mapping[str, list[float]], reference: str
) -> dict[str, dict[str, float]]:
    """Median milliseconds, and the medians of the ratios within rounds."""
    timed = {name: times for name, times in seconds.items() if times}
    return {
        "milliseconds": {
            name: round(1e3 * statistics.median(times), 3)
            for name, times in timed.items()
        },
        "time_ratio": {
            name: round(_median_ratio(times, timed[reference]), 3)
            for name, times in timed.items()
            if reference in timed
        },
    }


def _median_ratio(times: list[float], reference: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, reference, strict=True))


def _peak_bytes() -> int | None:
    """The most memory that was in use since the process began, where it is known."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")
