"""Makes adapters for the arrays of a model."""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.lora._adapters import Adapters, Axes, Factors, factor_shapes, last_two
from dpmp.lora._fingerprint import fingerprint
from dpmp.lora._names import by_path, select
from dpmp.lora._rewriting import run_with_targets
from dpmp.lora._views import Target
from dpmp.programs import interpreter


def init(
    key: jax.Array,
    params: PyTree,
    rank: int,
    targets: str | Sequence[str],
    *,
    alpha: float | None = None,
    fun: Callable[..., Any] | None = None,
    example_args: Sequence[Any] = (),
) -> Adapters:
    """Makes adapters whose changes are zero: a factor A is random, and B is zero.

    >>> params = {"query": {"kernel": jnp.ones((6, 4)), "bias": jnp.zeros(4)}}
    >>> adapters = init(jax.random.key(0), params, rank=2, targets="query/kernel")
    >>> jax.tree.map(jnp.shape, adapters.factors)
    {'query/kernel': Factors(a=(6, 2), b=(2, 4))}

    Args:
      key: a key for the random factors. The entries of A are uniform, up to one over
        the square root of the number of inputs.
      params: the parameters of the model, a tree of arrays.
      rank: the rank of the changes.
      targets: the arrays to adapt: a regular expression that matches a part of the name
        (`re.search`), or a list of names. The name of an array is its path with
        slashes, for example "layers/0/attention/query/kernel".
      alpha: the numerator of the scale `alpha / rank`; by default the rank.
      fun: the function that the adapters are for. With it, the roles of the axes of
        each target are read from the program `fun(params, *example_args)`, which is
        traced but not run. Without it, the last two axes of a target are inputs and
        outputs, and the other axes stack matrices. `apply` refuses adapters that do not
        fit the program.
      example_args: arguments of `fun` after the parameters, arrays or their shapes.

    Returns:
      The adapters, in float32.

    Raises:
      ValueError: if no array is selected, if a target is not a matrix or a stack of
        matrices, or if `fun` uses a target in anything but products.

    References:
      Hu et al., 2021: LoRA: low-rank adaptation of large language models, section 4.1,
      https://arxiv.org/abs/2106.09685.
    """
    rank = _validate.positive_integer(rank=rank, fix="Use 4 to 64.")
    alpha = _validate.positive(alpha=rank if alpha is None else alpha)
    arrays = by_path(params)
    paths = select(params, targets, targets=targets)
    for path in paths:
        _check_target(path, arrays[path])
    if fun is None:
        axes = {path: last_two(arrays[path].ndim) for path in paths}
    else:
        axes = _read_axes(fun, params, example_args, paths)
    factors = {
        path: _first_factors(key, path, arrays[path].shape, axes[path], rank)
        for path in paths
    }
    return Adapters(
        factors=factors,
        axes=tuple(axes.items()),
        rank=rank,
        alpha=alpha,
        base=fingerprint(params),
    )


def _check_target(path: str, array: Any) -> None:
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    _validate.require(
        array.ndim >= 2 and array.size > 0 and is_float,
        "every target of LoRA must be a matrix of floats, or a stack of them. Make "
        '`targets` more narrow, for example "query/kernel" for "query".',
        target=path,
        shape=array.shape,
        dtype=array.dtype.name,
    )


def _read_axes(
    fun: Callable[..., Any], params: PyTree, args: Sequence[Any], paths: Sequence[str]
) -> dict[str, Axes]:
    """Reads the roles of the axes of each target from a program."""
    targets = [Target(path) for path in paths]
    closed, _ = interpreter.trace(fun, params, *args)

    def watched(*leaves: Any) -> list[Any]:
        return run_with_targets(closed, leaves, params, targets)

    jax.eval_shape(watched, *closed.in_avals)
    arrays = by_path(params)
    return {x.path: _axes(x, arrays[x.path].ndim) for x in targets}


def _axes(target: Target, ndim: int) -> Axes:
    roles = [target.roles.get(axis, "stack") for axis in range(ndim)]
    return Axes(
        *(tuple(i for i, x in enumerate(roles) if x == role) for role in Axes._fields)
    )


def _first_factors(
    key: jax.Array, path: str, shape: Sequence[int], axes: Axes, rank: int
) -> Factors:
    key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    shape_a, shape_b = factor_shapes(shape, axes, rank)
    most = 1 / math.sqrt(math.prod(shape[i] for i in axes.input))
    a = jax.random.uniform(key, shape_a, jnp.float32, -most, most)
    return Factors(a, jnp.zeros(shape_b, jnp.float32))
