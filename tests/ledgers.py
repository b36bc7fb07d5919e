"""A mechanism whose epsilon takes little time, and ledgers of its steps."""

from dpmp import DPSGD
from dpmp.runs._ledger import Ledger, Record
from dpmp.runs._spent import Segment

DELTA = 1e-5
MECHANISM = DPSGD(
    num_examples=1000,
    expected_batch_size=1000,
    iterations=100,
    l2_clip_norm=1.0,
    noise_multiplier=20.0,
    delta=DELTA,
)


def steps(start, stop, *, run="a", planned=100, mechanism=MECHANISM):
    """Steps of a run, whose id repeats one hexadecimal digit."""
    cost = mechanism.step_cost
    return Segment(id=32 * run, start=start, stop=stop, planned=planned, cost=cost)


def charged(start, stop, **fields):
    mechanism = fields.get("mechanism", MECHANISM)
    segment = steps(start, stop, **fields)
    return Record(event="charged", segment=segment, delta=mechanism.delta)


def num_steps(directory):
    return sum(x.stop - x.start for x in Ledger(directory).spent.segments)


def file_of(directory):
    return directory / "ledger.jsonl"


def write_three(directory):
    ledger = Ledger(directory)
    for start in (0, 10, 20):
        ledger.append(charged(start, start + 10))
    return file_of(directory).read_bytes()
