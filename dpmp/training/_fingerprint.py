"""The fingerprint of a run, which keeps another mechanism from continuing it.

The accounting assumes that all steps of a run were made by one mechanism. If another
mechanism continued the run, its epsilon would be wrong for the past steps. So a state
carries a hash of every public fact that this epsilon rests on: the fields of the
mechanism and of the policy, and the loss scale. The hashes depend on no key and on no
data.

Some fields may change between two steps, because the cost of past steps does not depend
on them:

- `delta`: epsilon can be computed for any delta at any time.
- `iterations`: this is the number of planned steps. Past steps cost the same with any
  plan.
- `microbatch_size`: this is how a batch is divided. It may change as long as batches
  are truncated at the same size.

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
import numpy as np

from dpmp import _validate
from dpmp._numbers import as_number
from dpmp._typing import PyTree

_MAY_CHANGE = {"delta", "iterations", "microbatch_size"}

_WORDS = 2  # each hash has two 32-bit words


def facts_of(mechanism: Any, policy: Any, loss_scale: Any) -> dict[str, str]:
    """The public facts that epsilon rests on, as unambiguous texts by name."""
    of_mechanism = _fields(mechanism)
    facts = {
        name: _describe(x)
        for name, x in of_mechanism.items()
        if name not in _MAY_CHANGE
    }
    facts["l2_clip_norm"] = _describe_tree(of_mechanism["l2_clip_norm"])
    # The values in use, whether they were given or chosen.
    facts["truncated_batch_size"] = _describe(mechanism.sampling.truncated_batch_size)
    facts["resolution"] = _describe(mechanism.resolution)
    for name, x in _fields(policy).items():
        facts[f"policy.{name}"] = _describe(x)
    facts["loss_scale"] = _describe(loss_scale)
    return dict(sorted(facts.items()))


def fingerprint(facts: Mapping[str, str]) -> np.ndarray:
    """The hashes of all facts, (facts, words) uint32."""
    return np.stack([_hash(f"{name}={text}") for name, text in facts.items()])


def check(given: Any, facts: Mapping[str, str]) -> None:
    """Raises ValueError, naming the changed facts, unless a state has these facts.

    Args:
      given: the fingerprint of the state.
      facts: the facts of the trainer that is to continue the run.
    """
    expected = fingerprint(facts)
    _validate.require(
        given is not None and np.shape(given) == expected.shape,
        "a state must carry the fingerprint of this version of dpmp",
        shape=None if given is None else np.shape(given),
        fix="Continue the run with the version that it comes from. Or start another "
        "run, which costs privacy of its own, with trainer.init.",
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
        fix="Build the trainer as it was. Or start another run, which costs privacy of "
        "its own, with trainer.init.",
    )


def _hash(text: str) -> np.ndarray:
    digest = hashlib.blake2b(text.encode(), digest_size=4 * _WORDS).digest()
    return np.frombuffer(digest, "<u4").astype(np.uint32)


def _fields(instance: Any) -> dict[str, Any]:
    return {
        field.name: getattr(instance, field.name)
        for field in dataclasses.fields(instance)
    }


def _describe_tree(tree: PyTree) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return ", ".join(
        f"{jax.tree_util.keystr(path)}: {_describe(x)}".removeprefix(": ")
        for path, x in leaves
    )


def _describe(x: Any) -> str:
    x = as_number(x)
    if isinstance(x, enum.Enum):
        return x.name
    if isinstance(x, np.dtype):
        return x.name
    if isinstance(x, tuple | list):
        return f"({', '.join(map(_describe, x))})"
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = [f"{name}={_describe(value)}" for name, value in _fields(x).items()]
        return f"{type(x).__name__}({', '.join(fields)})"
    if x is None or isinstance(x, bool | int | float | str):
        return repr(x)
    return _describe_function(x) if callable(x) else type(x).__qualname__


def _describe_function(fn: Callable[..., Any]) -> str:
    if isinstance(fn, functools.partial):
        fixed = {**dict(enumerate(fn.args)), **fn.keywords}
        return _call_of(_describe_function(fn.func), fixed)
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return _call_of(name, _closed_over(fn))


def _closed_over(fn: Any) -> dict[Any, Any]:
    """The numbers that a function closes over or has as defaults, by name."""
    cells = zip(
        getattr(getattr(fn, "__code__", None), "co_freevars", ()),
        getattr(fn, "__closure__", None) or (),
        strict=True,
    )
    values: dict[Any, Any] = {name: cell.cell_contents for name, cell in cells}
    values |= dict(enumerate(getattr(fn, "__defaults__", None) or ()))
    values |= getattr(fn, "__kwdefaults__", None) or {}
    return {
        name: x for name, x in values.items() if isinstance(as_number(x), int | float)
    }


def _call_of(name: str, arguments: Mapping[Any, Any]) -> str:
    return f"{name}({', '.join(f'{k}={_describe(x)}' for k, x in arguments.items())})"
