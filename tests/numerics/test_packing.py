import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpmp.numerics import packing

_SHAPES = [(3,), (), (200, 100), (0, 4), (16_384,), (200, 100), (16_385,), (5, 5)]


def test_small_arrays_are_joined_and_come_apart_in_their_order():
    rng = np.random.default_rng(0)
    # More arrays than are concatenated at once.
    sizes = [3, 700, 1, 0, 900, 5] * 60
    kinds = ["c", "a", "b", "a", "a", "b"] * 60
    arrays = [np.float32(rng.normal(size=(2, n))) for n in sizes]
    groups = packing.groups_of(sizes, kinds, few=512)
    assert sorted(itertools.chain(*groups)) == list(range(360))
    assert len(groups) == 3 + 2 * 60

    @jax.jit
    def join_and_split(arrays):
        return packing.split(packing.join(arrays, groups), groups, sizes)

    for part, array in zip(join_and_split(arrays), arrays, strict=True):
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


def test_parts_of_a_draw_are_equal_functions_for_the_compiler():
    (draw,) = packing.draws([(3,)] * 4, [0] * 4)

    @jax.jit
    def divided(step):
        return list(draw.divided(lambda: jnp.arange(12) + step, step).values())

    np.testing.assert_array_equal(np.stack(divided(5)), 5 + np.arange(12).reshape(4, 3))
    # A slice at a known place would be a function of its own.
    lines = jax.jit(divided).lower(5).compile().as_text().splitlines()
    places = {tuple(re.findall(r"slice=\{[^}]*\}", x)) for x in lines if " slice(" in x}
    assert len(places) <= 1, places
