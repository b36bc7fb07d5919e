"""How much memory a program needs while it runs, told from how it is written down.

What needs a buffer, and when, is modelled on XLA's CPU compiler:

- Elementwise operations and moves (slices, transposes, broadcasts) whose readers are
  all of that kind are computed where they are read, and have no buffer. The expensive
  ones (exp, tanh, ...) have one if they are read twice. What has one large operand is
  computed again from that, wherever it can be, even if it has a buffer for others.
- Sums read buffers, but for a product that they add up.
- An elementwise result takes over the buffer of an operand of its size that is not read
  again.
- Everything runs as soon as what it reads is there (breadth first): memory is not what
  the order is chosen for. Loops have one buffer for each value that they carry and for
  each stack that they write. A branch takes what its larger side takes.

Not modelled: what is lost between buffers of different sizes, limits to how much is
computed in one place, and what libraries take for themselves. Compilers for other
devices fuse more into sums, and look for an order that takes little memory.
"""

from collections import Counter
from collections.abc import Sequence

from dpmp.tools.memory._program import Body, Node, Value


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_EXPENSIVE = _names(
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp "
    "exp2 expm1 lgamma log log1p logistic pow rsqrt sin sinh sqrt tan tanh"
)
_ELEMENTWISE = _EXPENSIVE | _names(
    "abs add add_any and bitcast_convert_type ceil clamp convert_element_type copysign "
    "div eq floor ge gt integer_pow is_finite le lt max min mul ne neg nextafter not "
    "or population_count reduce_precision rem round select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign square sub threefry2x32 xor"
)
_MOVES = _names(
    "broadcast_in_dim dynamic_slice gather iota pad rev slice split transpose unstack"
)
_REDUCTIONS = _names(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum"
)
_PRODUCTS = _names("integer_pow mul square")
_IN_PLACE = _names("dynamic_update_slice scatter scatter-add")
_FUSED = _ELEMENTWISE | _MOVES


def peak(body: Body, carry: Sequence[Value] = ()) -> Counter[str]:
    """The bytes of all buffers at the moment when there are most, by label.

    Buffers of the inputs are not counted: they belong to whoever calls.

    Args:
      body: a program.
      carry: inputs in whose buffers the first outputs are to be, once they are read.
    """
    storage = _Storage(body)
    last_reads = storage.last_reads
    owned: dict[Value, int] = {}
    places = dict(zip(body.outputs, carry, strict=False))
    live: Counter[str] = Counter()
    worst: Counter[str] = Counter()
    for time, (node, reads) in enumerate(storage.order):
        dying = [x for x in reads if x in owned and last_reads[x] == time]
        inside = _inside(node)
        if node.bodies and node.name == "cond":
            worst = _larger(worst, live + inside)
        for output in node.outputs:
            taken = _takes_over(node, output, dying)
            place = places.get(output)
            is_free = place is not None and last_reads.get(place, 0) <= time
            owned[output] = 0 if is_free else output.num_bytes
            if taken is not None and not is_free:
                dying.remove(taken)
                owned[output] = owned.pop(taken)
                live[taken.label] -= owned[output]
            live[output.label] += owned[output]
        if node.name != "cond":
            worst = _larger(worst, live + inside)
        else:
            worst = _larger(worst, live)
        for x in [*dying, *(x for x in node.outputs if x not in last_reads)]:
            live[x.label] -= owned.pop(x)
    return worst


class _Storage:
    """Which values have buffers, and when they are read for the last time."""

    def __init__(self, body: Body):
        self._readers: dict[Value, list[Node | None]] = {}
        for node in body.nodes:
            for x in dict.fromkeys(node.inputs):
                self._readers.setdefault(x, []).append(node)
        for x in body.outputs:
            if x is not None:
                self._readers.setdefault(x, []).append(None)
        self._makers = {x: node for node in body.nodes for x in node.outputs}
        self._absorbed = {
            node
            for node in body.nodes
            if node.name in _PRODUCTS
            and any(r and r.name in _REDUCTIONS for r in self._all_readers(node))
        }
        self._stored = {n for n in body.nodes if not self._is_fused(n)}
        self.order = _breadth_first(
            {n: self._reads(n) for n in body.nodes if n in self._stored}
        )
        self.last_reads: dict[Value, int] = {}
        for time, (_, reads) in enumerate(self.order):
            self.last_reads |= dict.fromkeys(reads, time)
        outputs = (x for x in body.outputs if x is not None)
        self.last_reads |= dict.fromkeys(outputs, len(self.order))

    def _all_readers(self, node: Node) -> list[Node | None]:
        return [r for x in node.outputs for r in self._readers.get(x, [])]

    def _is_fused(self, node: Node) -> bool:
        """Whether a result is computed where it is read."""
        found = self._all_readers(node)
        if node.name not in _FUSED or (node.name in _EXPENSIVE and len(found) > 1):
            return False
        return all(r is not None and self._computes(r, node) for r in found)

    def _computes(self, reader: Node, maker: Node) -> bool:
        """Whether a reader computes what it reads."""
        if maker.name in ("broadcast_in_dim", "iota"):
            return reader.name in _FUSED | _REDUCTIONS
        if reader.name in _REDUCTIONS:
            return maker in self._absorbed
        if reader in self._absorbed:
            return False
        return reader.name in _FUSED | {"concatenate", "write_to_stack"}

    def _reads(self, node: Node) -> list[Value]:
        """The buffers from which a node computes its results."""
        found: dict[Value, None] = {}
        pending = [(x, node) for x in node.inputs]
        seen = set()
        while pending:
            x, reader = pending.pop()
            if (x, reader) in seen:
                continue
            seen.add((x, reader))
            maker = self._makers.get(x)
            if maker is None or not self._is_recomputed(maker, reader):
                found[x] = None
            else:
                pending += [(y, maker) for y in maker.inputs]
        return list(found)

    def _is_recomputed(self, maker: Node, reader: Node) -> bool:
        if maker not in self._stored:
            return True
        # What has one large operand is computed again rather than read.
        size = maker.outputs[0].num_bytes
        return (
            maker.name in _FUSED - _EXPENSIVE - {"convert_element_type"}
            and self._computes(reader, maker)
            and sum(2 * x.num_bytes > size for x in self._large(maker)) <= 1
        )

    def _large(self, node: Node) -> list[Value]:
        """Operands that are not the same number, or few of them, many times."""
        makers = ((x, self._makers.get(x)) for x in dict.fromkeys(node.inputs))
        return [x for x, m in makers if m is None or m.name != "broadcast_in_dim"]


def _breadth_first(
    reads: dict[Node, list[Value]],
) -> list[tuple[Node, list[Value]]]:
    """Nodes in the order in which XLA's CPU compiler runs them: as soon as possible."""
    made = {x for node in reads for x in node.outputs}
    missing = {node: sum(x in made for x in xs) for node, xs in reads.items()}
    readers: dict[Value, list[Node]] = {}
    for node, xs in reads.items():
        for x in xs:
            readers.setdefault(x, []).append(node)
    ready = [node for node, number in missing.items() if not number]
    for node in ready:  # grows on the way
        for x in node.outputs:
            for reader in readers.get(x, []):
                missing[reader] -= 1
                if not missing[reader]:
                    ready.append(reader)
    return [(node, reads[node]) for node in ready]


def _inside(node: Node) -> Counter[str]:
    """The most that any body of a loop or a branch takes."""
    worst: Counter[str] = Counter()
    for body in node.bodies:
        carry = node.carry if body is node.bodies[-1] else ()
        worst = _larger(worst, peak(body, carry))
    return worst


def _takes_over(node: Node, output: Value, dying: list[Value]) -> Value | None:
    """An operand in whose buffer a result may be written."""
    if node.name in ("scan", "while") or node.name in _ELEMENTWISE | _IN_PLACE:
        for x in dying:
            if x.num_bytes == output.num_bytes:
                return x
    return None


def _larger(a: Counter[str], b: Counter[str]) -> Counter[str]:
    return Counter(b) if b.total() > a.total() else a
