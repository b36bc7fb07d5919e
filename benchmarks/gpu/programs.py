"""What the parts of the GPU benchmark do: compile programs, run them, and write lines.

Programs are run with care: a part has its time, and a program that fails leaves the
others alone.
"""

import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from benchmarks import harness

# Of programs that must give the same result whenever they run: XLA then leaves out
# what adds up in an order that the hardware chooses. (`xla_gpu_deterministic_ops` does
# so too, but no longer tries out which kernels are fastest.)
REPEATABLE = {"xla_gpu_exclude_nondeterministic_ops": True}


@dataclass(frozen=True, kw_only=True)
class Session:
    """One part's run."""

    part: str  # the name that its lines bear
    folder: pathlib.Path  # of the file gpu.jsonl
    seconds: float  # that the part may take
    is_tiny: bool = False  # everything is run in a small size, on any device
    started: float = field(default_factory=time.monotonic)

    def seconds_left(self) -> float:
        """The time until the part has to end."""
        return self.started + self.seconds - time.monotonic()

    def record(self, question: str, **figures: Any) -> None:
        """Writes a line at once, so that a run that is cut off keeps it."""
        size = {"tiny": True} if self.is_tiny else {}
        part = {"part": self.part, "question": question}
        harness.append(self.folder, "gpu", **part, **size, **figures)


def finding(
    what: str, value: Any, allowed: float, *, is_promised: bool = True
) -> dict[str, Any]:
    """Figures of what was measured, and whether that is allowed."""
    return {
        "what": what,
        "is_promised": is_promised,
        "passed": bool(value <= allowed),
        "value": float(value),
        "allowed": allowed,
    }


def run_checks(
    session: Session, checks: Sequence[Callable[[Session], Iterator[dict[str, Any]]]]
) -> None:
    """Writes a line for each finding of each check; a check that fails ends alone."""
    for check in checks:
        name = getattr(check, "__name__", "")
        try:
            for figures in check(session):
                session.record("claim", check=name, **figures)
        except Exception as error:  # the next check may still tell something
            figures = {"what": "the check itself", "passed": False}
            session.record("claim", check=name, **figures, error=_message(error))


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:600]}"


def jitted(fun: Callable[..., Any], options: Mapping[str, Any] = REPEATABLE) -> Any:
    """The function, compiled on GPUs with these options of the compiler."""
    is_gpu = jax.default_backend() == "gpu"
    return jax.jit(fun, compiler_options=dict(options) if is_gpu else {})


def _compile(
    fun: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, float]]:
    """Compiles for the device at hand, with figures of what it took."""
    shapes = jax.eval_shape(lambda *xs: xs, *args)
    start = time.perf_counter()
    lowered: Any = jitted(fun, options).lower(*shapes)
    lowered_at = time.perf_counter()
    compiled: Any = lowered.compile()
    compiled_at = time.perf_counter()
    memory = compiled.memory_analysis()
    return compiled, {
        "lowering_seconds": round(lowered_at - start, 1),
        "compile_seconds": round(compiled_at - lowered_at, 1),
        "temp_megabytes": round(memory.temp_size_in_bytes / 1e6, 1),
        "argument_megabytes": round(memory.argument_size_in_bytes / 1e6, 1),
        "output_megabytes": round(memory.output_size_in_bytes / 1e6, 1),
    }


def _try_all(
    session: Session, functions: Mapping[str, Callable[..., Any]], args: tuple[Any, ...]
) -> Iterator[tuple[str, Callable[[], Any], float]]:
    """Runs programs twice while three quarters of the time last; a line for each.

    Gives their names, what runs them again, and the seconds of their second run.
    """
    slowest = 0.0
    for name, fun in functions.items():
        if session.seconds_left() - 0.25 * session.seconds < slowest:
            session.record("trial", name=name, error="not tried: no time left")
            continue
        start, call, seconds = time.monotonic(), None, 0.0
        try:
            # What is proved of "bounded" sums takes sums that are always the same.
            options = REPEATABLE if "bounded" in name else {}
            run, figures = _compile(fun, args, options)
            call = functools.partial(run, *args)
            before = _peak_bytes()
            seconds_of(call)
            seconds = seconds_of(call)
            peak = _peak_bytes()
            # Of the process: it tells of a program that takes more than all before.
            peak_megabytes = round(peak / 1e6, 1) if peak != before else None
            figures |= {"milliseconds": round(1e3 * seconds, 2)}
            figures |= {"peak_megabytes": peak_megabytes}
        except Exception as error:  # a part goes on without what does not fit
            figures = {"error": _message(error)}
        slowest = max(slowest, time.monotonic() - start)
        session.record("trial", name=name, **figures)
        if call and seconds:
            yield name, call, seconds


def _peak_bytes() -> int:
    """The most memory that was in use since the process began; 0 if it is not known."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def compare(
    session: Session,
    functions: Mapping[str, Callable[..., Any]],  # the most important first
    args: tuple[Any, ...],
    *,
    reference: str,
    kind: Callable[[str], str] = lambda name: name,
    rounds: int = 10,
    more: Callable[[dict[str, float]], dict[str, Any]] = lambda milliseconds: {},
) -> None:
    """Tries functions, and times the fastest of each kind in turn.

    There is a line whenever the fastest of a kind changed, so that a run that is cut
    off has one. `kind` is that of a program with this name, and `more` gives figures
    that follow from the milliseconds.
    """

    def time_best(rounds: int) -> None:
        some = {name: calls[name] for name in best.values()}
        seconds = _in_turn(session, some, min(rounds, 3) if session.is_tiny else rounds)
        measured = harness.Measured(seconds)
        if num_rounds := min(map(len, seconds.values()), default=0):
            session.record(
                "comparison",
                rounds=num_rounds,
                milliseconds=measured.milliseconds(),
                time_ratio=measured.time_over(reference) if reference in some else {},
                **more(measured.milliseconds()),
            )

    calls, trials, best = {}, {}, {}
    for name, call, seconds in _try_all(session, functions, args):
        calls[name], trials[name], before = call, seconds, best
        by_time = sorted(trials, key=trials.__getitem__, reverse=True)
        best = {kind(x): x for x in by_time}
        if best != before and len(best) > 1:
            time_best(3)
    time_best(rounds)


def seconds_of(call: Callable[[], Any], *, queued: int = 1) -> float:
    """The time of a call, of several that are handed to the device at once."""
    start = time.perf_counter()
    jax.block_until_ready([call() for _ in range(queued)])
    return (time.perf_counter() - start) / queued


def fastest_seconds(call: Callable[[], Any]) -> float:
    """The fastest of five times, of calls that wait in line for the device."""
    return min(seconds_of(call, queued=10) for _ in range(5))


def _in_turn(
    session: Session, calls: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of all calls, round by round, while there is time for one more round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    longest = 0.0
    for _ in range(rounds):
        if session.seconds_left() < 5 + longest:
            break
        start = time.perf_counter()
        for name, call in calls.items():
            seconds[name].append(seconds_of(call))
        longest = max(longest, time.perf_counter() - start)
    return seconds
