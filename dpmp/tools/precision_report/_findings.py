"""From places of a program to lines of its source, with advice."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dpmp.tools.precision_report._facts import Place
from dpmp.tools.precision_report._terms import rounding_bound

# In order of what there is to gain; `_places` says what the kinds are.
ADVICE = {
    "running sum": "Every addition is rounded to 16 bits, and what is small against "
    "the sum is lost. Add, carry or scatter in float32 and cast the result. The "
    "gradient of a parameter in float32_paths is added up in float32.",
    "sum": "Sum in float32: x.astype(jnp.float32) before it, or dtype=jnp.float32. "
    "Compilers may add in 16 bits what they are given in 16 bits.",
    "gradient sum": "What is broadcast, as a bias or a scale is, has a gradient that "
    "is summed in 16 bits. Keep it in float32 by float32_paths, let it meet the values "
    "in float32, and cast the result.",
    "exponential": "An error of an exponent is a relative error of the result. Cast "
    "to float32 before, and back after.",
    "normalisation": "Compute variances, norms and what is divided by sums in float32, "
    "and cast the result.",
    "narrow product": "The product is rounded to 16 bits, and then widened: with "
    "preferred_element_type=jnp.float32 it comes out in float32.",
    "parameter": "The policy rounds these parameters, and they are widened again: keep "
    "them by float32_paths, or in 16 bits, by telling their layer its dtype.",
    "input": "The policy rounds these inputs, and they are widened again: inputs that "
    "have to be exact can be integers, or constants of the function.",
    "round trip": "Values are rounded to 16 bits, and widened with nothing in between "
    "that gains by it. Use what was there before the cast.",
    "wide product": "The operands are float32 in spite of the policy, which costs time "
    "and memory. If that is not intended, cast them, or tell the layer its dtype.",
    "idle cast": "Nothing happens between a cast to float32 and back: leave both out.",
    "product": "",
}

# Products are what mixed precision is made of: there is nothing to change.
NOTES = ("product",)

_SUMS = ("running sum", "sum", "gradient sum", "product")
_OF_GRADIENTS = ("running sum", "sum", "exponential", "normalisation")
_EVALUATED = ("exponential", "normalisation")
_CASTS = ("narrow product", "parameter", "input", "round trip", "idle cast")


@dataclass(frozen=True)
class Finding:
    """A line of a program on which 16 bits lose something.

    Attributes:
      kind: "running sum", "sum", "gradient sum", "exponential", "normalisation",
        "narrow product", "parameter", "input", "round trip", "wide product",
        "idle cast"; or, where there is nothing to change, "product".
      primitive: jax's names of the operations, or paths of parameters or inputs.
      dtype: of the values; that of operands, for wide products.
      source: file and line.
      count: how many operations there are, counting the body of a loop once.
      length: the largest number of terms of a sum; None if it depends on data, or
        nothing is summed.
      in_gradient: whether only the program of the gradient has it.
      advice: what to change.
    """

    kind: str
    primitive: str
    dtype: str
    source: str
    count: int
    length: int | None
    in_gradient: bool
    advice: str

    @property
    def bound(self) -> float | None:
        """What may be lost of a sum of positive terms, as a part of it.

        If every addition is rounded, that is the number of terms times half of the
        dtype's epsilon; the root of a third of the terms is more typical.
        """
        if self.length is None or self.kind not in _SUMS:
            return None
        return rounding_bound(self.length, self.dtype)


def find(loss: Sequence[Place], gradient: Sequence[Place]) -> tuple[Finding, ...]:
    """What to tell of a program and of its gradient.

    Args:
      loss: places in the program.
      gradient: places in a program that computes it and its gradient.
    """
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
    found = [*_merged(loss, in_gradient=False), *_merged(rest, in_gradient=True)]
    order = list(ADVICE)

    def rank(x: Finding) -> tuple[int, bool, str, int]:
        file, _, line = x.source.rpartition(":")
        return order.index(x.kind), x.in_gradient, file, int(line)

    return tuple(sorted(found, key=rank))


def _merged(places: Iterable[Place], *, in_gradient: bool) -> list[Finding]:
    """One finding for each line and kind."""
    groups: dict[tuple[str, tuple[str, int]], list[Place]] = {}
    for place in places:
        groups.setdefault((place.kind, place.source), []).append(place)
    return [
        Finding(
            kind,
            ", ".join(dict.fromkeys(x.primitive for x in group)),
            ", ".join(dict.fromkeys(x.dtype for x in group)),
            f"{source[0]}:{source[1]}",
            len(group),
            max((x.length for x in group if x.length is not None), default=None),
            in_gradient,
            ADVICE[kind],
        )
        for (kind, source), group in groups.items()
    ]


def short_sources(findings: Iterable[Finding]) -> dict[str, str]:
    """Sources without the folders that all of them share."""
    sources = list(dict.fromkeys(x.source for x in findings))
    folders = [os.path.dirname(x) for x in sources if os.path.isabs(x)]
    shared = os.path.commonpath(folders) if folders else ""
    return {x: os.path.relpath(x, shared) if os.path.isabs(x) else x for x in sources}
