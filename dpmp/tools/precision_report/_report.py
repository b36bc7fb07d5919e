"""What 16 bits do to a loss: where its program loses precision, and how much on data.

The program is looked at as it would run: with parameters and inputs in the dtypes that
a policy gives them, and with its gradient. With data, loss and gradient are compared
with those in float32.

References:
  Micikevicius et al.: Mixed precision training, 2018, section 3.
  Higham: The accuracy of floating point summation, 1993, for the bounds on sums.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _validate, loss_scaling
from dpmp._typing import PyTree
from dpmp.engines import _signature
from dpmp.precision import Policy
from dpmp.tools.precision_report import _plot, _text
from dpmp.tools.precision_report._comparison import Comparison, compare, path_of
from dpmp.tools.precision_report._findings import Finding, find
from dpmp.tools.precision_report._places import find_places, trace
from dpmp.tools.precision_report._terms import is_narrow


@dataclass(frozen=True)
class PrecisionReport:
    """What a policy does to a loss; as a string, an account of it.

    Attributes:
      name: of the function.
      policy: its name, or its compute dtype.
      findings: lines of the program, those with most to gain first.
      comparison: with float32, on data; None without.
      suggested: the same at the loss scale with which the fewest entries of the
        gradient become zero or subnormal; None without data.
    """

    name: str
    policy: str
    findings: tuple[Finding, ...]
    comparison: Comparison | None = None
    suggested: Comparison | None = None

    def __str__(self) -> str:
        return _text.render(
            self.name, self.policy, self.findings, self.comparison, self.suggested
        )

    def plot(self, path: Any = None) -> Any:
        """Draws how large the entries of the gradient are, and what dtypes can hold.

        Like the comparison, it is for public or synthetic data only.

        Args:
          path: of a file to save it to, if any.

        Returns:
          A matplotlib figure.

        Raises:
          ModuleNotFoundError: without matplotlib (`pip install 'dpmp[plot]'`).
          ValueError: without data.
        """
        if self.comparison is None or self.suggested is None:
            _validate.fail(
                "there is nothing to plot without data",
                comparison=None,
                fix="Call precision_report with arrays, of public or synthetic data.",
            )
        figure = _plot.plot(self.comparison, self.suggested, self.policy)
        if path is not None:
            figure.savefig(path)
        return figure


def precision_report(
    fun: Callable[..., Any],
    *args: Any,
    policy: str | Policy = "mixed_bfloat16",
    differentiate: bool | None = None,
    loss_scale: float = 1.0,
    reference: Callable[..., Any] | None = None,
) -> PrecisionReport:
    """Tells where a loss needs more than 16 bits, and what to change.

    The program of `fun` and of its gradient is traced, loops, branches and compiled
    functions included, and lines of the source are listed on which 16-bit values are
    added up, exponentiated, divided by sums, or widened after bits were lost. That
    takes no data. With arrays, loss and gradient are computed too, and compared with
    float32.

    Nothing of the comparison is noised: it is for public or synthetic data only.

    >>> def loss(params, x):
    ...     return jnp.mean(jax.nn.softmax(x @ params["w"]) ** 2)
    >>> params = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    >>> x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> report = precision_report(loss, params, x)
    >>> print([finding.kind for finding in report.findings][:2])
    ['exponential', 'normalisation']

    Args:
      fun: gives a loss; what it casts on its own stays as it is.
      *args: of `fun`, parameters first and then what data it takes, in the shapes that
        it will have: a batch of one example for the loss of one. A
        `jax.ShapeDtypeStruct` may take the place of any array; then nothing is
        compared.
      policy: or the name of one. It casts parameters and inputs as `DPTrainer` does.
      differentiate: whether to look at the gradient too, and compare; left out, it does
        if `fun` returns a float scalar, or is given arrays only.
      loss_scale: that the loss is multiplied by in the comparison, a power of two.
      reference: what to compare with in float32; `fun` if left out. For
        `fun=dpmp.autocast(loss)` and policy="float32" that is `loss`.

    Returns:
      The report, to be printed; `.plot()` draws the gradient.

    Raises:
      ValueError: for what is no function, for the name of no policy, for a loss scale
        that is no power of two, and for what cannot be differentiated.
    """
    _validate.require(
        callable(fun), "fun must be a function", fun=fun, fix="Pass the loss first."
    )
    _signature.check_num_args(args, (0,))
    loss_scaling.check(loss_scale)
    name = policy if isinstance(policy, str) else policy.compute_dtype.name
    policy = Policy.from_name(policy) if isinstance(policy, str) else policy
    has_data = not any(
        isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args)
    )
    shapes = jax.eval_shape(lambda *args: _cast(args, policy), *args)
    scoped = policy.in_product_precision(fun)
    if differentiate is None:
        differentiate = has_data or _is_loss(jax.eval_shape(scoped, *shapes))
    if differentiate:
        _check(scoped, shapes)
    # Rounding to float8 writes the program anew, and the lines of its source are lost.
    plain = dataclasses.replace(policy, float8_scale=None).in_product_precision(fun)
    findings = _findings(plain, args, shapes, policy, differentiate)
    fun_name = getattr(fun, "__name__", type(fun).__name__)
    if not (has_data and differentiate):
        return PrecisionReport(fun_name, name, findings)
    compared = compare(fun, reference or fun, args, policy, float(loss_scale))
    return PrecisionReport(fun_name, name, findings, *compared)


def _cast(args: Sequence[PyTree], policy: Policy) -> tuple[PyTree, ...]:
    """What `fun` is given."""
    return (policy.cast_to_compute(args[0]), *map(policy.cast_inputs, args[1:]))


def _is_loss(output: Any) -> bool:
    is_array = isinstance(output, jax.ShapeDtypeStruct)
    return (
        is_array and output.shape == () and jnp.issubdtype(output.dtype, jnp.floating)
    )


def _check(fun: Callable[..., Any], shapes: Sequence[PyTree]) -> None:
    """Raises ValueError for what has no gradient."""
    _signature.check_float_leaves(shapes[0], "argument 0")
    output = jax.eval_shape(fun, *shapes)
    _validate.require(
        _is_loss(output),
        "fun must return a scalar float loss to be differentiated and compared",
        output=output,
        fix="Reduce it with jnp.mean or jnp.sum, and return nothing else; or look at "
        "the program alone, with differentiate=False.",
    )


def _findings(
    fun: Callable[..., Any],
    args: Sequence[PyTree],
    shapes: Sequence[PyTree],
    policy: Policy,
    differentiate: bool,
) -> tuple[Finding, ...]:
    casts = _casts(args, shapes)
    loss = find_places(trace(fun, shapes), casts)
    if not is_narrow(policy.compute_dtype):
        loss = [x for x in loss if x.kind != "wide product"]
    gradient = []
    if differentiate:
        program = trace(jax.value_and_grad(fun), shapes)
        gradient = find_places(program, [None] * len(casts))
    return find(loss, gradient)


def _casts(
    args: Sequence[PyTree], shapes: Sequence[PyTree]
) -> list[tuple[str, str] | None]:
    """For each leaf of the arguments, what it is if the policy narrows it."""

    def cast(i: int, path: Any, given: Any, shape: Any) -> tuple[str, str] | None:
        is_narrower = is_narrow(shape.dtype) and not is_narrow(jnp.result_type(given))
        name = path_of(path) if i == 0 else f"argument {i}{jax.tree_util.keystr(path)}"
        return ("input" if i else "parameter", name) if is_narrower else None

    return [
        cast(i, path, given, shape)
        for i, arg in enumerate(args)
        for (path, given), shape in zip(
            jax.tree_util.tree_leaves_with_path(arg),
            jax.tree.leaves(shapes[i]),
            strict=True,
        )
    ]
