"""Programs as operations on buffers, for `_liveness.py`.

Calls are written out, dead code is left out, and what only gives an array another shape
is the same value. Products are written as XLA's CPU compiler computes them: in float32,
from copies of 16-bit operands, and of those whose axes are not in order; a copy that
is needed twice is made once, and before a loop, for what does not change in it.
Products that add nothing up are elementwise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from dpmp.programs import _bodies, _interpreter

_WITH_BODIES = ("scan", "while", "cond")
_VIEWS = (
    "copy",
    "copy_p",
    "expand_dims",
    "optimization_barrier",
    "random_unwrap",
    "random_wrap",
    "reshape",
    "squeeze",
    "stop_gradient",
)


@dataclass(eq=False)
class Value:
    """What may need a buffer.

    Attributes:
      num_bytes: of the buffer.
      label: what it is counted under.
    """

    num_bytes: int
    label: str = ""


@dataclass(eq=False)
class Node:
    """An operation, or a loop or branch with bodies.

    Attributes:
      name: of the primitive.
      inputs: what it reads; literals are left out.
      outputs: what it defines.
      bodies: of loops and branches.
      carry: of a loop: the inputs of its last body that are written anew, in the
        buffers that they have; the first outputs are what is written.
    """

    name: str
    inputs: list[Value]
    outputs: list[Value]
    bodies: list["Body"] = field(default_factory=list)
    carry: list[Value] = field(default_factory=list)


@dataclass(eq=False)
class Body:
    """A sequence of operations.

    Attributes:
      inputs: values from outside.
      nodes: in order.
      outputs: what is read after it; None for literals.
    """

    inputs: list[Value]
    nodes: list[Node]
    outputs: list[Value | None]


def size_of(aval: Any) -> int:
    """The number of bytes of an array of this shape and dtype."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return 8 * math.prod(aval.shape)
    return math.prod(aval.shape) * jnp.dtype(aval.dtype).itemsize


def as_body(closed: Any, label: str) -> Body:
    """A closed jaxpr in these terms, with calls written out and dead code left out."""
    builder = _Builder([], label)
    env = {v: Value(size_of(v.aval), label) for v in closed.jaxpr.invars}
    inputs = [env[v] for v in closed.jaxpr.invars]
    env |= {v: Value(size_of(v.aval), label) for v in closed.jaxpr.constvars}
    outputs = builder.add_jaxpr(closed.jaxpr, env)
    nodes = _alive(builder.nodes, outputs)
    return Body(inputs, _with_divisors(nodes, label), outputs)


@dataclass
class _Builder:
    nodes: list[Node]
    label: str
    # What products read, by operand, order of axes and size: made once.
    copies: dict[Any, Value] = field(default_factory=dict)
    matrices: set[Value] = field(default_factory=set)

    def add_jaxpr(self, jaxpr: Any, env: dict[Any, Any]) -> list[Value | None]:
        for eqn in jaxpr.eqns:
            operands = [
                None if _interpreter.is_literal(x) else env[x] for x in eqn.invars
            ]
            env |= dict(zip(eqn.outvars, self.add(eqn, operands), strict=True))
        return [None if _interpreter.is_literal(x) else env[x] for x in jaxpr.outvars]

    def add(self, eqn: Any, operands: list[Any]) -> Sequence[Value | None]:
        name = eqn.primitive.name
        body = None if name in _WITH_BODIES else _callee(eqn)
        if body is not None:
            env = dict(zip(body.invars, operands, strict=False))
            env |= {v: Value(size_of(v.aval)) for v in body.constvars}
            return self.add_jaxpr(body, env)
        outputs = [Value(size_of(v.aval), self.label) for v in eqn.outvars]
        source = operands[0] if operands else None
        if source is not None and self._is_view(eqn, source, outputs[0]):
            return [source]
        if name == "dot_general" and _is_outer(eqn):
            name = "mul"
        elif name in ("dot_general", "conv_general_dilated"):
            self._add_product(eqn, operands, outputs[0])
            return outputs
        self.nodes.append(self._node(eqn, name, operands, outputs))
        return outputs

    def _is_view(self, eqn: Any, source: Value, output: Value) -> bool:
        # A product of matrices can have its factors the other way round.
        is_transpose = eqn.primitive.name == "transpose"
        return (is_transpose and source in self.matrices) or _is_view(
            eqn, source, output
        )

    def _add_product(
        self, eqn: Any, operands: list[Value | None], output: Value
    ) -> None:
        factors = [
            self._as_factor(eqn, i, x) for i, x in enumerate(operands) if x is not None
        ]
        if eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.ndim == 2:
            self.matrices.add(output)
        if not _is_widened(eqn):
            self.nodes.append(Node(eqn.primitive.name, factors, [output]))
            return
        aval = eqn.outvars[0].aval.update(dtype=jnp.float32)
        wide = Value(size_of(aval), self.label)
        self.nodes.append(Node(eqn.primitive.name, factors, [wide]))
        self.nodes.append(Node("convert_element_type", [wide], [output]))

    def _as_factor(self, eqn: Any, side: int, x: Value) -> Value:
        """The operand as a product reads it: in float32, with axes in order."""
        order = _order_of_axes(eqn, side)
        is_widened = _is_widened(eqn)
        if order is None and not is_widened:
            return x
        key = (x, order, is_widened)
        if key not in self.copies:
            aval = eqn.invars[side].aval
            aval = aval.update(dtype=jnp.float32) if is_widened else aval
            self.copies[key] = Value(size_of(aval), self.label)
            self.nodes.append(Node("transpose", [x], [self.copies[key]]))
        return self.copies[key]

    def _node(
        self, eqn: Any, name: str, operands: list[Value | None], outputs: list[Value]
    ) -> Node:
        if name == "scan":
            return self._scan(eqn, operands, outputs)
        inputs = [x for x in operands if x is not None]
        bodies = [as_body(x, self.label) for x in _inner_jaxprs(eqn)]
        carry = bodies[-1].inputs[-len(outputs) :] if name == "while" else []
        return Node(name, inputs, outputs, bodies, carry)

    def _as_read_by_loop(self, x: Value, aval: Any) -> Value:
        """What does not change in a loop is widened before it, as a whole and once."""
        if not _is_16_bit_float(aval.dtype):
            return x
        key = (x, "loop")
        if key not in self.copies:
            self.copies[key] = Value(2 * x.num_bytes, self.label)
            self.nodes.append(Node("transpose", [x], [self.copies[key]]))
        return self.copies[key]

    def _scan(
        self, eqn: Any, operands: list[Value | None], outputs: list[Value]
    ) -> Node:
        loop = _bodies.as_loop(eqn)
        assert loop is not None
        body = as_body(loop.body, self.label)
        first = loop.num_consts + loop.num_carry
        changing = range(loop.num_consts, first)
        inputs = [
            x if i in changing else self._as_read_by_loop(x, eqn.invars[i].aval)
            for i, x in enumerate(operands)
            if x is not None
        ]
        slices = body.inputs[first:]
        stacks = [Value(x.num_bytes, self.label) for x in slices]
        reads = [
            Node("dynamic_slice", [stack], [x])
            for stack, x in zip(stacks, slices, strict=True)
        ]
        writes = [
            Node("write_to_stack", [x], [Value(0)])
            for x in body.outputs[loop.num_carry :]
            if x is not None
        ]
        body = Body(
            body.inputs[:first] + stacks,
            [*reads, *body.nodes, *writes],
            [*body.outputs[: loop.num_carry], *(w.outputs[0] for w in writes)],
        )
        body.nodes = _alive(body.nodes, body.outputs)
        carry = body.inputs[loop.num_consts : first]
        return Node("scan", inputs, outputs, [body], carry)


def _is_16_bit_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2


def _is_widened(eqn: Any) -> bool:
    """Whether a product of 16-bit floats is computed in float32, as CPUs do it."""
    if not _is_16_bit_float(eqn.invars[0].aval.dtype):
        return False
    if eqn.primitive.name != "dot_general":
        return True
    return not _is_outer(eqn)


def _is_outer(eqn: Any) -> bool:
    """Whether a product adds nothing up, and so is elementwise."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return math.prod(shape[i] for i in contracted) == 1


def _order_of_axes(eqn: Any, side: int) -> tuple[int, ...] | None:
    """The axes of an operand in the order in which a product needs them, if not as is.

    Batch axes come first, and the axes that are contracted are not among others.
    """
    if eqn.primitive.name != "dot_general":
        numbers = eqn.params["dimension_numbers"]
        spec = (numbers.lhs_spec, numbers.rhs_spec)[side]
        is_usual = numbers.lhs_spec[0] < numbers.lhs_spec[1]
        return None if is_usual else tuple(spec)
    contracted, batch = (x[side] for x in eqn.params["dimension_numbers"])
    shape = eqn.invars[side].aval.shape
    free = [i for i in range(len(shape)) if i not in (*contracted, *batch)]
    given = [i for i in range(len(shape)) if shape[i] != 1]
    for order in ((*batch, *free, *contracted), (*batch, *contracted, *free)):
        if [i for i in order if shape[i] != 1] == given:
            return None
    return (*batch, *free, *contracted)


def _callee(eqn: Any) -> Any:
    """The jaxpr of an equation that is a call in some form, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(name)
        if body is not None:
            return body.jaxpr if hasattr(body, "consts") else body
    return None


def _inner_jaxprs(eqn: Any) -> list[Any]:
    names = {"while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
    bodies = [eqn.params[name] for name in names.get(eqn.primitive.name, ())]
    return jax.tree.leaves(bodies, is_leaf=lambda x: hasattr(x, "jaxpr"))


def _is_view(eqn: Any, source: Value, output: Value) -> bool:
    """Whether an equation only gives its operand another name."""
    name = eqn.primitive.name
    if name in _VIEWS or name == "bitcast_convert_type":
        return len(eqn.outvars) == 1 and source.num_bytes == output.num_bytes
    if name in ("convert_element_type", "reduce_precision"):
        return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    if name in ("broadcast_in_dim", "transpose", "slice"):
        return source.num_bytes == output.num_bytes and _keeps_order(eqn)
    return False


def _keeps_order(eqn: Any) -> bool:
    """Whether a move leaves the entries in memory where they are."""
    if eqn.primitive.name != "transpose":
        return True
    shape = eqn.invars[0].aval.shape
    moved = [i for i in eqn.params["permutation"] if shape[i] != 1]
    return moved == sorted(moved)


def _with_divisors(nodes: list[Node], label: str) -> list[Node]:
    """Nodes that divide by arrays of full size, where XLA's CPU compiler has them.

    What softmax divides by is needed going forward and back, there by a library that
    computes a product and all that is elementwise about it, but no broadcast.
    """
    makers = {x: node for node in nodes for x in node.outputs}

    def is_of_product(x: Value) -> bool:
        maker = makers.get(x)
        while maker is not None and maker.name == "convert_element_type":
            maker = makers.get(maker.inputs[0])
        return maker is not None and maker.name == "dot_general"

    readers: dict[Value, list[Node]] = {}
    for node in nodes:
        divides = node.name == "div" and len(node.inputs) == 2
        if divides and 8 < node.inputs[1].num_bytes < node.outputs[0].num_bytes:
            readers.setdefault(node.inputs[1], []).append(node)
    copies: dict[Node, Node] = {}
    for x, dividing in readers.items():
        of_products = [node for node in dividing if is_of_product(node.inputs[0])]
        if of_products and len(dividing) > 1:
            copy = Node("spread", [x], [Value(dividing[0].outputs[0].num_bytes, label)])
            copies[dividing[0]] = copy
            for node in of_products:
                node.inputs[1] = copy.outputs[0]
    return [x for node in nodes for x in (copies.get(node), node) if x is not None]


def _alive(nodes: list[Node], outputs: Sequence[Value | None]) -> list[Node]:
    """The nodes that something depends on."""
    needed = {x for x in outputs if x is not None}
    kept = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            kept.append(node)
    return kept[::-1]
