"""Makes adapters, and adds their changes to a function or to the arrays of a model."""

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _meshes, _validate
from dpmp._arrays import as_device_dtypes
from dpmp._random import check_model_key
from dpmp._typing import PyTree
from dpmp.lora._adapters import (
    Adapters,
    Axes,
    Factors,
    check_fits,
    factor_axes,
    factor_shapes,
    last_two,
    sizes,
)
from dpmp.lora._fingerprint import fingerprint
from dpmp.lora._names import by_path, map_by_path, select
from dpmp.lora._quantised import dequantised
from dpmp.lora._rewriting import run_with_targets
from dpmp.lora._views import Target


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
        the square root of the number of inputs (Hu et al., section 4.1).
      params: the parameters of the model, a tree of arrays. Arrays may be quantised
        (QLoRA): by `qwix.quantize`, or as a node of the tree with `dequantize()`, and
        with the `shape` and `dtype` of its result.
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
    """
    check_model_key("key", key)
    rank = _validate.positive_integer(rank=rank, fix="Use 4 to 64.")
    alpha = _validate.positive(alpha=rank if alpha is None else alpha)
    arrays = by_path(params)
    arrays = {path: arrays[path] for path in select(params, targets=targets)}
    for path, x in arrays.items():
        if not hasattr(x, "shape") or not hasattr(x.dtype, "name"):
            _validate.fail(
                "every target of LoRA must be an array. Pass the values of variables: "
                "`variable.value` in Keras, which must run on jax (KERAS_BACKEND=jax).",
                target=path,
                type=type(x).__name__,
            )
        if (
            len(x.shape) < 2
            or 0 in x.shape
            or not jnp.issubdtype(x.dtype, jnp.floating)
        ):
            _validate.fail(
                "every target of LoRA must be a matrix of floats, or a stack of them. "
                'Make `targets` more narrow, for example "query/kernel" for "query".',
                target=path,
                shape=x.shape,
                dtype=x.dtype.name,
            )
    axes = {path: last_two(len(x.shape)) for path, x in arrays.items()}
    _validate.instance(Sequence, "Pass a tuple: (batch,).", example_args=example_args)
    if fun is not None and not example_args:
        _validate.fail(
            "example_args must be the arguments of fun after the parameters. Pass a "
            "tuple: (batch,).",
            example_args=example_args,
        )
    if fun is not None:
        axes = _read_axes(fun, (params, *as_device_dtypes(example_args)), axes)
    factors = {
        path: _first_factors(
            jax.random.fold_in(key, zlib.crc32(path.encode())),
            x.shape,
            axes[path],
            rank,
        )
        for path, x in arrays.items()
    }
    return Adapters(
        factors=factors,
        axes=tuple(axes.items()),
        rank=rank,
        alpha=alpha,
        base=fingerprint(params),
    )


def _read_axes(
    fun: Callable[..., Any], args: Sequence[PyTree], like: dict[str, Axes]
) -> dict[str, Axes]:
    """Reads the roles of the axes of each target from a program."""
    targets = [Target(path) for path in like]
    jax.eval_shape(lambda *args: run_with_targets(fun, args, targets), *args)
    axes = {}
    for target in targets:
        parts: dict[str, list[int]] = {role: [] for role in Axes._fields}
        for axis in range(sum(map(len, like[target.path]))):
            parts[target.roles.get(axis, "stack")].append(axis)
        axes[target.path] = Axes(*map(tuple, parts.values()))
    return axes


def _first_factors(
    key: jax.Array, shape: Sequence[int], axes: Axes, rank: int
) -> Factors:
    shape_a, shape_b = factor_shapes(shape, axes, rank)
    _, num_inputs, _ = sizes(shape, axes)
    most = 1 / math.sqrt(num_inputs)
    a = jax.random.uniform(key, shape_a, jnp.float32, -most, most)
    return Factors(a, jnp.zeros(shape_b, jnp.float32))


def apply(fun: Callable[..., Any], params: PyTree) -> Callable[..., Any]:
    """Turns `fun(params, ...)` into `adapted(adapters, ...)`, with `params` frozen.

    Every product x W with a target W becomes x W + scale (x A) B, in the program of the
    function: within loops over layers, under `jax.checkpoint`, and whatever library the
    model was written in. W + scale A B and its gradient are never materialized.

    >>> def loss(params, x):
    ...     return jnp.sum((x @ params["kernel"]) ** 2)
    >>> params = {"kernel": jnp.ones((3, 2))}
    >>> adapters = init(jax.random.key(0), params, rank=1, targets="kernel")
    >>> adapted = apply(loss, params)
    >>> print(adapted(adapters, jnp.ones(3)))
    18.0

    `DPTrainer` makes the frozen arrays an argument of its compiled step. In a loop of
    your own, pass `params` to the function under `jax.jit`, and call `apply` in it.
    Otherwise the arrays become constants of the program.

    Args:
      fun: a function whose first argument is the tree of parameters.
      params: the parameters. They are not cast, so that a base model in bfloat16 stays
        in bfloat16. Factors are cast to the dtype of the inputs in each product.
        Quantised arrays are dequantised where the function uses them, in a loop over
        layers one layer at a time. The function gets arrays in the dtype of the scales.

    Returns:
      A function with adapters, made by `init` for these parameters, as its first
      argument. Its other arguments are those of `fun`. It can be differentiated, mapped
      and compiled, and works with both engines of `clipped_grad`.

    Raises:
      ValueError: if `fun` is not a function. When the result is called: if the adapters
        belong to other parameters, or if `fun` does not multiply with a target.
    """
    _validate.function(fun=fun)
    base = fingerprint(params)
    # A loop over explicit axes could not be traced for other ones later.
    params = jax.tree.map(_meshes.automatic, params)

    @functools.wraps(fun)
    def adapted(adapters: Adapters, *args: Any, **kwargs: Any) -> Any:
        check_fits(adapters, params, base)
        targets = [Target(path, adapters.scale) for path, _ in adapters.axes]
        with_kwargs = functools.partial(fun, **kwargs)
        return run_with_targets(
            with_kwargs, (params, *as_device_dtypes(args)), targets, adapters
        )

    return adapted


def merge(params: PyTree, adapters: Adapters, *, dtype: Any = None) -> PyTree:
    """Adds the changes to the arrays, and returns a model that needs no adapters.

    The changes are computed in float32. Quantised arrays are dequantised.

    Args:
      params: the frozen parameters.
      adapters: the adapters after training.
      dtype: the dtype of the real arrays of the result; None for those of the
        parameters, and of the scales of quantised arrays. Rounding to bfloat16 is often
        as large as the change, so that float32 is better if you have the memory.

    Raises:
      ValueError: if the adapters belong to other parameters. Parameters into which the
        adapters were merged before are other parameters. Also if `dtype` is not a
        floating type.
    """
    check_fits(adapters, params, fingerprint(params))
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        _validate.fail(
            "dtype must be None or a floating type. Use jnp.float32.", dtype=dtype
        )
    axes = dict(adapters.axes)

    def merged(path: str, x: Any) -> Any:
        x = dequantised(x)
        if dtype is not None and jnp.issubdtype(jnp.result_type(x), jnp.floating):
            x = jnp.asarray(x, dtype)
        if path not in axes:
            return x
        a, b = (factor.astype(jnp.float32) for factor in adapters.factors[path])
        names_a, names_b = factor_axes(axes[path])
        change = jnp.einsum(
            a, names_a, b, names_b, tuple(range(x.ndim)), precision="highest"
        )
        return (x.astype(jnp.float32) + adapters.scale * change).astype(x.dtype)

    return map_by_path(merged, params)
