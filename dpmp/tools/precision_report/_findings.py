"""Lines of a program on which 16 bits lose something, with advice for each."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

# The source of an operation whose line nobody knows.
UNKNOWN = "unknown:0"

# The kinds of findings with their advice. The kind with most to gain comes first.
ADVICE = {
    "clash": "Here the loss stops, and the report with it: under the policy, values of "
    "two dtypes meet where jax asks for one. Cast on this line, tell the layer its "
    "dtype, or keep the parameters that meet here in float32 with float32_paths.",
    "running sum": "Every addition rounds its result to 16 bits, and loses terms that "
    "are small beside the sum. Add, carry or scatter in float32, and cast the result. "
    "The gradient of a parameter in float32_paths is summed in float32.",
    "sum": "Compilers may add 16-bit values in 16 bits. Sum in float32: use "
    "x.astype(jnp.float32) before the sum, or dtype=jnp.float32.",
    "gradient sum": "A value that is broadcast, such as a bias or a scale, has a "
    "gradient that is summed in 16 bits. Keep the value in float32 with float32_paths, "
    "use it in float32, and cast the result.",
    "exponential": "An error of the exponent becomes a relative error of the result. "
    "Cast to float32 before, and back after.",
    "normalisation": "Compute variances and norms in float32, and also sums that you "
    "divide by. Cast the result.",
    "narrow product": "The product is rounded to 16 bits and then widened. Ask for a "
    "float32 result with preferred_element_type=jnp.float32.",
    "parameter": "The policy rounds these parameters, and the function widens them "
    "again. Keep them in float32 with float32_paths, or tell their layer to compute in "
    "16 bits.",
    "input": "The policy rounds these inputs, and the function widens them again. If "
    "they must be exact, pass integers, or let the function close over the arrays.",
    "round trip": "Values are rounded to 16 bits and widened again, and nothing uses "
    "the rounded values in between. Use the values from before the cast.",
    "wide product": "The operands are float32 in spite of the policy, which costs time "
    "and memory. If you did not intend that, cast them, or tell the layer its dtype.",
    "product": "",  # mixed precision consists of these
}

ARGUMENTS = ("parameter", "input")
CASTS = ("narrow product", "round trip", *ARGUMENTS)
_SUMS = ("running sum", "sum", "gradient sum", "product")
_EVALUATED = ("exponential", "normalisation")
_OF_GRADIENTS = ("running sum", "sum", *_EVALUATED)


@dataclass(frozen=True)
class Finding:
    """A line of a program on which 16 bits lose something.

    Attributes:
      kind: "clash", "running sum", "sum", "gradient sum", "exponential",
        "normalisation", "narrow product", "parameter", "input", "round trip", "wide
        product"; or "product", which needs no change.
      primitive: the names of the operations in jax, the paths of the arguments, or the
        message of a clash.
      dtype: the dtype of the values; for wide products, the dtype of the operands.
      source: the file and the line.
      count: the number of operations. The body of a loop counts once.
      length: the largest number of terms of a sum; None if it depends on data, or if
        nothing is summed.
      in_gradient: whether the operation is only in the program of the gradient.
    """

    kind: str
    primitive: str
    dtype: str
    source: str
    count: int = 1
    length: int | None = None
    in_gradient: bool = False

    @property
    def advice(self) -> str:
        """What to change."""
        return ADVICE[self.kind]

    @property
    def bound(self) -> float | None:
        """The largest share of a sum of positive terms that rounding takes, if known.

        It takes that much if it changes the result of every addition by half of the
        dtype's epsilon. Typical is the root of a third of that many roundings.
        """
        if self.length is None or self.kind not in _SUMS:
            return None
        return self.length * float(jnp.finfo(self.dtype).eps) / 2


def select(loss: Sequence[Finding], gradient: Sequence[Finding]) -> tuple[Finding, ...]:
    """Chooses from all places in a loss, and in the program of loss and gradient."""
    # Casts without a line are those of `dpmp.autocast`, which are intended.
    loss = [x for x in loss if x.kind not in CASTS or x.source != UNKNOWN]
    known = set(map(_topic, loss))
    # A sum that only the gradient has is the transpose of a broadcast.
    found = [
        dataclasses.replace(
            x,
            kind="gradient sum" if x.kind == "sum" else x.kind,
            in_gradient=True,
        )
        for x in gradient
        if x.kind in _OF_GRADIENTS and _topic(x) not in known
    ]
    return tuple(_merged([*loss, *found]))


def _topic(x: Finding) -> tuple[str, str]:
    """The line and the kind, or one word for functions that derivatives repeat."""
    return "function" if x.kind in _EVALUATED else x.kind, x.source


def _merged(found: Sequence[Finding]) -> Iterator[Finding]:
    """Merges the findings of one kind on one line, and puts the worst kinds first."""
    order = list(ADVICE)

    def key(x: Finding) -> tuple[int, bool, str, int]:
        file, _, line = x.source.rpartition(":")
        return order.index(x.kind), x.in_gradient, file, int(line)

    for _, same in itertools.groupby(sorted(found, key=key), key=key):
        group = list(same)
        lengths = [x.length for x in group if x.length is not None]
        yield dataclasses.replace(
            group[0],
            primitive=", ".join(dict.fromkeys(x.primitive for x in group)),
            dtype=", ".join(dict.fromkeys(x.dtype for x in group)),
            count=len(group),
            length=max(lengths, default=None),
        )
