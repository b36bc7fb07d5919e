"""Finds the lines of a program on which 16 bits lose something, from its equations."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from dpmp.programs import analysis, interpreter, primitives, source_lines

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

# The largest share of a sum that rounding may take without being reported.
_NOTICEABLE = 1 / 8

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


class Facts(NamedTuple):
    """The facts that the walk knows about a value."""

    # Where a wider value was rounded to this 16-bit value, or to the 16-bit value that
    # this value is a wider copy of.
    lost: Finding | None = None
    is_tie: bool = False  # whether the value tells which floats are equal
    is_sum: bool = False  # possibly with a factor, a root or an addend
    terms: int = 1  # the number of 16-bit values that were added up to the value
    # The values carried by a loop that are among the terms, by position: the number of
    # additions to the carried value, and the line of the last addition.
    carries: Mapping[int, tuple[int, str]] = {}


def find_places(jaxpr: Any, rounded: Sequence[Finding | None]) -> list[Finding]:
    """Finds all places in a program; `rounded` tells which arguments are rounded."""
    walk = _Walk()
    walk.run(jaxpr, [Facts(x) for x in rounded])
    return [x for x in walk.places if (x.kind, x.primitive) not in walk.used]


class _Walk:
    def __init__(self):
        self.places: list[Finding] = []
        # Kinds and paths of arguments that something uses in 16 bits.
        self.used: set[tuple[str, str]] = set()
        # The line of the user's code that called the current program.
        self.caller: tuple[str, int] | None = None

    def run(self, jaxpr: Any, facts: Sequence[Facts]) -> list[Facts]:
        """Returns the facts about the results, from those about the arguments."""
        known = dict(zip(jaxpr.invars, facts, strict=True))

        def read(atoms: Sequence[Any]) -> list[Facts]:
            is_literal = interpreter.is_literal
            return [Facts() if is_literal(x) else known.get(x, Facts()) for x in atoms]

        for eqn in _live_equations(jaxpr):
            is_listed = eqn.primitive.name in primitives.KIND_OF
            programs = [] if is_listed else analysis.sub_programs(eqn)
            if not programs:
                known |= dict.fromkeys(eqn.outvars, self._step(eqn, read(eqn.invars)))
            for program in programs:
                results = self._enter(eqn, program, read(program.invars))
                if program.has_results:
                    known |= zip(eqn.outvars, results, strict=True)
        return read(jaxpr.outvars)

    def _enter(
        self, eqn: Any, program: analysis.SubProgram, facts: list[Facts]
    ) -> list[Facts]:
        """Walks a program of a call, a loop or a branch."""
        first, count = program.num_consts, program.num_carry
        if count:
            facts = _outside_of_loops(facts)
            carry = [Facts(carries={i: (0, UNKNOWN)}) for i in range(count)]
            facts[first : first + count] = carry
        outer, self.caller = self.caller, source_lines.user_line(eqn) or self.caller
        outputs = self.run(program.jaxpr, facts)
        self.caller = outer
        if not count or not program.has_results:
            return outputs
        for i, x in enumerate(outputs[:count]):
            num_adds, source = x.carries.get(i, (0, UNKNOWN))
            if num_adds:
                length = program.length and program.length * num_adds
                name = f"{eqn.primitive.name} carry"
                found = {"primitive": name, "source": source, "length": length}
                self._add("running sum", eqn, i, **found)
        return [*[Facts()] * count, *_outside_of_loops(outputs[count:])]

    def _step(self, eqn: Any, operands: list[Facts]) -> Facts:
        """Returns the facts about the results of an operation."""
        group = primitives.KIND_OF.get(eqn.primitive.name)
        if group == "moves":
            return _united(operands)
        if group == "casts":
            return self._cast(eqn, operands[0])
        for atom, x in zip(eqn.invars, operands, strict=True):
            if x.lost and x.lost.source == ARGUMENT and is_narrow(_dtype(atom)):
                self.used.add((x.lost.kind, x.lost.primitive))
        if group == "ties":
            return Facts(is_tie=_is_float(_dtype(eqn.invars[0])))
        if group == "products":
            lost = self._finding("widened", eqn)
            return Facts(lost if is_narrow(_dtype(eqn.outvars[0])) else None)
        if group == "adds":
            return self._adds(eqn, operands)
        if group == "scales":
            return self._scales(eqn, operands)
        # Ties are few, and 16 bits hold small integers.
        if group is None or operands[0].is_tie:
            return Facts()
        self._add(group, eqn, length=_num_terms(eqn))
        is_root_of_sum = group == "normalisation" and operands[0].is_sum
        return Facts(is_sum=group == "sum" or is_root_of_sum)

    def _cast(self, eqn: Any, operand: Facts) -> Facts:
        old, new = _dtype(eqn.invars[0]), _dtype(eqn.outvars[0])
        facts, lost = operand._replace(lost=None, terms=1), operand.lost
        if is_narrow(old) and _is_wide(new) and lost is not None:
            source = self._source(eqn) if lost.source == ARGUMENT else lost.source
            self.places.append(dataclasses.replace(lost, source=source))
            return facts._replace(lost=lost)
        is_literal = interpreter.is_literal(eqn.invars[0])
        if _is_wide(old) and is_narrow(new) and not is_literal:
            cast = self._finding("widened", eqn, primitive="astype")
            return facts._replace(lost=cast)
        return facts

    def _scales(self, eqn: Any, operands: list[Facts]) -> Facts:
        if eqn.primitive.name == primitives.DIV and operands[1].is_sum:
            self._add("normalisation", eqn)
            operands = operands[:1]
        is_sum = sum(x.is_sum for x in operands) == 1 and _is_factor(eqn, operands)
        return _united(operands)._replace(lost=None, terms=1, is_sum=is_sum)

    def _adds(self, eqn: Any, operands: list[Facts]) -> Facts:
        is_result_narrow = is_narrow(_dtype(eqn.outvars[0]))
        terms = sum(x.terms for x in operands) if is_result_narrow else 1
        some, source = _united(operands), self._source(eqn)
        self._add("running sum", eqn, length=terms)
        return Facts(
            is_sum=some.is_sum and _is_factor(eqn, operands),
            terms=terms,
            carries={i: (n + 1, source) for i, (n, _) in some.carries.items()},
        )

    def _source(self, eqn: Any) -> str:
        return "{}:{}".format(*source_lines.source_line(eqn, self.caller))

    def _finding(self, kind: str, eqn: Any, i: int = 0, **fields: Any) -> Finding:
        """Describes the i-th result of an equation."""
        known = {"primitive": eqn.primitive.name, "source": self._source(eqn)}
        return Finding(kind, dtype=str(_dtype(eqn.outvars[i])), **known | fields)

    def _add(self, kind: str, eqn: Any, i: int = 0, **fields: Any) -> None:
        """Adds a place if its result is narrow, and its sum long."""
        if is_narrow(_dtype(eqn.outvars[i])):
            place = self._finding(kind, eqn, i, **fields)
            if place.bound is None or place.bound >= _NOTICEABLE:
                self.places.append(place)


def _outside_of_loops(facts: Sequence[Facts]) -> list[Facts]:
    return [x._replace(carries={}) for x in facts]


def _united(operands: Sequence[Facts]) -> Facts:
    """The facts about a value whose entries come from any of the operands."""
    carries = sorted(item for x in operands for item in x.carries.items())
    return Facts(
        lost=next((x.lost for x in operands if x.lost), None),
        is_sum=any(x.is_sum for x in operands),
        terms=max((x.terms for x in operands), default=1),
        carries=dict(carries),  # for each position, the most additions
    )


def _is_factor(eqn: Any, operands: Sequence[Facts]) -> bool:
    """Whether all operands but sums are single numbers."""
    return all(
        facts.is_sum or atom.aval.shape == ()
        for atom, facts in zip(eqn.invars, operands, strict=False)
    )


def _live_equations(jaxpr: Any) -> list[Any]:
    """The equations that results depend on: differentiation leaves others behind."""
    needed = {v for v in jaxpr.outvars if not interpreter.is_literal(v)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            live.append(eqn)
            needed.update(v for v in eqn.invars if not interpreter.is_literal(v))
    return live[::-1]


def _num_terms(eqn: Any) -> int | None:
    """The most terms of an entry of a result; None if nothing is summed."""
    name, params, shape = eqn.primitive.name, eqn.params, eqn.invars[0].aval.shape
    if name.startswith(primitives.SCATTER):
        batched = params["dimension_numbers"].scatter_indices_batching_dims
        updates = eqn.invars[1].aval.shape[:-1]
        sizes = [n for i, n in enumerate(updates) if i not in batched]
        return 1 if params["unique_indices"] else math.prod(sizes)
    if name == primitives.CUMSUM:
        return shape[params["axis"]]
    if name == primitives.WINDOW_SUM:
        return math.prod(params["window_dimensions"])
    if name == primitives.REDUCE_SUM:
        return math.prod(shape) // max(1, math.prod(eqn.outvars[0].aval.shape))
    return None


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is a float of 16 bits or fewer."""
    return _is_float(dtype) and dtype.itemsize <= 2


def _is_wide(dtype: Any) -> bool:
    return _is_float(dtype) and not is_narrow(dtype)


def _is_float(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _dtype(atom: Any) -> Any:
    return getattr(atom.aval, "dtype", None)
