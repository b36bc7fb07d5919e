"""What is known of the values of a program, and where it loses more than it has to."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dpmp.programs import _bodies


class Place(NamedTuple):
    """An equation that loses more than it has to.

    Attributes:
      kind: what it loses it by, a key of the advice in `precision_report`.
      primitive: jax's name for the operation, or the path of an argument.
      dtype: the narrow one.
      source: file and line.
      length: the number of terms, for sums of a known number.
    """

    kind: str
    primitive: str
    dtype: str
    source: tuple[str, int]
    length: int | None = None


class Facts(NamedTuple):
    """What is known of a value.

    Attributes:
      rounded: how it lost the bits that it might have, if it is a 16-bit value.
      widened: what it is a copy of, if that is a 16-bit value.
      is_tie: whether it tells where floats are equal.
      is_sum: whether it is a sum, but for a factor, a root or what is added.
      terms: of how many 16-bit values it is a sum.
      chain: where the place of that sum is in the list of places.
      carries: which of the values that a loop carries are terms of it.
      adds: how many additions it took from there.
      source: of the last of these.
    """

    rounded: Place | None = None
    widened: Place | None = None
    is_tie: bool = False
    is_sum: bool = False
    terms: int = 1
    chain: int | None = None
    carries: frozenset[int] = frozenset()
    adds: int = 0
    source: tuple[str, int] = ("unknown", 0)


NOTHING = Facts()


def of_iteration(facts: Sequence[Facts], program: _bodies.SubProgram) -> list[Facts]:
    """What is known of the arguments of a loop's body: not what another one carries."""
    first, last = program.num_consts, program.num_consts + program.num_carry
    carry = [Facts(carries=frozenset([i])) for i in range(program.num_carry)]
    return [*map(_uncarried, facts[:first]), *carry, *map(_uncarried, facts[last:])]


def of_loop(outputs: Sequence[Facts], program: _bodies.SubProgram) -> list[Facts]:
    """What is known of the results of a loop, from those of its body."""
    num_carry = program.num_carry
    return [*[NOTHING] * num_carry, *map(_uncarried, outputs[num_carry:])]


def _uncarried(facts: Facts) -> Facts:
    return facts._replace(carries=frozenset(), adds=0)


def merged(operands: Sequence[Facts]) -> Facts:
    """What is known of entries that come from any of the operands."""
    carriers = [x for x in operands if x.carries] or [NOTHING]
    return Facts(
        rounded=_first(x.rounded for x in operands),
        widened=_first(x.widened for x in operands),
        terms=max((x.terms for x in operands), default=1),
        chain=_first(x.chain for x in operands),
        carries=frozenset().union(*(x.carries for x in carriers)),
        adds=max(x.adds for x in carriers),
        source=carriers[-1].source,
    )


def _first(values: Iterator[Any]) -> Any:
    return next((x for x in values if x is not None), None)
