"""What the processes of a job agree on."""

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpmp.runs._processes import described_by_all


def test_one_process_says_its_own_text():
    assert described_by_all("mine") == "mine"


def test_a_change_of_any_process_changes_what_all_say(monkeypatch):
    """The second of two processes says another text, or the same as the first."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def with_second(second):
        def gather(words):
            return np.stack([words, second])

        monkeypatch.setattr(multihost_utils, "process_allgather", gather)
        return described_by_all("first")

    one, two = np.zeros(4, np.uint32), np.ones(4, np.uint32)
    assert with_second(one) == with_second(one)
    assert with_second(one) != with_second(two)
