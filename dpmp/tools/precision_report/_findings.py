"""From places of a program to lines of its source, with advice."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpmp.tools.precision_report._facts import Place, rounding_bound

# The kinds of findings, with most to gain first. `_places` tells what they are.
ADVICE = {
    "running sum": "Every addition is rounded to 16 bits, which loses terms that are "
    "small against the sum. Add, carry or scatter in float32, and cast the result. The "
    "gradient of a parameter in float32_paths is added up in float32.",
    "sum": "Sum in float32: x.astype(jnp.float32) before the sum, or "
    "dtype=jnp.float32. Compilers may add 16-bit values in 16 bits.",
    "gradient sum": "A value that is broadcast, as a bias or a scale is, has a "
    "gradient that is summed in 16 bits. Keep the value in float32 by float32_paths, "
    "use it in float32, and cast the result.",
    "exponential": "An error of an exponent is a relative error of the result. Cast "
    "to float32 before, and back after.",
    "normalisation": "Compute variances, norms and divisors that are sums in float32, "
    "and cast the result.",
    "narrow product": "The product is rounded to 16 bits, and then widened. With "
    "preferred_element_type=jnp.float32 it comes out in float32.",
    "parameter": "The policy rounds these parameters, and they are widened again. Keep "
    "them by float32_paths, or keep them in 16 bits by telling their layer its dtype.",
    "input": "The policy rounds these inputs, and they are widened again. Inputs that "
    "have to be exact can be integers, or constants of the function.",
    "round trip": "Values are rounded to 16 bits and widened again, with nothing in "
    "between that gains by it. Use the values from before the cast.",
    "wide product": "The operands are float32 in spite of the policy, which costs time "
    "and memory. If you did not intend that, cast them, or tell the layer its dtype.",
    "product": "",
}

# Mixed precision is made of products: there is nothing to change.
NOTES = ("product",)

_SUMS = ("running sum", "sum", "gradient sum", "product")
_OF_GRADIENTS = ("running sum", "sum", "exponential", "normalisation")
_EVALUATED = ("exponential", "normalisation")
_CASTS = ("narrow product", "parameter", "input", "round trip")


@dataclass(frozen=True)
class Finding:
    """A line of a program on which 16 bits lose something.

    Attributes:
      kind: "running sum", "sum", "gradient sum", "exponential", "normalisation",
        "narrow product", "parameter", "input", "round trip", "wide product"; or, where
        there is nothing to change, "product".
      primitive: the names of the operations in jax, or paths of parameters or inputs.
      dtype: the dtype of the values; for wide products, that of the operands.
      source: the file and the line.
      count: the number of operations. The body of a loop counts once.
      length: the largest number of terms of a sum; None if it depends on data, or
        nothing is summed.
      in_gradient: whether only the program of the gradient has it.
    """

    kind: str
    primitive: str
    dtype: str
    source: str
    count: int
    length: int | None
    in_gradient: bool

    @property
    def advice(self) -> str:
        """What to change."""
        return ADVICE[self.kind]

    @property
    def bound(self) -> float | None:
        """The largest part of a sum of positive terms that may be lost, if known."""
        if self.length is None or self.kind not in _SUMS:
            return None
        return rounding_bound(self.length, self.dtype)


def find(loss: Sequence[Place], gradient: Sequence[Place]) -> tuple[Finding, ...]:
    """The findings in a program, and in the program of its value and gradient."""
    # Casts of which no line is known are those of `dpmp.autocast`, and as intended.
    loss = [x for x in loss if x.kind not in _CASTS or x.source[0] != "unknown"]
    known = {(x.kind, x.source) for x in loss}
    evaluated = {x.source for x in loss if x.kind in _EVALUATED}
    # The derivative of a function that is evaluated on a line is no news about it.
    rest = [
        x
        for x in gradient
        if x.kind in _OF_GRADIENTS
        and (x.kind, x.source) not in known
        and not (x.kind in _EVALUATED and x.source in evaluated)
    ]
    # Reductions that only the gradient has are what broadcasting is transposed to.
    rest = [x._replace(kind="gradient sum") if x.kind == "sum" else x for x in rest]
    found = [(x, False) for x in loss] + [(x, True) for x in rest]
    return tuple(_merged(found))


def _merged(found: Sequence[tuple[Place, bool]]) -> Iterator[Finding]:
    """One finding for each line and kind, those with most to gain first."""
    groups: dict[tuple[str, bool, tuple[str, int]], list[Place]] = {}
    for place, in_gradient in found:
        key = place.kind, in_gradient, place.source
        groups.setdefault(key, []).append(place)
    order = list(ADVICE)
    for key in sorted(groups, key=lambda x: (order.index(x[0]), *x[1:])):
        kind, in_gradient, (file, line) = key
        yield Finding(
            kind,
            ", ".join(dict.fromkeys(x.primitive for x in groups[key])),
            ", ".join(dict.fromkeys(x.dtype for x in groups[key])),
            f"{file}:{line}",
            len(groups[key]),
            max((x.length for x in groups[key] if x.length is not None), default=None),
            in_gradient,
        )
