import itertools

import pytest

from dpmp import DPSGD
from dpmp.accounting import round_up
from dpmp.training import _spent
from dpmp.training._spent import SpentPrivacy


def make_mechanism(**fields):
    options = {"noise_multiplier": 1.37, "delta": 1e-5, **fields}
    return DPSGD(
        num_examples=100,
        expected_batch_size=10,
        iterations=6,
        l2_clip_norm=1.0,
        **options,
    )


def spent_by(mechanism):
    return SpentPrivacy(mechanism, 6, lambda step: mechanism.guarantee(step).epsilon)


def set_clock(monkeypatch, ticks):
    """Every look at the clock takes the next number of seconds."""
    times = itertools.accumulate(ticks)
    monkeypatch.setattr(_spent.time, "monotonic", lambda: next(times))


@pytest.mark.parametrize("noise_multiplier", [0.7, 1.37, 3.3])
def test_no_less_epsilon_is_quoted_than_is_spent(noise_multiplier, monkeypatch):
    set_clock(monkeypatch, itertools.chain([0, 1, 1e6], itertools.repeat(1)))
    mechanism = make_mechanism(noise_multiplier=noise_multiplier)
    _, spent, _, final = spent_by(mechanism).describe(3).split(" ")
    for quoted, step in ((spent, 3), (final, 6)):
        epsilon = mechanism.guarantee(step).epsilon
        assert epsilon <= float(quoted) < epsilon + 0.01


def test_epsilon_is_left_out_where_computing_it_takes_too_much_of_the_run(monkeypatch):
    # The final epsilon takes 1 s. Steps begin at once, and take 1 s each.
    set_clock(monkeypatch, itertools.chain([0, 1, 0], itertools.repeat(1)))
    spent = spent_by(make_mechanism())
    final = spent.describe(6).split(" of ")[1]
    for _ in range(150):
        assert spent.describe(3) == f"epsilon below {final}"
    # After 200 s, two times 1 s is one per cent.
    texts = {spent.describe(3) for _ in range(100)}
    assert any(text.endswith(f" of {final}") for text in texts)
    assert spent.describe(3).endswith(f" of {final}")


def test_the_last_epsilon_is_always_shown(monkeypatch):
    set_clock(monkeypatch, itertools.repeat(1))
    text = spent_by(make_mechanism()).describe(6)
    spent, final = text.removeprefix("epsilon ").split(" of ")
    assert spent == final


def test_the_end_has_epsilon_and_delta():
    mechanism = make_mechanism()
    text = spent_by(mechanism).describe_end()
    assert text == f"epsilon {round_up(mechanism.guarantee().epsilon)} at delta 1e-05"
    assert spent_by(mechanism.without_privacy()).describe_end() == "no privacy"


def test_a_number_is_known_only_where_it_is_shown(monkeypatch):
    set_clock(monkeypatch, itertools.repeat(1))
    spent = spent_by(make_mechanism())
    assert spent.epsilon(3) is None
    assert spent.epsilon(6) == make_mechanism().guarantee().epsilon


def test_without_noise_or_delta_there_is_no_epsilon():
    assert spent_by(make_mechanism().without_privacy()).describe(3) == ("no privacy")
    text = spent_by(make_mechanism(delta=None)).describe(3)
    assert text == "epsilon not shown without a delta"
