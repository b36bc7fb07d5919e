"""Programs that show something on the host are paid for before they run."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import checkify
from small_runs import (
    FailureError,
    checkpoints,
    fit,
    loss_fn,
    new_trainer,
    num_of_state,
    num_paid,
    ranges,
)


class Host:
    """Is called from a step. It notes what is paid for then, and may fail."""

    def begin(self, directory, failing=None):
        self.directory, self.failing, self.paid = directory, failing, []

    def __call__(self, x):
        self.paid.append(num_paid(self.directory))
        if len(self.paid) == self.failing:
            raise FailureError
        return x


def in_loss(call, host):
    def loss(params, batch):
        value = loss_fn(params, batch)
        shown = call(host, jax.lax.stop_gradient(value))
        return value if shown is None else value + 0 * shown

    return {"loss_fn": loss}


def call_host(host, x):
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.pure_callback(host, scalar, x, vmap_method="sequential")


def in_reference(host):
    seen = jax.new_ref(jnp.zeros(()))

    def update(updates, state, params=None):
        seen[...] = jax.tree.leaves(updates)[0].sum()  # anyone may read it now
        return updates, state

    write = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    return {"optimizer": optax.chain(write, optax.sgd(0.1))}


PROGRAMS = {
    "reference": in_reference,
    "pure callback": functools.partial(in_loss, call_host),
    "debug callback": functools.partial(in_loss, jax.debug.callback),
}


@functools.cache
def program(name):
    host = Host()
    return new_trainer(**PROGRAMS[name](host)), host


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_block_is_paid_for_before_a_call_on_the_host(tmp_path, name):
    trainer, host = program(name)
    host.begin(tmp_path)
    state = fit(trainer, tmp_path)
    jax.effects_barrier()
    assert {*host.paid} == (set() if name == "reference" else {3, 6, 7})
    assert host.paid == sorted(host.paid)
    assert num_paid(tmp_path) == num_of_state(state) == 7
    events = [x for x in ranges(tmp_path) if x[0] == "charged"]
    assert events == [("charged", 0, 3), ("charged", 3, 6), ("charged", 6, 7)]


def test_an_exception_of_a_loss_on_the_host_pays_for_its_block(tmp_path):
    trainer, host = program("pure callback")
    host.begin(tmp_path, failing=5 * 12)  # somewhere in the fourth step or later
    with pytest.raises(jax.errors.JaxRuntimeError, match="callback"):
        fit(trainer, tmp_path)
    assert num_paid(tmp_path) in (3, 6, 7)
    assert num_paid(tmp_path) == host.paid[-1]
    saved = checkpoints(tmp_path)
    assert (saved[-1] if saved else 0) <= num_paid(tmp_path)


def check_with_equinox(_, x):
    import equinox as eqx

    return eqx.error_if(x, x > -1, "the check failed")


def check_with_checkify(_, x):
    checkify.check(x < -1, "the check failed")


@pytest.mark.parametrize(
    ("check", "least"), [(check_with_equinox, 3), (check_with_checkify, 1)]
)
def test_a_check_in_a_loss_that_fails_is_paid_for(tmp_path, check, least):
    trainer = new_trainer(**in_loss(check, None))
    flag = "jax_experimental_unsafe_xla_runtime_errors"
    jax.config.update(flag, True)
    try:
        with pytest.raises(Exception, match="check failed"):
            jax.block_until_ready(fit(trainer, tmp_path))
    finally:
        jax.config.update(flag, False)
    assert num_paid(tmp_path) >= least
    assert all(x <= num_paid(tmp_path) for x in checkpoints(tmp_path))


def test_a_check_that_cannot_be_compiled_costs_one_step(tmp_path):
    """Whether the loss can be traced might depend on the first batch."""
    trainer = new_trainer(**in_loss(check_with_checkify, None))
    with pytest.raises(ValueError, match="checkify"):
        fit(trainer, tmp_path)
    assert num_paid(tmp_path) == num_of_state(trainer.last_state) == 1
    assert int(trainer.last_state.step) == 0
