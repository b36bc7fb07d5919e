import dataclasses

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp
from dpmp.planning import tune

MECHANISM = dpmp.DPSGD(
    num_examples=64,
    expected_batch_size=16,
    iterations=3,
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
)


def trainer_of(mechanism=MECHANISM, **options):
    return dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=lambda params, x: jnp.mean((x @ params) ** 2),
        optimizer=optax.sgd(0.1),
        policy="float32",
        **options,
    )


SHAPES = jax.ShapeDtypeStruct((5,), np.float32), jax.ShapeDtypeStruct((5,), np.float32)


@pytest.mark.slow
def test_each_engine_and_size_is_timed_on_zeros():
    tuning = tune(trainer_of(), *SHAPES, sizes=(None, 8, 10_000), rounds=1)
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
    assert str(tuning).count("by shapes") == 2


def test_only_engines_with_a_proof_are_candidates():
    protected = dpmp.DPSGD(
        num_examples=64,
        expected_batch_size=16,
        sampling_prob=0.25,
        truncated_batch_size=32,
        iterations=3,
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    (only,) = tune(trainer_of(protected), *SHAPES, sizes=(8,), rounds=1).candidates
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
    options = {"trainer": trainer_of(), **options}
    with pytest.raises(ValueError, match=message):
        tune(options.pop("trainer"), *SHAPES, **options)
