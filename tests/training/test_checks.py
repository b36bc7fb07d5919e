"""What a trainer refuses, it refuses by name, and without showing a value."""

import functools
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import SIZE, new_trainer
from small_runs import fit as fit_small

import dpmp

SECRET = 12345.678
DATA = {"x": np.full((SIZE, 3), SECRET, np.float32), "y": np.ones(SIZE, np.float32)}


def loss_fn(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def make(loss_fn=loss_fn, **fields):
    return new_trainer(loss_fn=loss_fn, **fields)


def fit(data=DATA, params=None, **fields):
    trainer = make(**fields)
    state = trainer.init(jnp.zeros(3) if params is None else params)
    return fit_small(trainer, state=state, data=data, stop_at=1)


def test_losses_whose_arguments_are_unknown_are_taken():
    make(loss_fn=functools.partial(loss_fn))
    make(loss_fn=lambda *args: loss_fn(*args), uses_prng_key=True)
    make(loss_fn=jax.jit(loss_fn))
    policy = make(policy="mixed_bfloat16").policy
    assert policy == dpmp.Policy.from_name("mixed_bfloat16")


class Variable:
    """As those of Keras: no array, but with one as its value."""

    def __init__(self, value):
        self.value = value


def test_variables_become_their_values():
    state = make().init(Variable(jnp.zeros(3)))
    assert isinstance(state.params, jax.Array)


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (lambda w, b: (loss_fn(w, b), 1.0), "tuple"),
        (lambda w, b: None, "NoneType"),
        (lambda w, b: b["x"] @ w, r"float32\[1\]"),
        (lambda w, b: (b["x"] @ w > 0).sum(), r"int32\[\]"),
    ],
)
def test_a_loss_must_be_a_scalar(loss, given):
    with pytest.raises(ValueError, match=f"the loss of one example.*got loss='{given}"):
        fit(loss_fn=loss)


def test_errors_in_the_loss_say_what_it_was_given():
    with pytest.raises(KeyError, match=r"batch\['x'\]: float32\[1, 3\]") as caught:
        fit(data={"x": DATA["x"]})
    assert "12345" not in "".join(traceback.format_exception_only(caught.value))
    with pytest.raises(TypeError, match="Parameters and float inputs are bfloat16"):
        fit(params=jnp.zeros(4), policy="mixed_bfloat16")


def test_errors_of_the_optimizer_say_what_it_was_given():
    with pytest.raises(AttributeError, match=r"in optimizer.*optax\.lookahead"):
        fit(optimizer=optax.lookahead(optax.sgd(0.1), 5, 0.5))


def test_the_default_of_an_argument_is_not_shown():
    def loss(w, batch, more, data=SECRET):
        return loss_fn(w, batch)

    with pytest.raises(ValueError, match=r"got loss_fn='\(w, batch, more, data\)'"):
        make(loss_fn=loss)
