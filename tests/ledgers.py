"""A mechanism whose epsilon takes little time, and ledgers of its steps."""

from dpmp import DPSGD
from dpmp.runs import Ledger

DELTA = 1e-5
MECHANISM = DPSGD(
    num_examples=1000,
    expected_batch_size=1000,
    iterations=100,
    l2_clip_norm=1.0,
    noise_multiplier=20.0,
    delta=DELTA,
)


def entry_of(ledger, mechanism=MECHANISM, *, key="key", data="data"):
    return ledger.entry(mechanism, key_fingerprint=key, data_tag=data)


def epsilon_of(directory, delta=DELTA):
    return Ledger.open(directory).guarantee(delta=delta).epsilon


def num_steps(directory):
    return sum(run.num_steps for run in Ledger.open(directory).runs)


def file_of(directory):
    return directory / "ledger.jsonl"


def write_three(directory):
    entry = entry_of(Ledger.open(directory))
    for start in (0, 10, 20):
        entry.begin(start, start + 10)
    return file_of(directory).read_bytes()
