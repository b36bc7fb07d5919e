"""Finds the places of a program where 16 bits are not enough, without running it.

The facts about a value go with it from equation to equation: that it is a copy of
something wider, that it is a sum, of how many terms, and which value that a loop
carries it came from.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dpmp.programs import _bodies, _interpreter, _source_lines
from dpmp.tools.precision_report import _facts
from dpmp.tools.precision_report._facts import (
    NOTHING,
    Facts,
    Place,
    is_narrow,
    is_wide,
    merged,
)

# What operations of jax do to 16-bit values. Those that are not listed only add a
# rounding error of their own size.
_TABLE = {
    # Entries stay what they are.
    "moves": (
        "broadcast_in_dim concatenate copy copy_p dynamic_slice expand_dims gather "
        "optimization_barrier pad reshape rev select_n slice split squeeze "
        "stop_gradient transpose unstack"
    ),
    # A sum remains one if something is added to it, or if it is scaled.
    "adds": "add add_any sub",
    "scales": "mul div neg max",
    # XLA adds in float32 within these: only the result is rounded.
    "products": "dot_general ragged_dot ragged_dot_general conv_general_dilated",
    # The derivative of a maximum divides by the number of entries that equal it.
    "ties": "eq",
}
# Operations that lose more than others, by the kind of finding that they make.
_LOSSES = {
    # The compiler chooses the order and the dtype. XLA on CPUs makes 4096 of 4096 ones
    # along one axis of a bfloat16 array, and 1024 along two (jax 0.10 to 0.12).
    "sum": "reduce_sum reduce_window_sum cumsum",
    # The result is rounded after every addition.
    "running sum": "scatter-add scatter_add",
    # The absolute error of one side is the relative error of the other.
    "exponential": "exp exp2 expm1 log log1p pow cumlogsumexp lgamma digamma",
    # Applied to a variance or a norm. `div` counts if it divides by a sum.
    "normalisation": "rsqrt sqrt",
}
_GROUP_OF = {
    name: group
    for group, names in [*_TABLE.items(), *_LOSSES.items()]
    for name in names.split()
}

ARGUMENTS = ("parameter", "input")


def find_places(jaxpr: Any, casts: Sequence[tuple[str, str] | None]) -> list[Place]:
    """All places in a program; `casts` has kind and path of the arguments rounded."""
    walk = _Walk()
    facts = [
        NOTHING if cast is None else Facts(rounded=_cast_place(cast, v))
        for cast, v in zip(casts, jaxpr.invars, strict=True)
    ]
    walk.run(jaxpr, facts)
    return [x for x in walk.places if (x.kind, x.primitive) not in walk.used]


def _cast_place(cast: tuple[str, str], variable: Any) -> Place:
    return Place(*cast, variable.aval.dtype.name, ("unknown", 0))


class _Walk:
    """Goes through a program once.

    Attributes:
      places: the places found so far.
      used: arguments that are better off in 16 bits, or are told of elsewhere.
      caller: the line of the user's code that called the current program.
    """

    def __init__(self):
        self.places: list[Place] = []
        self.used: set[tuple[str, str]] = set()
        self.caller: tuple[str, int] | None = None

    def run(self, jaxpr: Any, facts: Sequence[Facts]) -> list[Facts]:
        """What is known of the results, from what is known of the arguments."""
        known = dict(zip(jaxpr.invars, facts, strict=True))

        def read(atom: Any) -> Facts:
            return (
                NOTHING if _interpreter.is_literal(atom) else known.get(atom, NOTHING)
            )

        for eqn in _live_equations(jaxpr):
            known |= zip(eqn.outvars, self._step(eqn, read), strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _step(self, eqn: Any, read: Callable[[Any], Facts]) -> list[Facts]:
        operands = [read(atom) for atom in eqn.invars]
        group = _GROUP_OF.get(eqn.primitive.name, "")
        if not group and (programs := _bodies.sub_programs(eqn)):
            return self._enter(eqn, read, programs)
        if eqn.primitive.name == "convert_element_type":
            result = self._convert(eqn, operands[0])
        elif group == "moves":
            result = merged(operands)._replace(is_sum=any(x.is_sum for x in operands))
        else:
            for facts in operands:
                self._use(facts.rounded)
            result = self._compute(eqn, group, operands)
        return [result] * len(eqn.outvars)

    def _compute(self, eqn: Any, group: str, operands: list[Facts]) -> Facts:
        if group == "ties":
            return Facts(is_tie=_facts.is_float(_dtype(eqn.invars[0])))
        if group not in _LOSSES:
            rule = getattr(self, f"_{group}", None)
            return NOTHING if rule is None else rule(eqn, operands)
        if operands[0].is_tie:  # few, and 16 bits hold small integers
            return NOTHING
        self._add_result(group, eqn, _facts.num_terms(eqn))
        is_root_of_sum = group == "normalisation" and operands[0].is_sum
        return Facts(is_sum=group == "sum" or is_root_of_sum)

    def _enter(
        self,
        eqn: Any,
        read: Callable[[Any], Facts],
        programs: Sequence[_bodies.SubProgram],
    ) -> list[Facts]:
        """Walks the programs of a call, a loop or a branch."""
        results = [NOTHING] * len(eqn.outvars)
        outer, self.caller = self.caller, _source_lines.user_line(eqn) or self.caller
        for program in programs:
            facts = [read(atom) for atom in program.invars]
            if program.num_carry:
                outputs = self._iterate(eqn, program, facts)
            else:
                outputs = self.run(program.jaxpr, facts)
            results = outputs if program.has_results else results
        self.caller = outer
        return results

    def _iterate(
        self, eqn: Any, program: _bodies.SubProgram, facts: list[Facts]
    ) -> list[Facts]:
        """Walks the body of a loop, and tells of sums that it carries."""
        first, count = program.num_consts, program.num_carry
        facts = _facts.outside_of_loops(facts)
        carry = [Facts(carries=frozenset([i])) for i in range(count)]
        outputs = self.run(
            program.jaxpr, [*facts[:first], *carry, *facts[first + count :]]
        )
        if not program.has_results:
            return []
        for i, x in enumerate(outputs[:count]):
            if i in x.carries and x.adds:
                dtype = _dtype(program.jaxpr.outvars[i])
                length = program.length and program.length * x.adds
                name = f"{eqn.primitive.name} carry"
                self._add("running sum", name, dtype, x.source, length)
        return [*[NOTHING] * count, *_facts.outside_of_loops(outputs[count:])]

    def _convert(self, eqn: Any, operand: Facts) -> Facts:
        old, new = _dtype(eqn.invars[0]), _dtype(eqn.outvars[0])
        source, lost = self._source(eqn), operand.rounded
        facts = operand._replace(rounded=None, widened=None, terms=1)
        if is_narrow(old) and is_wide(new):
            if lost is not None and lost.kind in ARGUMENTS:
                lost = lost._replace(source=source)
            self.places += [] if lost is None else [lost]
            return facts._replace(widened=operand.rounded)
        is_literal = _interpreter.is_literal(eqn.invars[0])
        if is_wide(old) and is_narrow(new) and not is_literal:
            cast = Place("round trip", "astype", str(new), source)
            return facts._replace(rounded=cast)
        return facts

    def _products(self, eqn: Any, operands: list[Facts]) -> Facts:
        dtype, length = _dtype(eqn.outvars[0]), _facts.num_terms(eqn)
        name, source = eqn.primitive.name, self._source(eqn)
        place = Place("product", name, str(dtype), source, length)
        if all(is_wide(_dtype(atom)) for atom in eqn.invars[:2]):
            for facts in operands:
                self._use(facts.widened)
            self.places.append(place._replace(kind="wide product"))
        if not is_narrow(dtype):
            return NOTHING
        self.places.append(place)
        return Facts(rounded=place._replace(kind="narrow product"))

    def _scales(self, eqn: Any, operands: list[Facts]) -> Facts:
        if eqn.primitive.name == "div" and operands[1].is_sum:
            self._add_result("normalisation", eqn)
            operands = operands[:1]
        some = merged(operands)._replace(rounded=None, widened=None, terms=1)
        is_sum = sum(x.is_sum for x in operands) == 1 and _is_factor(eqn, operands)
        return some._replace(is_sum=is_sum)

    def _adds(self, eqn: Any, operands: list[Facts]) -> Facts:
        some, dtype = merged(operands), _dtype(eqn.outvars[0])
        terms = sum(x.terms for x in operands) if is_narrow(dtype) else 1
        self._add_result("running sum", eqn, terms)
        return Facts(
            is_sum=any(x.is_sum for x in operands) and _is_factor(eqn, operands),
            terms=terms,
            carries=some.carries,
            adds=some.adds + 1 if some.carries else 0,
            source=self._source(eqn),
        )

    def _use(self, place: Place | None) -> None:
        if place is not None and place.kind in ARGUMENTS:
            self.used.add((place.kind, place.primitive))

    def _source(self, eqn: Any) -> tuple[str, int]:
        return _source_lines.source_line(eqn, self.caller)

    def _add_result(self, kind: str, eqn: Any, length: int | None = None) -> None:
        name, dtype = eqn.primitive.name, _dtype(eqn.outvars[0])
        self._add(kind, name, dtype, self._source(eqn), length)

    def _add(
        self, kind: str, name: str, dtype: Any, source: Any, length: int | None
    ) -> None:
        """Adds a place if its dtype is narrow, and its sum long."""
        if is_narrow(dtype) and _facts.is_noticeable(length, dtype):
            self.places.append(Place(kind, name, str(dtype), source, length))


def _is_factor(eqn: Any, operands: Sequence[Facts]) -> bool:
    """Whether all operands but sums are single numbers."""
    return all(
        facts.is_sum or atom.aval.shape == ()
        for atom, facts in zip(eqn.invars, operands, strict=False)
    )


def _live_equations(jaxpr: Any) -> list[Any]:
    """The equations that results depend on: differentiation leaves others behind."""
    needed = {v for v in jaxpr.outvars if not _interpreter.is_literal(v)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            live.append(eqn)
            needed.update(v for v in eqn.invars if not _interpreter.is_literal(v))
    return live[::-1]


def _dtype(atom: Any) -> Any:
    return getattr(atom.aval, "dtype", None)
