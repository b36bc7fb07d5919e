"""The report on a loss under a policy, whose program is run if there is data.

References:
  Micikevicius et al.: Mixed precision training, 2018, section 3.
  Higham: The accuracy of floating point summation, 1993, for the bounds on sums.
"""

import contextlib
import dataclasses
import linecache
import math
import pathlib
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _plain_text, _validate, loss_scaling
from dpmp._arrays import as_device_dtypes
from dpmp._typing import PyTree
from dpmp.engines import check_float_leaves, check_num_args
from dpmp.precision import Policy, name_of, reference_of
from dpmp.programs import source_lines
from dpmp.tools.precision_report._comparison import (
    Comparison,
    GradientComparison,
    cast,
    compare,
)
from dpmp.tools.precision_report._findings import (
    ADVICE,
    ARGUMENT,
    Finding,
    find_places,
    is_narrow,
    select,
)

# If bfloat16 is used only in operations that tolerate it, the cosine is larger.
_CLOSE = 0.99
_NOTICEABLE_LOSS = 0.01
_NUM_WORST = 3
_LENGTH_OF_MESSAGE = 300


@dataclass(frozen=True)
class PrecisionReport:
    """How a policy changes a loss. `print` shows the report as text.

    Attributes:
      name: the name of the function.
      policy: the name of the policy, or its compute dtype.
      findings: lines of the program, the most important first.
      comparison: the comparison with float32; None without data.
    """

    name: str
    policy: str
    findings: tuple[Finding, ...]
    comparison: Comparison | None = None

    def __str__(self) -> str:
        parts, advice = [f"Precision of {self.name}, {self.policy}"], []
        if self.comparison is not None:
            parts += _tables(self.comparison)
            advice += _about_the_scale(self.comparison.total)
        advice += _about_findings(self.findings, self.comparison)
        items = [_plain_text.paragraph(x, f"{i}. ") for i, x in enumerate(advice, 1)]
        parts.append("\n".join(["What to change", *(items or ["  Nothing."])]))
        return "\n\n".join(parts)


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
        name = f"argument {i}{jax.tree_util.keystr(rest)}" if i else name_of(rest)
        is_narrower = is_narrow(shape.dtype) and not is_narrow(jnp.result_type(x))
        place = Finding("widened", name, shape.dtype.name, ARGUMENT)
        found.append(place if is_narrower else None)
    return found


def _tables(x: Comparison) -> Iterator[str]:
    total = x.total
    rows = {
        "loss scale": f"{x.loss_scale:g}",
        "loss": f"{x.loss:.6g}",
        "loss in float32": f"{x.float32_loss:.6g}",
        "relative difference of the losses": f"{x.relative_difference:.1e}",
        "gradient: cosine": _number(total.cosine),
        "gradient: norm ratio": _number(total.norm_ratio),
        "gradient: not finite": _share(total.not_finite),
        "float32 gradient, rounded: zero": _share(total.zero),
        "... subnormal": _share(total.subnormal),
        "... infinite": _share(total.overflow),
    }
    yield (
        "Comparison with float32 on the given data. The numbers have no noise, so the "
        "data must\nbe public or synthetic.\n"
        + _plain_text.table(list(rows.items()), "<>", indent="  ")
    )
    header = ["furthest from float32", "entries", "cosine", "norm ratio"]
    worst = [
        [_path(x.path), f"{x.num_entries:,}", _number(x.cosine), _number(x.norm_ratio)]
        for x in x.parameters[:_NUM_WORST]
    ]
    yield _plain_text.table([header, *worst], "<>>>", indent="  ")


def _path(path: str) -> str:
    return path or "argument 0"


def _number(x: float) -> str:
    return f"{x:.5f}" if math.isfinite(x) else "not finite"


def _share(x: float) -> str:
    return f"{x:.2%}" if x == 0 or x >= 0.0001 else "< 0.01%"


def _about_the_scale(total: GradientComparison) -> Iterator[str]:
    """Advice on the loss scale, if the gradient overflows or underflows."""
    if total.not_finite:
        yield (
            "Overflow: the gradient is not finite. Use a smaller loss scale, or "
            "bfloat16, or compute the value that overflows in float32."
        )
    elif total.lost > _NOTICEABLE_LOSS:
        yield (
            f"Underflow: {_share(total.lost)} of the gradient's entries become zero or "
            "subnormal. Use a larger loss scale, or loss_scaling.by_loss()."
        )


def _about_findings(
    findings: Sequence[Finding], comparison: Comparison | None
) -> Iterator[str]:
    """Advice on the findings, the most important first."""
    kinds = {x.kind for x in findings}
    for kind, advice in ADVICE.items():
        if kind in kinds:
            lines = (_lines(x) for x in findings if x.kind == kind)
            yield "\n".join([f"{kind.capitalize()}. {advice}", *lines])
    if kinds - {"widened"}:
        yield (
            "Or write the function in float32, and let dpmp.autocast(fun) choose what "
            "is rounded."
        )
    elif comparison and not kinds and comparison.total.cosine < _CLOSE:
        paths = ", ".join(_path(x.path) for x in comparison.parameters[:_NUM_WORST])
        yield (
            "No line stands out, but the gradient differs from that of float32. Try "
            f"float32_paths with the parameters that are furthest from it: {paths}. "
            "If that does not help, inputs are rounded too: scale or centre them, or "
            "use dpmp.autocast(fun). Or nearly equal numbers are subtracted: compute "
            "both in float32, a product by preferred_element_type=jnp.float32. "
            "dpmp.compare_policies tries which paths help."
        )


def _lines(x: Finding) -> str:
    """The source line of a finding, and a line that describes it."""
    file, _, line = x.source.rpartition(":")
    place = "/".join(pathlib.PurePath(file).parts[-2:])
    code = textwrap.shorten(linecache.getline(file, int(line)), 60)
    where = f"     {place}:{line}  {code}".rstrip()
    if x.kind == "clash":
        message = textwrap.shorten(x.primitive, _LENGTH_OF_MESSAGE)
        return f"{where}\n{textwrap.indent(textwrap.fill(message, 79), ' ' * 7)}"
    details = [
        f"{textwrap.shorten(_path(x.primitive), 40)} in {x.dtype}",
        f"{x.count} times" if x.count > 1 else "",
        f"{x.length:,} terms" if x.length is not None else "",
        f"an error of up to {x.bound:.0%}" if x.bound is not None else "",
        "in the gradient" if x.in_gradient else "",
    ]
    return where + f"\n       {', '.join(filter(None, details))}"
