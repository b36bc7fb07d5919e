"""What the parts of the GPU benchmark do: compile programs, run them, and write lines.

Programs are compiled for the device at hand or for an H100, and run with care: a part
has its time, and a program that fails leaves the others alone.
"""

import functools
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from benchmarks import harness

# Of programs that must give the same result whenever they run: XLA then leaves out
# what adds up in an order that the hardware chooses. (`xla_gpu_deterministic_ops` does
# so too, but no longer tries out which kernels are fastest.)
REPEATABLE = {"xla_gpu_exclude_nondeterministic_ops": True}


@dataclass(frozen=True, kw_only=True)
class Session:
    """One part's run.

    Attributes:
      part: the name that its lines bear.
      folder: of the file `gpu.jsonl`.
      seconds: that the part may take.
      is_tiny: whether to run everything in a small size, on any device.
      compile_only: whether to compile for an H100 instead of running anything.
      scan: whether the layers of models are a loop.
      started: when the part began, by `time.monotonic`.
    """

    part: str
    folder: pathlib.Path
    seconds: float
    is_tiny: bool = False
    compile_only: bool = False
    scan: bool = False
    started: float = field(default_factory=time.monotonic)

    def seconds_left(self) -> float:
        """The time until the part has to end."""
        return self.started + self.seconds - time.monotonic()

    def record(self, question: str, **figures: Any) -> None:
        """Writes a line at once, so that a run that is cut off keeps it."""
        harness.append(
            self.folder,
            "gpu_programs" if self.compile_only else "gpu",
            part=self.part,
            question=question,
            **({"tiny": True} if self.is_tiny else {}),
            **({"scan": True} if self.scan else {}),
            **figures,
        )


# --------------------------------------------------------------------------- findings


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
    session: Session, checks: Iterable[Callable[[Session], Iterator[dict[str, Any]]]]
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


# --------------------------------------------------------------------------- programs


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
    """A program as a function of arrays, and figures of what it took to make it."""

    run: Callable[..., Any]
    figures: dict[str, float]


# Triton's kernels need a device to be tried out on, and without that some tiles fit no
# product.
_WITHOUT_TRIALS = {"xla_gpu_enable_triton_gemm": False}


def compile_program(session: Session, program: Program) -> Compiled:
    """Compiles for the device at hand, or for an H100 where that is all to be done."""
    sharding, options = None, {}
    if session.compile_only:
        sharding, options = _h100_sharding(), {**program.options, **_WITHOUT_TRIALS}
    elif jax.default_backend() == "gpu":
        options = dict(program.options)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        program.args,
    )
    start = time.perf_counter()
    lowered = jax.jit(lambda *xs: program.fun(*xs)).lower(*shapes)
    lowered_at = time.perf_counter()
    compiled = lowered.compile(compiler_options=options)
    memory: Any = compiled.memory_analysis()
    figures = {
        "lowering_seconds": round(lowered_at - start, 1),
        "compile_seconds": round(time.perf_counter() - lowered_at, 1),
    }
    for name in ("temp", "argument", "output"):
        size = getattr(memory, f"{name}_size_in_bytes")
        figures[f"{name}_megabytes"] = round(size / 1e6, 1)
    return Compiled(compiled, figures)


@functools.cache
def _h100_sharding() -> Any:
    from benchmarks import h100

    return h100.sharding()


def compile_all(session: Session, programs: Mapping[str, Program]) -> None:
    """Compiles programs for an H100, with a line for each."""
    from benchmarks import h100

    for name, program in programs.items():
        try:
            figures: Any = compile_program(session, program).figures
        except Exception as error:  # the others may compile
            figures = {"error": _message(error)}
        kind = h100.device_kind()
        session.record("program", compiled_for=kind, name=name, **figures)


def compile_and_run(session: Session, program: Program, *args: Any) -> Any:
    """The result of a program."""
    return compile_program(session, program).run(*args)


class Trial(NamedTuple):
    """A program that ran: what runs it again, and the seconds of its second run."""

    call: Callable[[], Any]
    seconds: float


def _try_all(
    session: Session, programs: Mapping[str, Program], args: tuple[Any, ...]
) -> Iterator[tuple[str, Trial]]:
    """Runs programs twice while three quarters of the time last; a line for each."""
    slowest = 0.0
    for name, program in programs.items():
        if session.seconds_left() - 0.25 * session.seconds < slowest:
            session.record("trial", name=name, error="not tried: no time left")
            continue
        start, trial = time.monotonic(), None
        try:
            # Adapters of arrays have a fingerprint in their type, those of shapes none.
            compiled = compile_program(session, program._replace(args=args))
            call = functools.partial(compiled.run, *args)
            before = _peak_bytes()
            seconds_of(call)
            trial = Trial(call, seconds_of(call))
            peak = _peak_bytes()
            figures: Any = {
                **compiled.figures,
                # Of the process: it tells of a program that takes more than all before.
                "peak_megabytes": round(peak / 1e6, 1) if peak != before else None,
                "milliseconds": round(1e3 * trial.seconds, 2),
            }
        except Exception as error:  # a part goes on without what does not fit
            figures = {"error": _message(error)}
        slowest = max(slowest, time.monotonic() - start)
        session.record("trial", name=name, **figures)
        if trial:
            yield name, trial


def _peak_bytes() -> int:
    """The most memory that was in use since the process began; 0 if it is not known."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def compare(
    session: Session,
    programs: Mapping[str, Program],
    make_args: Callable[[], tuple[Any, ...]],
    *,
    reference: str,
    kind: Callable[[str], str] = lambda name: name,
    rounds: int = 10,
    has_early_lines: bool = False,
    prefix: str = "",
    more: Callable[[dict[str, float]], dict[str, Any]] = lambda milliseconds: {},
) -> None:
    """Tries programs, and times the fastest of each kind in turn; or compiles them.

    Args:
      session: the part.
      programs: by name, the most important first. Only the first one of each kind is
        compiled for an H100.
      make_args: the arguments of all of them.
      reference: the name of the one that the others are compared with.
      kind: of a program with this name.
      rounds: in which all run in turn.
      has_early_lines: whether there is a line whenever the fastest of a kind changed,
        so that a run that is cut off has one.
      prefix: of the names of what is compiled for an H100.
      more: figures of a line that follow from the milliseconds.
    """
    if session.compile_only:
        first = {kind(name): name for name in [*programs][::-1]}.values()
        compile_all(session, {prefix + x: programs[x] for x in [*first][::-1]})
        return
    trials, best = {}, {}
    for name, trial in _try_all(session, programs, make_args()):
        trials[name], before = trial, best
        by_time = sorted(trials, key=lambda x: trials[x].seconds, reverse=True)
        best = {kind(x): x for x in by_time}
        if has_early_lines and best != before and len(best) > 1:
            _time(session, trials, best.values(), reference, 3, more)
    _time(session, trials, best.values(), reference, rounds, more)


def _time(session, trials, names, reference, rounds, more) -> None:
    calls = {name: trials[name].call for name in names}
    seconds = in_turn(
        session, calls, rounds=min(rounds, 3) if session.is_tiny else rounds
    )
    figures = summarize(seconds, reference)
    num_rounds = min(map(len, seconds.values()), default=0)
    if num_rounds:
        figures |= more(figures["milliseconds"])
        session.record("comparison", rounds=num_rounds, **figures)


def seconds_of(call: Callable[[], Any], *, queued: int = 1) -> float:
    """The time of a call, of several that are handed to the device at once."""
    start = time.perf_counter()
    jax.block_until_ready([call() for _ in range(queued)])
    return (time.perf_counter() - start) / queued


def in_turn(
    session: Session, calls: Mapping[str, Callable[[], Any]], *, rounds: int
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


def summarize(seconds: Mapping[str, list[float]], reference: str) -> dict[str, Any]:
    """Median milliseconds, and the medians of the ratios within rounds."""
    timed = {name: times for name, times in seconds.items() if times}
    return {
        "milliseconds": harness.rounded(harness.medians(timed), 3, unit=1e-3),
        "time_ratio": harness.time_over(timed, reference) if reference in timed else {},
    }
