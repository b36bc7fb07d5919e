"""What a part of the GPU benchmark is given: its time, and a place for its figures."""

import pathlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks import results


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
        results.append_to(
            self.folder,
            "gpu_programs" if self.compile_only else "gpu",
            part=self.part,
            question=question,
            **({"tiny": True} if self.is_tiny else {}),
            **({"scan": True} if self.scan else {}),
            **figures,
        )


class Check(Protocol):
    """A function of a session whose results are findings."""

    __name__: str

    def __call__(self, session: Session, /) -> Iterator[dict[str, Any]]:
        """What was found, one by one."""
        ...


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


def run_checks(session: Session, checks: Iterable[Check]) -> None:
    """Writes a line for each finding of each check; a check that fails ends alone."""
    for check in checks:
        try:
            for figures in check(session):
                session.record("claim", check=check.__name__, **figures)
        except Exception as error:  # the next check may still tell something
            message = f"{type(error).__name__}: {str(error).strip()[:600]}"
            figures = {"what": "the check itself", "passed": False, "error": message}
            session.record("claim", check=check.__name__, **figures)
