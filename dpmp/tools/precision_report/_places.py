"""Places of a program where 16 bits are not enough, found without running it.

What is known of a value goes with it from equation to equation: that it is a copy of
something wider, that it is a sum, of how many terms, and which value that a loop
carries it came from.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from dpmp._typing import PyTree
from dpmp.programs import _bodies, _interpreter, _source_lines
from dpmp.tools.precision_report._facts import (
    NOTHING,
    Facts,
    Place,
    merged,
    of_iteration,
    of_loop,
)
from dpmp.tools.precision_report._terms import (
    is_float,
    is_narrow,
    is_noticeable,
    is_wide,
    num_terms,
    num_updates,
)

# The names of jax's primitives by what they may do to 16-bit values. Others do no more
# than to add a rounding error of their own size.
_TABLE = {
    # Entries stay what they are.
    "moves": (
        "broadcast_in_dim concatenate copy copy_p dynamic_slice expand_dims gather "
        "optimization_barrier pad reshape rev select_n slice split squeeze "
        "stop_gradient transpose unstack"
    ),
    # What is added to a sum, or scales it, leaves it one.
    "adds": "add add_any sub",
    "scales": "mul div neg max",
    # The compiler chooses in which order, and in what. XLA on CPUs makes 4096 of 4096
    # ones along one axis of a bfloat16 array, and 1024 along two (jax 0.10 to 0.12).
    "sums": "reduce_sum reduce_window_sum cumsum",
    # XLA adds in float32 within these: only the result is rounded.
    "products": "dot_general ragged_dot ragged_dot_general conv_general_dilated",
    # The result is rounded after every addition.
    "scatters": "scatter-add scatter_add",
    # The absolute error of one side is the relative error of the other.
    "exponentials": "exp exp2 expm1 log log1p pow cumlogsumexp lgamma digamma",
    # The derivative of a maximum divides by the number of entries that equal it.
    "ties": "eq",
    # Applied to a variance or a norm; `div` counts if it divides by a sum.
    "roots": "rsqrt sqrt",
}
_KIND_OF = {name: kind for kind, names in _TABLE.items() for name in names.split()}

_ARGUMENTS = ("parameter", "input")


def trace(fun: Callable[..., PyTree], args: Sequence[PyTree]) -> Any:
    """The program of a function, with the lines that it comes from.

    Args:
      fun: traceable.
      args: arrays, or their shapes and dtypes.
    """
    return jax.make_jaxpr(fun)(*args).jaxpr


def find_places(jaxpr: Any, casts: Sequence[tuple[str, str] | None]) -> list[Place]:
    """All places in a program, in its order.

    Args:
      jaxpr: from `trace`.
      casts: for each argument of the program None, or how it was rounded to what it is
        ("parameter" or "input") and its path.
    """
    walk = _Walk()
    facts = [
        NOTHING if cast is None else Facts(rounded=_cast_place(cast, v))
        for cast, v in zip(casts, jaxpr.invars, strict=True)
    ]
    walk.run(jaxpr, facts)
    return [x for x in walk.places if (x.kind, x.primitive) not in walk.used]


def _cast_place(cast: tuple[str, str], variable: Any) -> Place:
    kind, path = cast
    return Place(kind, path, variable.aval.dtype.name, ("unknown", 0))


class _Walk:
    """Goes through a program once."""

    def __init__(self):
        self.places: list[Place | Any] = []
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
            results = self._step(eqn, [read(atom) for atom in eqn.invars])
            known |= zip(eqn.outvars, results, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _step(self, eqn: Any, operands: list[Facts]) -> list[Facts]:
        name = eqn.primitive.name
        kind = _KIND_OF.get(name)
        if kind is None and (programs := _bodies.sub_programs(eqn)):
            return self._enter(eqn, operands, programs)
        if name == "convert_element_type":
            result = self._convert(eqn, operands[0])
        else:
            result = self._apply(eqn, kind, operands)
        return [result] * len(eqn.outvars)

    def _enter(
        self, eqn: Any, operands: list[Facts], programs: list[_bodies.SubProgram]
    ) -> list[Facts]:
        """Walks the programs of a call, a loop or a branch."""
        by_atom = {
            id(atom): facts for atom, facts in zip(eqn.invars, operands, strict=True)
        }
        results = [NOTHING] * len(eqn.outvars)
        outer, self.caller = self.caller, _source_lines.user_line(eqn) or self.caller
        for program in programs:
            facts = [by_atom.get(id(atom), NOTHING) for atom in program.invars]
            is_loop = program.num_carry > 0
            outputs = self.run(
                program.jaxpr, of_iteration(facts, program) if is_loop else facts
            )
            if program.has_results:
                for i in range(program.num_carry):
                    self._check_carry(eqn, program, i, outputs[i])
                results = of_loop(outputs, program) if is_loop else outputs
        self.caller = outer
        return results

    def _check_carry(
        self, eqn: Any, program: _bodies.SubProgram, i: int, facts: Facts
    ) -> None:
        dtype = _dtype(program.jaxpr.outvars[i])
        if not (is_narrow(dtype) and i in facts.carries and facts.adds):
            return
        length = None if program.length is None else program.length * facts.adds
        if length is None or is_noticeable(length, dtype):
            name = f"{eqn.primitive.name} carry"
            self._add("running sum", name, dtype, facts.source, length)

    def _convert(self, eqn: Any, operand: Facts) -> Facts:
        atom, result = eqn.invars[0], eqn.outvars[0]
        old, new = _dtype(atom), _dtype(result)
        source = self._source(eqn)
        facts = operand._replace(rounded=None, widened=None, terms=1, chain=None)
        cast = Place("round trip", "astype", str(old), source)
        if is_narrow(old) and is_wide(new):
            if operand.rounded is not None:
                self._add_rounding(operand.rounded, source)
            return facts._replace(widened=operand.rounded or cast)
        if is_wide(old) and is_narrow(new) and not _interpreter.is_literal(atom):
            cast = cast._replace(dtype=str(new))
            if operand.widened is not None and operand.widened.dtype == cast.dtype:
                self.places.append(cast._replace(kind="idle cast"))
            return facts._replace(rounded=cast)
        return facts

    def _add_rounding(self, place: Place, source: tuple[str, int]) -> None:
        is_argument = place.kind in _ARGUMENTS
        self.places.append(place._replace(source=source) if is_argument else place)

    def _use(self, place: Place | None) -> None:
        """Notes that an argument is better off in 16 bits, or told of elsewhere."""
        if place is not None and place.kind in _ARGUMENTS:
            self.used.add((place.kind, place.primitive))

    def _apply(self, eqn: Any, kind: str | None, operands: list[Facts]) -> Facts:
        """What an ordinary operation does to its operands."""
        if kind == "moves":
            return merged(operands)._replace(is_sum=any(x.is_sum for x in operands))
        for facts in operands:
            self._use(facts.rounded)
        check = getattr(self, f"_{kind}", None)
        return NOTHING if check is None else check(eqn, operands)

    def _sums(self, eqn: Any, operands: list[Facts]) -> Facts:
        if operands[0].is_tie:  # few, and 16 bits hold small integers
            return NOTHING
        self._add_long(eqn, "sum", num_terms(eqn))
        return Facts(is_sum=True)

    def _ties(self, eqn: Any, operands: list[Facts]) -> Facts:
        return Facts(is_tie=is_float(_dtype(eqn.invars[0])))

    def _scatters(self, eqn: Any, operands: list[Facts]) -> Facts:
        self._add_long(eqn, "running sum", num_updates(eqn))
        return NOTHING

    def _products(self, eqn: Any, operands: list[Facts]) -> Facts:
        dtype = _dtype(eqn.outvars[0])
        name, length = eqn.primitive.name, num_terms(eqn)
        place = Place("product", name, str(dtype), self._source(eqn), length)
        if all(is_wide(_dtype(atom)) for atom in eqn.invars[:2]):
            for facts in operands:
                self._use(facts.widened)
            self.places.append(place._replace(kind="wide product"))
        if not is_narrow(dtype):
            return NOTHING
        self.places.append(place)
        return Facts(rounded=place._replace(kind="narrow product"))

    def _exponentials(self, eqn: Any, operands: list[Facts]) -> Facts:
        self._add_narrow(eqn, "exponential")
        return NOTHING

    def _roots(self, eqn: Any, operands: list[Facts]) -> Facts:
        self._add_narrow(eqn, "normalisation")
        return Facts(is_sum=operands[0].is_sum)

    def _scales(self, eqn: Any, operands: list[Facts]) -> Facts:
        if eqn.primitive.name == "div" and operands[1].is_sum:
            self._add_narrow(eqn, "normalisation")
            operands = operands[:1]
        some = merged(operands)
        is_sum = sum(x.is_sum for x in operands) == 1 and _is_factor(eqn, operands)
        return Facts(
            is_sum=is_sum, carries=some.carries, adds=some.adds, source=some.source
        )

    def _adds(self, eqn: Any, operands: list[Facts]) -> Facts:
        dtype = _dtype(eqn.outvars[0])
        carries = frozenset().union(*(x.carries for x in operands))
        terms = sum(x.terms for x in operands) if is_narrow(dtype) else 1
        source = self._source(eqn)
        facts = Facts(
            is_sum=any(x.is_sum for x in operands) and _is_factor(eqn, operands),
            terms=terms,
            chain=next((x.chain for x in operands if x.chain is not None), None),
            carries=carries,
            adds=max(x.adds for x in operands) + 1 if carries else 0,
            source=source,
        )
        if not is_noticeable(terms, dtype):
            return facts
        place = Place("running sum", "add", str(dtype), source, terms)
        if facts.chain is None:
            self.places.append(place)
            return facts._replace(chain=len(self.places) - 1)
        self.places[facts.chain] = place
        return facts

    def _source(self, eqn: Any) -> tuple[str, int]:
        return _source_lines.source_line(eqn, self.caller)

    def _add_narrow(self, eqn: Any, kind: str) -> None:
        dtype = _dtype(eqn.outvars[0])
        if is_narrow(dtype):
            name = eqn.primitive.name
            self._add(kind, name, dtype, self._source(eqn))

    def _add_long(self, eqn: Any, kind: str, length: int) -> None:
        dtype = _dtype(eqn.outvars[0])
        if is_noticeable(length, dtype):
            name, source = eqn.primitive.name, self._source(eqn)
            self._add(kind, name, dtype, source, length)

    def _add(self, kind: str, name: str, dtype: Any, source: Any, length: Any = None):
        self.places.append(Place(kind, name, str(dtype), source, length))


def _is_factor(eqn: Any, operands: Sequence[Facts]) -> bool:
    """Whether all operands but sums are single numbers."""
    return all(
        facts.is_sum or atom.aval.shape == ()
        for atom, facts in zip(eqn.invars, operands, strict=False)
    )


def _live_equations(jaxpr: Any) -> list[Any]:
    """Those that results depend on: differentiation leaves others behind."""
    needed = {v for v in jaxpr.outvars if not _interpreter.is_literal(v)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            live.append(eqn)
            needed.update(v for v in eqn.invars if not _interpreter.is_literal(v))
    return live[::-1]


def _dtype(atom: Any) -> Any:
    return getattr(atom.aval, "dtype", None)
