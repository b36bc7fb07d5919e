"""Analyses the program of a loss under a policy, and runs it if there is data.

The program is analysed as it would run: with parameters and inputs in the dtypes that
the policy gives them, and with its gradient.

References:
  Micikevicius et al.: Mixed precision training, 2018, section 3.
  Higham: The accuracy of floating point summation, 1993, for the bounds on sums.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _validate, loss_scaling
from dpmp._arrays import as_device_dtypes
from dpmp._typing import PyTree
from dpmp.engines import check_float_leaves, check_num_args
from dpmp.precision import Policy, reference_of
from dpmp.programs import source_lines
from dpmp.tools.precision_report._comparison import cast, compare, path_of
from dpmp.tools.precision_report._findings import ARGUMENT, Finding, select
from dpmp.tools.precision_report._places import find_places, is_narrow
from dpmp.tools.precision_report._shown import PrecisionReport


def precision_report(
    fun: Callable[..., Any],
    *args: Any,
    policy: str | Policy = "mixed_bfloat16",
    differentiate: bool = True,
    loss_scale: float = 1.0,
    reference: Callable[..., Any] | None = None,
) -> PrecisionReport:
    """Finds where a loss needs more than 16 bits, and says what to change.

    The function traces `fun` and its gradient, with all loops, branches and compiled
    functions. It lists the lines of the source on which 16-bit values are added up,
    exponentiated, divided by sums, or widened after bits were lost. Shapes are enough
    for that. If all arguments are arrays, it also computes loss and gradient, and
    compares them with float32.

    The comparison has no noise: use it with public or synthetic data only.

    >>> def loss(params, x):
    ...     return jnp.mean(jax.nn.softmax(x @ params["w"]) ** 2)
    >>> params = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    >>> x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> report = precision_report(loss, params, x)
    >>> print([finding.kind for finding in report.findings][:2])
    ['exponential', 'normalisation']

    Args:
      fun: the loss. Its own casts stay as they are.
      *args: the arguments of `fun`: parameters first, then data, in the shapes of
        training. For the loss of one example that is a batch of one. If a
        `jax.ShapeDtypeStruct` takes the place of an array, nothing is compared.
      policy: a policy or the name of one. It casts arguments as `DPTrainer` does. With
        a `rounded_share`, all products that have a format are rounded.
      differentiate: whether to analyse the gradient too, and compare with float32.
      loss_scale: the factor of the loss in the comparison, a power of two.
      reference: the function to compare with, in float32; `fun` by default, and `loss`
        for `fun=dpmp.autocast(loss)`, which is examined by `policy="float32"`.

    Returns:
      The report. `print` shows it. If jax refuses the loss under the policy, because
      two dtypes clash, the report has this one finding.

    Raises:
      ValueError: if `fun` is not a function or cannot be differentiated, if there is no
        such policy, or if the loss scale is not a power of two.
    """
    _validate.function(fun=fun)
    check_num_args(args, (0,))
    args = as_device_dtypes(args)
    loss_scaling.check(loss_scale)
    given, policy = policy, dataclasses.replace(Policy.parse(policy), rounded_share=1.0)
    name = given if isinstance(given, str) else policy.name
    shapes = jax.eval_shape(lambda *args: cast(args, policy), *args)
    # Rounding of products rewrites the program, which loses the lines of its source.
    unrounded = dataclasses.replace(policy, products=None)
    plain = unrounded.in_product_precision(fun)
    fun_name = getattr(fun, "__name__", type(fun).__name__)
    try:
        found = _find(plain, args, shapes, differentiate)
    except (TypeError, ValueError) as error:
        if isinstance(error, _validate.RefusedError) or not _is_traceable(fun, args):
            raise
        # The loss is valid without the policy, so the report must show the error.
        place, dtype = source_lines.error_line(error), policy.compute_dtype.name
        message = str(error) or type(error).__name__
        clash = Finding("clash", message, dtype, "{}:{}".format(*place))
        return PrecisionReport(fun_name, name, (clash,))
    comparison = None
    leaves = jax.tree.leaves(args)
    if differentiate and not any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        reference = reference_of(fun) if reference is None else reference
        comparison = compare(fun, reference, args, policy, float(loss_scale))
    return PrecisionReport(fun_name, name, found, comparison)


def _find(
    fun: Callable[..., Any],
    args: Sequence[PyTree],
    shapes: Sequence[PyTree],
    differentiate: bool,
) -> tuple[Finding, ...]:
    """Traces the loss and its gradient, and finds the lines that lose something."""
    if differentiate:
        check_float_leaves(shapes[0], "argument 0")
    program, output = jax.make_jaxpr(fun, return_shape=True)(*shapes)
    rounded = _rounded_arguments(args, shapes)
    loss = find_places(program.jaxpr, rounded)
    if not differentiate:
        return select(loss, [])
    is_scalar = isinstance(output, jax.ShapeDtypeStruct) and output.shape == ()
    if not is_scalar or not jnp.issubdtype(output.dtype, jnp.floating):
        _validate.fail(
            "fun must return a scalar float loss to be differentiated and compared. "
            "Reduce the output with jnp.mean, or use differentiate=False.",
            output=output,
        )
    program = jax.make_jaxpr(jax.value_and_grad(fun))(*shapes)
    return select(loss, find_places(program.jaxpr, [None] * len(rounded)))


def _is_traceable(fun: Callable[..., Any], args: Sequence[PyTree]) -> bool:
    """Whether the function runs on the dtypes that it was given."""
    with contextlib.suppress(Exception):
        jax.eval_shape(fun, *args)
        return True
    return False


def _rounded_arguments(
    args: Sequence[PyTree], shapes: Sequence[PyTree]
) -> list[Finding | None]:
    """For each leaf of the arguments, a finding if the policy narrows it."""
    found = []
    given = jax.tree_util.tree_leaves_with_path(tuple(args))
    for (path, x), shape in zip(given, jax.tree.leaves(shapes), strict=True):
        i, rest = path[0].idx, path[1:]
        name = f"argument {i}{jax.tree_util.keystr(rest)}" if i else path_of(rest)
        is_narrower = is_narrow(shape.dtype) and not is_narrow(jnp.result_type(x))
        place = Finding("widened", name, shape.dtype.name, ARGUMENT)
        found.append(place if is_narrower else None)
    return found
