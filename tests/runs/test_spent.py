import dataclasses
import itertools

import dp_accounting
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledgers import DELTA, MECHANISM, steps

from dpmp import DPSGD
from dpmp.runs import Segment, Spent

WIDER = dataclasses.replace(MECHANISM, noise_multiplier=30.0)


@st.composite
def segments(draw):
    start = draw(st.integers(0, 20))
    return steps(
        start,
        start + draw(st.integers(1, 10)),
        run=draw(st.sampled_from("ab")),
        planned=draw(st.integers(1, 40)),
        mechanism=draw(st.sampled_from([MECHANISM, WIDER])),
    )


def sets():
    return st.lists(segments(), max_size=5).map(Spent.of)


def every_step(spent):
    """The steps one by one, with what distinguishes them."""
    return {
        (x.id, x.cost, step) for x in spent.segments for step in range(x.start, x.stop)
    }


def planned(spent):
    return {(x.id, x.cost): x.planned for x in spent.segments}


@given(sets(), sets())
def test_a_union_has_the_steps_of_both_once_and_the_longest_plan(one, two):
    both = one | two
    assert every_step(both) == every_step(one) | every_step(two)
    lengths = [x.stop - x.start for x in both.segments]
    assert sum(lengths) == len(every_step(both))
    for cost in (MECHANISM.step_cost, WIDER.step_cost):
        number = sum(cost == x for _, x, _ in every_step(both))
        assert both.count(cost) == number
    for step in range(30):
        assert both.times_made(step) == sum(step == x for *_, x in every_step(both))
    plans = [planned(one), planned(two)]
    assert planned(both) == {
        key: max(plan.get(key, 0) for plan in plans) for key in plans[0] | plans[1]
    }


@given(sets(), sets(), sets())
def test_unions_can_be_made_in_any_order_and_again(one, two, three):
    assert one | one == one | Spent() == one
    assert {*(one | two).segments} == {*(two | one).segments}
    assert (one | two) | three == one | (two | three)


@given(sets(), sets())
def test_segments_of_a_union_do_not_touch_and_costs_stay_in_order(one, two):
    both = one | two
    for x, y in itertools.pairwise(both.segments):
        assert (x.id, x.cost) != (y.id, y.cost) or x.stop < y.start
    costs = [x.cost for x in (*one.segments, *two.segments)]
    assert [*dict.fromkeys(x.cost for x in both.segments)] == [*dict.fromkeys(costs)]


class TestGuarantee:
    def test_steps_of_one_cost_have_the_epsilon_of_the_mechanism(self):
        spent = Spent((steps(0, 30), steps(30, 50), steps(40, 50, run="b")))
        expected = MECHANISM.guarantee(60)
        assert spent.guarantee(delta=DELTA) == expected
        assert spent.guarantee_if_planned(delta=DELTA) == expected
        assert Spent().guarantee(delta=DELTA).epsilon == 0
        assert Spent().guarantee_if_planned(delta=DELTA).epsilon == 0


class TestArrays:
    @given(sets())
    def test_a_set_comes_back_from_its_array(self, spent):
        array = spent.to_array()
        assert (array.ndim, array.dtype) == (1, np.uint8)
        for copy in (array, jnp.array(array), array.astype(np.int32)):
            assert Spent.from_array(copy, num_examples=1000) == spent

    def test_every_field_comes_back(self):
        mechanism = DPSGD(
            num_examples=2**40 + 1,
            expected_batch_size=100,
            iterations=1,
            l2_clip_norm=1.0,
            noise_multiplier=float(np.nextafter(0.1, 1)),
            sampling_prob=1 / 3e9,
            truncated_batch_size=2**35,
        )
        cost = dataclasses.replace(
            mechanism.step_cost,
            is_clipped=False,
            neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE,
        )
        segment = Segment(
            id="0123456789abcdef" * 2, start=2**33, stop=2**34, planned=2**35, cost=cost
        )
        spent = Spent((segment,))
        assert Spent.from_array(spent.to_array(), num_examples=5) == spent

    def test_a_protected_number_of_examples_is_left_out(self):
        relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        public = {"sampling_prob": 0.1, "truncated_batch_size": 40}
        arrays = []
        for number in (90, 91):
            mechanism = dataclasses.replace(
                MECHANISM, num_examples=number, neighboring_relation=relation, **public
            )
            spent = Spent((steps(0, 9, mechanism=mechanism),))
            arrays.append(spent.to_array())
            assert Spent.from_array(arrays[-1], num_examples=number) == spent
        np.testing.assert_array_equal(*arrays)

    def test_other_arrays_are_refused(self):
        array = Spent((steps(0, 9),)).to_array()
        changed = bytes(array).replace(b"REPLACE", b"UNKNOWN")
        others = [None, 3, (), np.zeros((0, 22)), np.zeros((1, 22), np.uint32)]
        others += [array[1:], array[:-1], [[]], b"[]", b"{}"]
        others += [np.frombuffer(changed, np.uint8)]
        for other in others:
            with pytest.raises(ValueError, match=r"must be what trainer.init.*Keep it"):
                Spent.from_array(other, num_examples=1000)
