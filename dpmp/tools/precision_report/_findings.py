"""Lines of a program on which 16 bits lose something, with advice for each."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

# The source of an operation whose line is unknown.
UNKNOWN = "unknown:0"
# The source of an argument that the policy rounds, until a line widens it.
ARGUMENT = ""

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
    "widened": "Values are rounded to 16 bits and widened again, and nothing uses the "
    "rounded values in between. Keep parameters in float32 with float32_paths, or tell "
    "their layer to compute in 16 bits. Let the function close over inputs that must "
    "be exact. Ask for float32 products with preferred_element_type=jnp.float32.",
}

_SUMS = ("running sum", "sum", "gradient sum")
_EVALUATED = ("exponential", "normalisation")


@dataclass(frozen=True)
class Finding:
    """A line of a program on which 16 bits lose something.

    Attributes:
      kind: "clash", "running sum", "sum", "gradient sum", "exponential",
        "normalisation" or "widened".
      primitive: the names of the operations in jax, the paths of the arguments, or the
        message of a clash.
      dtype: the dtype of the values.
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
        """Advice on what to change."""
        return ADVICE[self.kind]

    @property
    def bound(self) -> float | None:
        """The largest share of a sum of positive terms that rounding takes, if known.

        Rounding takes that much if it changes the result of every addition by half of
        the dtype's epsilon. For n terms, an error of sqrt(n / 3) roundings is typical.
        """
        if self.length is None or self.kind not in _SUMS:
            return None
        return self.length * float(jnp.finfo(self.dtype).eps) / 2


def select(loss: Sequence[Finding], gradient: Sequence[Finding]) -> tuple[Finding, ...]:
    """Selects findings in the loss, and in the program of loss and gradient."""
    # Casts without a line are those of `dpmp.autocast`, which are intended.
    found = [x for x in loss if x.kind != "widened" or x.source != UNKNOWN]
    known = set(map(_topic, found))
    for x in gradient:
        if x.kind != "widened" and _topic(x) not in known:
            # A sum that only the gradient has is the transpose of a broadcast.
            kind = "gradient sum" if x.kind == "sum" else x.kind
            found.append(dataclasses.replace(x, kind=kind, in_gradient=True))
    return tuple(_merged(found))


def _topic(x: Finding) -> tuple[str, str]:
    """The kind and the line; functions that derivatives repeat are one kind."""
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
