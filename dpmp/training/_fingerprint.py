"""The fingerprint of a run, which keeps another mechanism from continuing it.

The accounting assumes that all steps of a run were made by one mechanism. If another
mechanism continued the run, its epsilon would be wrong for the past steps. So a state
carries a hash of every public fact that this epsilon rests on: the fields of the
mechanism and of the policy, and the loss scale.

One fact may be protected: the number of examples, under ADD_OR_REMOVE_ONE. Anyone could
find it from its hash by trying numbers. So the hashes are encrypted: they are combined
(exclusive or) with random bits, which are made from the sampling key of the run. This
key is secret, and no other run has it. Without it, a fingerprint says nothing.

Some fields may change between two steps, because the cost of past steps does not depend
on them: `delta`, the number of planned `iterations`, and the `microbatch_size`, as long
as batches are truncated at the same size.

A loss scale that is a function is identified by its name and by the numbers that it
closes over, such as those of `dpmp.loss_scaling.by_loss`. Two functions that differ in
their code alone have the same fingerprint.
"""

import dataclasses
import enum
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._numbers import as_number
from dpmp._threefry import threefry4x32

_MAY_CHANGE = ("delta", "iterations", "microbatch_size")

_WORDS = 2  # each hash has two 32-bit words

_OR_START_ANEW = "Or start another run, which costs anew, with trainer.init."


def facts_of(mechanism: Any, policy: Any, loss_scale: Any) -> dict[str, str]:
    """The public facts that epsilon rests on, as unambiguous texts by name."""
    facts = _fields(mechanism)
    for name in _MAY_CHANGE:
        del facts[name]
    norms = jax.tree_util.tree_leaves_with_path(mechanism.l2_clip_norm)
    facts["l2_clip_norm"] = {jax.tree_util.keystr(path): x for path, x in norms}
    # The values in use, whether they were given or chosen.
    facts["truncated_batch_size"] = mechanism.sampling.truncated_batch_size
    facts["resolution"] = mechanism.resolution
    facts |= {f"policy.{name}": x for name, x in _fields(policy).items()}
    facts["loss_scale"] = loss_scale
    return {name: _describe(facts[name]) for name in sorted(facts)}


def fingerprint(facts: Mapping[str, str], sampling_key: Any) -> jax.Array:
    """The encrypted hashes of all facts, (facts, words) uint32.

    The sampling key is (4,) uint32. As an array of NumPy, it is quick.
    """
    hashes = _hashes(facts)
    return jnp.bitwise_xor(hashes, _pad(len(hashes), sampling_key))


def with_other_key(fingerprint: Any, old: Any, new: Any) -> jax.Array:
    """The same hashes, encrypted with another sampling key."""
    pads = (_pad(len(fingerprint), key) for key in (old, new))
    return functools.reduce(jnp.bitwise_xor, pads, fingerprint)


def _pad(size: int, sampling_key: Any) -> jax.Array:
    """Random bits, (size, words) uint32, for nothing else than these hashes."""
    number = np.arange(size, dtype=np.uint32)
    # Nothing else is encrypted by Threefry with this key.
    counter: list[Any] = [number, *[np.zeros_like(number)] * 3]
    bits = threefry4x32(list(sampling_key), counter)
    return jnp.stack(bits[:_WORDS], axis=1)


def _hashes(facts: Mapping[str, str]) -> np.ndarray:
    texts = [f"{name}={text}".encode() for name, text in facts.items()]
    hashes = [hashlib.blake2b(text, digest_size=4 * _WORDS).digest() for text in texts]
    return np.stack([np.frombuffer(x, "<u4").astype(np.uint32) for x in hashes])


def check(given: Any, facts: Mapping[str, str], sampling_key: Any) -> None:
    """Raises ValueError, naming the changed facts, unless a state has these facts."""
    expected = np.asarray(fingerprint(facts, np.asarray(sampling_key)))
    _validate.require(
        given is not None and np.shape(given) == expected.shape,
        "a state must carry the fingerprint of this version of dpmp",
        shape=None if given is None else np.shape(given),
        fix=f"Continue the run with the version that it comes from. {_OR_START_ANEW}",
    )
    is_same = np.all(np.asarray(given) == expected, axis=1)
    changed: dict[str, Any] = {
        name: facts[name] for name, same in zip(facts, is_same, strict=True) if not same
    }
    _validate.require(
        not changed,
        f"a run must continue with the mechanism, policy and loss scale of its past "
        f"steps, and these were made with another {' and '.join(changed)}",
        **changed,
        fix=f"Build the trainer as it was. {_OR_START_ANEW}",
    )


def _fields(instance: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(instance)]
    return {name: getattr(instance, name) for name in names}


def _describe(x: Any) -> str:
    if isinstance(x, enum.Enum | np.dtype):
        return x.name
    if dataclasses.is_dataclass(x):
        return _call_of(type(x).__name__, _fields(x))
    if isinstance(x, functools.partial):
        return _call_of(_describe(x.func), dict(enumerate(x.args)) | x.keywords)
    if callable(x):
        name = getattr(x, "__qualname__", type(x).__qualname__)
        return _call_of(name, _closed_over(x))
    return repr(as_number(x))


def _closed_over(fn: Callable[..., Any]) -> dict[Any, Any]:
    """The numbers that a function closes over or has as defaults, by name."""
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    cells = getattr(fn, "__closure__", None) or ()
    values = {name: x.cell_contents for name, x in zip(names, cells, strict=True)}
    values |= dict(enumerate(getattr(fn, "__defaults__", None) or ()))
    values |= getattr(fn, "__kwdefaults__", None) or {}
    return {k: x for k, x in values.items() if isinstance(as_number(x), int | float)}


def _call_of(name: str, arguments: Mapping[Any, Any]) -> str:
    return f"{name}({', '.join(f'{k}={_describe(x)}' for k, x in arguments.items())})"
