"""Views: values computed from parameters and constants only, with their history.

A program uses a parameter after casts, transpositions, slices and arithmetic. A view
remembers these operations. With them, the gradient of the view is sent back to the
parameter in float32, past every cast, and without running the model again.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import numpy as np

from dpmp.engines.book_keeping import _equations
from dpmp.engines.book_keeping._linalg import is_float, widen
from dpmp.programs import interpreter, primitives


@dataclass(frozen=True, eq=False)
class View:
    """A value that depends on parameters and constants only.

    Attributes:
      aval: its shape and dtype in the program.
      leaves: the parameters it depends on, as indices of roots.
      parents: the views it is computed from; a root has none.
      roots: the roots (parameters and constants) it is computed from, by their indices.
      compute: maps float32 values of the parents to the value of the view.
      rearrange: maps a NumPy array of the parameter's shape to a NumPy view of the
        entries that make up this view. It returns None if there is no such NumPy view,
        as where this view does more than to select and reorder entries and to add
        constants to them.
      is_broadcast: whether this view only repeats the entries of its only parent.
      is_traced: whether it is computed from a constant that jax traces, so that its
        value is unknown before the program runs.
    """

    aval: Any
    leaves: frozenset[int]
    parents: tuple["View", ...] = ()
    roots: frozenset[int] = frozenset()
    compute: Callable[..., Any] = lambda: None
    rearrange: Callable[[np.ndarray], np.ndarray | None] = lambda _: None
    is_broadcast: bool = False
    is_traced: bool = False


def make_root(index: int, aval: Any, *, is_param: bool) -> View:
    """Makes the view of a parameter, or of a constant of the program."""
    roots = frozenset([index])
    leaves = roots if is_param else frozenset[int]()
    return View(aval, leaves, roots=roots, rearrange=lambda array: array)


def make_constant(value: Any) -> View:
    """Makes the view of a number or array that is written in the program."""
    is_traced = isinstance(value, jax.core.Tracer)
    aval = jax.typeof(value)
    return View(aval, frozenset(), compute=lambda: value, is_traced=is_traced)


def apply(eqn: Any, operands: Sequence[View]) -> list[View]:
    """Makes the views that an equation computes from views."""
    # Constants and comparisons must have the same results as in the program.
    depends = any(view.leaves for view in operands)
    has_floats = any(is_float(output.aval.dtype) for output in eqn.outvars)
    bind = (
        _equations.bind_in_float32
        if depends and has_floats
        else _equations.bind_as_written
    )
    # A product with zero is the trace of a penalty that is switched off.
    is_zero = eqn.primitive.name == primitives.MUL and any(
        interpreter.is_literal(atom) and atom.val == 0 for atom in eqn.invars
    )
    is_stopped = is_zero or eqn.primitive.name == primitives.STOP_GRADIENT
    is_broadcast = eqn.primitive.name == primitives.BROADCAST and len(operands) == 1
    return [
        _derived(
            output.aval,
            operands,
            is_stopped=is_stopped,
            compute=lambda *values, i=i: bind(eqn, values)[i],
            rearrange=_rearrangement(eqn, i, operands),
            is_broadcast=is_broadcast,
        )
        for i, output in enumerate(eqn.outvars)
    ]


def _derived(
    aval: Any,
    parents: Sequence[View],
    *,
    is_stopped: bool = False,
    is_traced: bool = False,
    **fields: Any,
) -> View:
    """Makes a view of other views; with `is_stopped`, it has no gradient."""
    leaves = frozenset[int]().union(*(x.leaves for x in parents if not is_stopped))
    roots = frozenset[int]().union(*(x.roots for x in parents))
    is_traced = is_traced or any(x.is_traced for x in parents)
    return View(
        aval, leaves, tuple(parents), roots=roots, is_traced=is_traced, **fields
    )


def outside(
    view: View,
    outer: Sequence[View | None],
    mapped: Collection[int] = (),
    size: int = 1,
) -> View:
    """Turns a view in the body of a loop or call into a view of its operands.

    The roots of the view are operands, and `outer` has the views that these operands
    are outside of the body. The loop slices the operands in `mapped`, once for each
    iteration. A view that depends on a slice has a leading axis for all iterations.
    """
    used = sorted(view.roots)
    parents = [x for x in (outer[i] for i in used) if x is not None]
    in_axes = [0 if i in mapped else None for i in used]
    is_mapped = 0 in in_axes

    def compute(*slices: jax.Array) -> jax.Array:
        return evaluate([view], dict(zip(used, slices, strict=True)))[0]

    def rearrange(array: np.ndarray) -> np.ndarray | None:
        operand = parents[0].rearrange(array)
        if operand is None or operand.size == 0:
            return None
        one = view.rearrange(operand[0, ...] if is_mapped else operand)
        if one is None or not is_mapped:
            return one
        strides = (operand.strides[0], *one.strides)
        return np.lib.stride_tricks.as_strided(one, (size, *one.shape), strides)

    shape = (size, *view.aval.shape) if is_mapped else view.aval.shape
    return _derived(
        jax.ShapeDtypeStruct(shape, view.aval.dtype),
        parents,
        is_traced=view.is_traced,
        compute=jax.vmap(compute, in_axes, axis_size=size) if is_mapped else compute,
        rearrange=rearrange if len(used) == 1 else lambda _: None,
    )


def before_broadcasts(view: View) -> View:
    """The view whose entries a broadcast, or a chain of them, repeats."""
    return before_broadcasts(view.parents[0]) if view.is_broadcast else view


def sum_over_repeated(view: View, grad: jax.Array) -> jax.Array:
    """Turns the gradient of a view into that of the view before its broadcasts."""
    if not view.is_broadcast:
        return grad
    (parent,) = view.parents
    shape = jax.ShapeDtypeStruct(parent.aval.shape, grad.dtype)
    return sum_over_repeated(parent, jax.linear_transpose(view.compute, shape)(grad)[0])


def repeats_rows(eqn: Any, operands: Sequence[View]) -> bool:
    """Whether an equation takes rows of a view at indices that may occur repeatedly."""
    if eqn.primitive.name != primitives.GATHER:
        return False
    if operands[1].leaves or not operands[0].leaves:
        return False
    ids = _known_integers(operands[1])
    return ids is None or len(np.unique(ids)) < ids.size


def evaluate(views: Sequence[View], roots: Mapping[int, Any]) -> list[jax.Array]:
    """Computes the values of views, in float32 or wider, from those of the roots."""

    @functools.cache  # views are compared by identity
    def value(view: View) -> Any:
        if view.roots and not view.parents:
            (root,) = view.roots
            return widen(roots[root])
        return widen(view.compute(*map(value, view.parents)))

    return list(map(value, views))


def pull_back(
    views: Sequence[View],
    params: Sequence[int],
    roots: Mapping[int, Any],
    grads: list[jax.Array],
) -> list[jax.Array]:
    """Turns gradients of views into those of parameters, in float32 or wider."""

    def evaluated(*values: jax.Array) -> list[jax.Array]:
        return evaluate(views, {**roots, **dict(zip(params, values, strict=True))})

    outputs, vjp = jax.vjp(evaluated, *(widen(roots[i]) for i in params))
    return list(vjp([g.astype(x.dtype) for g, x in zip(grads, outputs, strict=True)]))


def _rearrangement(
    eqn: Any, output: int, operands: Sequence[View]
) -> Callable[[np.ndarray], np.ndarray | None]:
    rule = _REARRANGEMENTS.get(eqn.primitive.name)
    parents = [view for view in operands if view.leaves]
    if rule is None or len(parents) != 1:
        return lambda _: None

    def rearrange(array: np.ndarray) -> np.ndarray | None:
        entries = parents[0].rearrange(array)
        return None if entries is None else rule(entries, eqn, operands, output)

    return rearrange


def _shift(x: np.ndarray, eqn: Any, operands: Sequence[View], _: int) -> Any:
    """Adding a constant does not change the gradient."""
    is_negated = eqn.primitive.name == primitives.SUB and not operands[0].leaves
    same_shape = x.shape == eqn.outvars[0].aval.shape
    return x if same_shape and not is_negated else None


def _reshape(x: np.ndarray, eqn: Any, *_: Any) -> Any:
    """A broadcast that repeats nothing is a reshape too."""
    shape = eqn.outvars[0].aval.shape
    if eqn.params.get("dimensions") is not None or x.size != math.prod(shape):
        return None
    reshaped = x.reshape(shape)
    return reshaped if np.may_share_memory(reshaped, x) else None


def _slice(x: np.ndarray, eqn: Any, *_: Any) -> Any:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or [1] * x.ndim
    return x[(*map(slice, starts, limits, strides), ...)]


def _dynamic_slice(x: np.ndarray, eqn: Any, *_: Any) -> Any:
    """Slices at indices that are written in the program, and at no others."""
    atoms, sizes = eqn.invars[1:], eqn.params["slice_sizes"]
    if not all(map(interpreter.is_literal, atoms)):
        return None
    largest = np.subtract(x.shape, sizes)
    starts = np.clip([int(atom.val) for atom in atoms], 0, largest).astype(int)
    return x[(*map(slice, starts, starts + sizes), ...)]


def _gather(x: np.ndarray, eqn: Any, operands: Sequence[View], *_: Any) -> Any:
    """Takes rows at indices that the program fixes and that are evenly spaced."""
    axis, ids = _equations.row_axis(eqn), _known_integers(operands[1])
    if axis is None or ids is None:
        return None
    ids = ids[..., 0]
    flat = ids.ravel()
    steps = np.unique(np.diff(flat))
    step = int(steps[0]) if len(steps) else 1
    in_range = flat.size and flat.min() >= 0 and flat.max() < x.shape[axis]
    if len(steps) > 1 or step == 0 or not in_range:
        return None
    by_row = np.moveaxis(x, axis, 0)
    stop = int(flat[-1]) + (1 if step > 0 else -1)
    taken = by_row[int(flat[0]) : stop if stop >= 0 else None : step]
    taken = taken.reshape(*ids.shape, *by_row.shape[1:])
    others = range(ids.ndim, taken.ndim)
    offset_dims = eqn.params["dimension_numbers"].offset_dims
    taken = np.moveaxis(taken, others, offset_dims)
    return taken if np.may_share_memory(taken, x) else None


def _known_integers(view: View) -> np.ndarray | None:
    """The values of a view that the program itself determines, or None."""
    if view.roots or view.is_traced:
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(evaluate([view], {})[0]).astype(np.int64)


def _split(x: np.ndarray, eqn: Any, _: Any, output: int) -> Any:
    sizes, axis = eqn.params["sizes"], eqn.params["axis"]
    return np.split(x, np.cumsum(sizes)[:-1], axis)[output]


def _unstack(x: np.ndarray, eqn: Any, _: Any, output: int) -> Any:
    return np.moveaxis(x, eqn.params["axis"], 0)[output, ...]


# Each function maps the NumPy view of an operand to that of the result.
_REARRANGEMENTS: dict[str, Callable[..., Any]] = {
    primitives.ADD: _shift,
    primitives.SUB: _shift,
    primitives.CAST: lambda x, eqn, *_: (
        x if is_float(eqn.params["new_dtype"]) else None
    ),
    primitives.COPY: lambda x, *_: x,
    **dict.fromkeys(primitives.CUSTOM, lambda x, *_: x),
    primitives.TRANSPOSE: lambda x, eqn, *_: x.transpose(eqn.params["permutation"]),
    primitives.RESHAPE: _reshape,
    primitives.SQUEEZE: lambda x, eqn, *_: x.squeeze(tuple(eqn.params["dimensions"])),
    primitives.BROADCAST: _reshape,
    primitives.SLICE: _slice,
    primitives.DYNAMIC_SLICE: _dynamic_slice,
    primitives.GATHER: _gather,
    primitives.REV: lambda x, eqn, *_: np.flip(x, eqn.params["dimensions"]),
    primitives.SPLIT: _split,
    primitives.UNSTACK: _unstack,
}
