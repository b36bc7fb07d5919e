import pytest

from dpmp.training._tickets import Ticket


@pytest.fixture
def taken(monkeypatch):
    """The words of all keys that are taken, by step and use."""
    found, take = [], Ticket.take

    def record(self, *uses):
        keys = take(self, *uses)
        for use, key in zip(uses, keys, strict=True):
            found.append((self.step, use, tuple(map(int, key))))
        return keys

    monkeypatch.setattr(Ticket, "take", record)
    return found
