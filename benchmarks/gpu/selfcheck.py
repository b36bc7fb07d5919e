"""`python -m dpmp selfcheck` on this device."""

from benchmarks.gpu.session import Session
from dpmp.tools.selfcheck import _command
from dpmp.tools.selfcheck._modes import dpmp_subjects
from dpmp.tools.selfcheck._results import Sizes


def run(session: Session) -> None:
    """A line for each measurement, with the claims that do not hold."""
    subjects, sizes = dpmp_subjects(), Sizes()
    if session.is_tiny:
        sizes = Sizes(2000, 8, 256, 2**20, 2**17)
        subjects = subjects._replace(sums=subjects.sums[:1], releases=())
    if session.compile_only:
        return  # its programs are made one by one, from what those before gave
    for results in _command.parts(subjects, sizes):
        claims = [x for x in results if x.is_claimed]
        session.record(
            "claims of the self-check",
            claims=len(claims),
            broken=[
                f"{x.measurement}; {x.subject}; {x.value}; {x.worst_case}"
                for x in _command.broken_claims(results)
            ],
            measured={f"{x.measurement}; {x.subject}": x.value for x in claims},
        )
