"""That verdicts follow the error of a gradient, and the noise that it is added to."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp
from dpmp import compare_policies

_rng = np.random.default_rng(0)
_X = _rng.normal(size=(32, 8)).astype(np.float32)
_PARAMS = {
    "w": _rng.normal(size=(8, 4)).astype(np.float32),
    "b": (300 + _rng.normal(size=4)).astype(np.float32),
}
_MECHANISM = dpmp.DPSGD(
    num_examples=1000,
    expected_batch_size=100,
    iterations=50,
    l2_clip_norm=1.0,
    noise_multiplier=0.8,
    delta=1e-5,
    num_parameters=100,
)


def _plain(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["w"])))


def _offset(params, x):
    """In bfloat16, neighbours of 300 are 2 apart."""
    biases = (params["b"] - 300.0).astype(x.dtype)
    return jnp.mean(jnp.square(jnp.tanh(x @ params["w"] + biases)))


_GIVEN = {"mechanism": _MECHANISM, "optimizer": optax.sgd(0.1)}


def _verdict(loss, policy="mixed_bfloat16", x=_X, params=_PARAMS, **options):
    given = _GIVEN | options
    (verdict,) = compare_policies(loss, params, x, policies=[policy], **given)
    return verdict


@functools.cache
def _plain_verdict():
    return _verdict(_plain)


def _with(**fields):
    return dataclasses.replace(_MECHANISM, **fields)


def test_a_gradient_that_hardly_changes_is_safe():
    verdict = _plain_verdict()
    assert verdict.is_safe
    assert verdict.float32_paths == ()
    assert abs(verdict.kept - 1) < 0.03
    assert 0 < verdict.aside < 0.05
    assert "Is mixed_bfloat16 safe for this private run? yes, because" in str(verdict)


def test_paths_that_help_are_found_and_can_be_pasted():
    verdict = _verdict(_offset)
    assert verdict.is_safe
    assert "b" in verdict.float32_paths[0]
    policy = dpmp.Policy.from_name(
        "mixed_bfloat16", float32_paths=verdict.float32_paths
    )
    again = _verdict(_offset, policy)
    assert again.is_safe
    assert again.float32_paths == verdict.float32_paths
    assert abs(again.kept - verdict.kept) < 1e-6


def test_a_loss_under_autocast_is_compared_with_the_one_that_it_changes():
    fun = dpmp.autocast(_plain)
    assert _verdict(fun, "float32", reference=fun).aside < 1e-9  # with itself
    verdict = _verdict(fun, "float32")
    assert verdict.is_safe
    assert 1e-4 < verdict.aside < 0.05
    wrapper = functools.wraps(fun)(lambda *args: 2 * fun(*args))
    with pytest.raises(ValueError, match="the reference of a function that calls"):
        _verdict(wrapper, "float32")


def test_a_loss_that_leaves_the_range_is_not_safe():
    def tiny(params, x):
        return 1e-7 * _plain(params, x)

    given = {"policy": "mixed_float16", "mechanism": _with(l2_clip_norm=1e-9)}
    assert not _verdict(tiny, **given).is_safe
    assert _verdict(tiny, **given, loss_scale=2.0**14).is_safe


@pytest.mark.slow
def test_errors_that_begin_when_parameters_have_moved_are_found():
    """At first, the entries near 500 are numbers that bfloat16 has."""
    params = {"a": jnp.full((8, 4), 500.0), "b": jnp.full((8, 4), 500.0)}

    def loss(params, x):
        outputs = x @ (params["a"] - params["b"])
        return jnp.mean(jnp.square(jnp.tanh(outputs - 1)))

    still = _verdict(loss, params=params, optimizer=optax.set_to_zero())
    assert still.is_safe
    assert still.float32_paths == ()
    moved = _verdict(loss, params=params, optimizer=optax.sgd(0.5))
    assert moved.float32_paths or not moved.is_safe
    assert moved.steps == _MECHANISM.iterations


@pytest.mark.slow
def test_with_enough_noise_an_error_does_not_matter():
    verdict = _verdict(_offset, mechanism=_with(noise_multiplier=100.0))
    assert verdict.float32_paths == ()
    assert verdict.is_safe


def test_the_numbers_do_not_depend_on_the_size_of_the_batch():
    some, more = _plain_verdict(), _verdict(_plain, x=np.concatenate([_X, _X]))
    for name in ("kept", "aside", "error"):
        assert getattr(some, name) == pytest.approx(getattr(more, name), rel=1e-3)


_UNSET = {"sampling_prob": None, "truncated_batch_size": None}
_INVERSE = dpmp.strategies.banded_inverse(2, iterations=50, steps_per_epoch=10)


@pytest.mark.parametrize(
    "options",
    [
        {"l2_clip_norm": dpmp.AdaptiveClipNorm(initial=1.0)},
        # The batch may have any number of rows.
        {"num_examples": 20, "expected_batch_size": 2, **_UNSET},
        {"strategy": _INVERSE, **_UNSET},
    ],
    ids=["adaptive", "few examples", "strategy"],
)
def test_mechanisms_of_every_kind_have_a_verdict(options):
    assert _verdict(_plain, mechanism=_with(**options)).is_safe


def test_a_loss_that_clashes_with_some_paths_has_a_verdict():
    def strict(params, x):
        biases = jnp.broadcast_to(params["b"] - 300.0, (len(x), 4))
        outputs = jax.lax.add((x @ params["w"]).astype(x.dtype), biases)
        return jnp.mean(jnp.square(jnp.tanh(outputs)))

    assert not _verdict(strict).is_safe


def test_a_policy_that_the_loss_undoes_has_no_effect():
    def loss(params, x):
        w = params["w"].astype(jnp.float32)
        return jnp.mean(jnp.square(jnp.tanh(x.astype(jnp.float32) @ w)))

    verdict = _verdict(loss)
    assert not verdict.has_effect
    assert str(verdict).startswith("No effect: no product is")


def test_a_policy_is_not_saved_by_parameters_that_make_all_products_wider():
    """With this parameter in float32, no product would be in bfloat16 any more."""

    def loss(params, x):
        w = params["w"]
        x = x.astype(w.dtype)
        return jnp.mean(jnp.square(jnp.tanh(x @ w - x @ jnp.full_like(w, 300.0))))

    verdict = _verdict(loss, params={"w": 300.0 + _PARAMS["w"]})
    assert not verdict.is_safe
    assert verdict.has_effect
    assert verdict.float32_paths == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mechanism": _MECHANISM.without_privacy()}, "must be private"),
        ({"policies": "float8"}, "policies must be a list"),
        ({"policies": ["float9"]}, "policy"),
        ({"optimizer": optax.sgd}, "optimizer must be a GradientTransformation"),
        ({"x": np.full_like(_X, np.nan)}, r"finite and not zero; got norm=0\.0"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    given = {"x": _X, **_GIVEN, **options}
    with pytest.raises(ValueError, match=message):
        compare_policies(_plain, _PARAMS, given.pop("x"), **given)
