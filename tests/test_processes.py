"""What the processes of a job agree on."""

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from dpmp import _processes
from dpmp._processes import are_equal, broadcast, on_first, random_id


def test_one_process_acts_for_itself():
    assert on_first(lambda: "done") == "done"
    assert are_equal(b"one", b"two")
    np.testing.assert_array_equal(broadcast(np.arange(3)), np.arange(3))
    with pytest.raises(KeyError):
        on_first(lambda: {}["missing"])


def test_ids_are_random_and_have_32_digits():
    ids = {random_id() for _ in range(20)}
    assert len(ids) == 20
    assert {len(bytes.fromhex(x)) for x in ids} == {16}


@pytest.fixture(autouse=True)
def _devices_are_not_counted(monkeypatch):
    monkeypatch.setattr(_processes, "_check_devices", lambda: None)


@pytest.fixture
def as_process(monkeypatch):
    """Makes this the first or the second of two processes; the first has said a value.

    It returns the values that the first one broadcasts.
    """
    said = []

    def become(index, value=None):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: index)

        def broadcast_one_to_all(mine):
            said.append(mine if index == 0 else value)
            return said[-1]

        monkeypatch.setattr(
            multihost_utils, "broadcast_one_to_all", broadcast_one_to_all
        )
        return said

    return become


def test_the_first_of_several_processes_acts(as_process):
    said = as_process(0)
    assert on_first(lambda: "done") == "done"
    with pytest.raises(KeyError):
        on_first(lambda: {}["missing"])
    assert said == [0, 1]  # the others do not wait for ever


def test_the_others_learn_whether_it_has_failed(as_process):
    def action():
        raise AssertionError

    as_process(1, np.int32(0))
    assert on_first(action) is None
    as_process(1, np.int32(1))
    with pytest.raises(RuntimeError, match=r"first process must be able.*process=1"):
        on_first(action)


def test_all_processes_have_the_random_id_of_the_first(as_process):
    as_process(1, np.frombuffer(b"0123456789abcdef", np.uint32))
    assert random_id() == b"0123456789abcdef".hex()


def test_facts_are_compared_one_by_one(monkeypatch):
    """The second of two processes has the same facts, or others."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    gathered = []

    def gather(words):
        gathered.append(words)
        return np.stack(gathered[-2:])

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)

    def agree(one, two):
        _processes.are_equal(*one)
        return are_equal(*two)

    assert agree([b"a", b"bc"], [b"a", b"bc"])
    assert not agree([b"a", b"bc"], [b"ab", b"c"])
    assert not agree([b"a", b"bc"], [b"bc", b"a"])


def test_processes_need_equally_many_devices(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(jax, "process_count", lambda: 2)  # the other one has none
    with pytest.raises(ValueError, match=r"same number of devices.*\[8, 0\]"):
        random_id()
