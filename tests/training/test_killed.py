"""Processes that are killed at random instants, again and again, on a real disk.

Every kill is free: the ledger has what was released, and no key is used twice.
`test_directory.py` goes through the instants of one release.
"""

import collections
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import pytest
from environment import environment
from small_runs import DELTA, num_paid, ranges, records_of

from dpmp import runs
from dpmp.runs._ledger import Ledger

PROGRAM = pathlib.Path(__file__).with_name("killed_run.py")
STEPS = 60  # as in killed_run.py
KILLS = int(os.environ.get("DPMP_TEST_KILLS", "2"))  # in each of the slow tests


class Job:
    """One or two processes that run `killed_run.py`."""

    def __init__(self, folder, *, every, keep, devices, processes=1):
        self.directory, self.log = folder / "run", folder / "log"
        args = [str(x) for x in (self.directory, self.log, every, keep, devices)]
        self._command = [sys.executable, str(PROGRAM), *args]
        self.every, self.is_pair = every, processes == 2

    def start(self):
        more = [[]]
        if self.is_pair:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                address = f"localhost:{free.getsockname()[1]}"
            more = [[address, "0"], [address, "1"]]
        self.running = [
            subprocess.Popen(
                [*self._command, *x],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for x in more
        ]
        return self

    def wait(self):
        """Returns the exit codes and the errors."""
        errors = [x.communicate()[1] for x in self.running]
        return [x.returncode for x in self.running], "\n".join(errors)

    def has_ended(self):
        return any(x.poll() is not None for x in self.running)

    def kill(self, number):
        self.running[number].kill()
        time.sleep(0.2)
        for x in self.running:  # as a scheduler does
            x.kill()

    def lines(self, kind):
        return [x.split()[1:] for x in self.log.read_text().splitlines() if kind in x]


def steps_of(segment):
    return range(segment.start, segment.stop)


def check(job):
    """Checks a finished run that was killed any number of times."""
    directory = job.directory
    # It holds what was released: every step, once, at the cost that was planned.
    released = [x for x in ranges(directory) if x[0] == "released"]
    stops = [0, *(stop for _, _, stop in released)]
    assert [start for _, start, _ in released] == stops[:-1]
    assert stops[-1] == STEPS
    # Where two processes are killed one after the other, the second may have noticed
    # an error, and have paid for the steps that were begun. The first may have released
    # the same steps just before.
    records = records_of(directory)
    charged = [x.segment for x in records if x.event == "charged"]
    assert not charged or job.is_pair
    assert max((x.stop - x.start for x in charged), default=0) <= job.every
    number = len({(x.segment.id, i) for x in records for i in steps_of(x.segment)})
    assert STEPS <= number <= STEPS + sum(len(steps_of(x)) for x in charged)
    spent = Ledger(directory).spent
    (cost,) = {x.cost for x in spent.segments}
    assert spent.count(cost) == num_paid(directory) == number
    assert max(x.planned for x in spent.segments) == number
    together = spent.guarantee(delta=DELTA)
    assert together == spent.guarantee_if_planned(delta=DELTA)
    # No key is used twice, not even by a step that was lost. Processes share keys.
    uses = collections.Counter(
        (digest, process) for _, _, digest, process in job.lines("key")
    )
    assert {*uses.values()} == {1}
    # Nobody saw a state twice, nor two of one step.
    released = [int(step) for (step,) in job.lines("released")]
    assert sorted({*released}) == released
    steps = [x["step"] for x in runs.read_metrics(directory)]
    assert steps == list(range(1, STEPS + 1))
    assert not (directory / "pending").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "keep", "devices", "processes"), [(1, 3, 4, 1), (7, 3, 2, 2)]
)
def test_runs_go_on_after_kills_at_random_instants(
    tmp_path, every, keep, devices, processes
):
    instants, kills, number, seconds = random.Random(every + devices), 0, 0, 8.0
    while kills < KILLS or (tmp_path / str(number)).exists():
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        options = {"every": every, "keep": keep, "devices": devices}
        begin = time.monotonic()
        job = Job(folder, **options, processes=processes).start()
        if kills < KILLS:
            deadline = begin + instants.uniform(0.3, 1.0) * seconds
            while time.monotonic() < deadline and not job.has_ended():
                time.sleep(0.002)
            if not job.has_ended():
                job.kill(instants.randrange(processes))
                kills += 1
        codes, errors = job.wait()
        if codes == [0] * processes:
            seconds = time.monotonic() - begin
            check(job)
            number += 1
        else:
            assert -signal.SIGKILL in codes, errors
    assert number >= 1
