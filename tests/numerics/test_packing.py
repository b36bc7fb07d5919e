import itertools
import math

import jax
import numpy as np
import pytest

from dpmp.numerics import packing

_SHAPES = [(3,), (), (200, 100), (0, 4), (16_384,), (200, 100), (16_385,), (5, 5)]


def test_small_arrays_are_joined_and_come_apart_in_their_order():
    rng = np.random.default_rng(0)
    arrays = [np.float32(rng.normal(size=(2, n))) for n in (3, 700, 1, 0, 900, 5)]
    sizes = [x.shape[1] for x in arrays]
    kinds = ["a", "a", "b", "a", "a", "b"]
    groups = packing.groups_of(sizes, kinds, few=512)
    assert sorted(itertools.chain(*groups)) == list(range(6))
    assert [0, 3] in groups
    assert [2, 5] in groups
    parts = jax.jit(lambda xs: packing.split(packing.join(xs, groups), groups, sizes))(
        arrays
    )
    for part, array in zip(parts, arrays, strict=True):
        np.testing.assert_array_equal(part, array)


def test_hundreds_of_arrays_are_joined_and_come_apart():
    arrays = [np.full((2, i % 3), i, np.float32) for i in range(200)]
    sizes = [x.shape[1] for x in arrays]

    @jax.jit
    def join_and_split(arrays):
        groups = packing.groups_of(sizes, [0] * 200, few=512)
        joined = packing.join(arrays, groups)
        return joined, packing.split(joined, groups, sizes)

    (joined,), parts = join_and_split(arrays)
    np.testing.assert_array_equal(joined, np.concatenate(arrays, axis=1))
    for part, array in zip(parts, arrays, strict=True):
        np.testing.assert_array_equal(part, array)


@pytest.mark.parametrize("kinds", [[0] * 8, [0, 1] * 4])
def test_every_entry_is_drawn_once(kinds):
    places = set()
    for number, draw in enumerate(packing.draws(_SHAPES, kinds)):
        assert len({kinds[i] for i in draw.ranges}) == 1
        rows = math.prod(draw.shape[1:])
        for i, (start, stop) in draw.ranges.items():
            whole = len(draw.ranges) == 1 and draw.shape == _SHAPES[i]
            size = math.prod(draw.shape) if whole else (stop - start) * rows
            assert size == math.prod(_SHAPES[i])
            taken = {(number, start + k) for k in range(stop - start)}
            assert not places & taken
            assert stop <= draw.shape[0] or whole
            places |= taken
    drawn = [i for draw in packing.draws(_SHAPES, kinds) for i in draw.ranges]
    assert sorted(drawn) == list(range(8))


def test_what_is_drawn_at_once_is_limited():
    sizes = [
        math.prod(draw.shape)
        for draw in packing.draws([(1024, 1024)] * 9 + [(3000, 3000)], [0] * 10)
    ]
    assert sorted(sizes) == [2**20, 2**22, 2**22, 9_000_000]
