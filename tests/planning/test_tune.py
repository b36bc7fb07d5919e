import dataclasses

import dp_accounting
import jax
import numpy as np
import pytest
from small_runs import MECHANISM, new_trainer

from dpmp.planning import tune

SHAPES = (
    {"w": jax.ShapeDtypeStruct((3,), np.float32)},
    {name: jax.ShapeDtypeStruct(x, np.float32) for name, x in (("x", (3,)), ("y", ()))},
)


@pytest.mark.slow
def test_each_engine_and_size_is_timed_on_zeros():
    tuning = tune(new_trainer(), *SHAPES, sizes=(None, 8, 10_000), rounds=1)
    found = {
        (x.mechanism.method, x.mechanism.microbatch_size) for x in tuning.candidates
    }
    methods = ("book_keeping", "per_example")
    assert found == {(method, size) for method in methods for size in (None, 8)}
    seconds = [x.seconds for x in tuning.candidates]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert all(x.mechanism._sums.is_proved for x in tuning.candidates)
    fields = ("method", "arithmetic", "microbatch_size")
    undone = {name: getattr(MECHANISM, name) for name in fields}
    assert dataclasses.replace(tuning.best, **undone) == MECHANISM


def test_only_engines_with_a_proof_are_candidates():
    protected = new_trainer(
        sampling_prob=0.25,
        truncated_batch_size=32,
        neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    (only,) = tune(protected, *SHAPES, sizes=(8,), rounds=1).candidates
    assert only.mechanism.method == "per_example"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": ()}, "there must be a size to measure"),
        ({"sizes": (0,)}, "size must be an integer"),
        ({"rounds": 0}, "rounds must be"),
        ({"trainer": MECHANISM}, "trainer must be a DPTrainer"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    options = {"trainer": new_trainer(), **options}
    with pytest.raises(ValueError, match=message):
        tune(options.pop("trainer"), *SHAPES, **options)
