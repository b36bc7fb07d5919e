"""Products of bfloat16 arrays, as processors like them.

XLA's CPU compiler widens both operands of a product with a bfloat16 result, and uses
the matrix units of the processor only if the result is float32. Accelerators sum in
float32 in any case. So nothing is lost by asking for float32 and rounding once; on a
processor with such units it is several times faster.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _jaxpr
from dpmp._stored import at_least_float32


def with_float32_results(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, its bfloat16 products computed in float32 and rounded, on CPUs."""
    return _jaxpr.rewrite(fun, _replace)


def _replace(eqn: Any, values: list[Any]) -> list[Any] | None:
    if eqn.primitive.name != "dot_general":
        return None
    atoms = (*eqn.invars, *eqn.outvars)
    if any(atom.aval.dtype != jnp.bfloat16 for atom in atoms):
        return None

    def wide(*operands: jax.Array) -> list[jax.Array]:
        product = contract(*operands, *eqn.params["dimension_numbers"])
        return [apart(product).astype(jnp.bfloat16)]

    def plain(*operands: jax.Array) -> list[jax.Array]:
        return _jaxpr.bind(eqn, operands)

    return jax.lax.platform_dependent(*values, cpu=wide, default=plain)


def contract(
    a: jax.Array, b: jax.Array, contracting: Any, batch: Any = ((), ())
) -> jax.Array:
    """A dot product with results in float32 or wider, of operands as they are."""
    if a.dtype == jnp.bfloat16 and batch[0]:
        # As XLA's CPU compiler has no code for any other order in such products
        # ("Unsupported element type for DotThunk"), what is contracted comes last.
        kept = [i for i in range(a.ndim) if i not in (*batch[0], *contracting[0])]
        order = (*batch[0], *kept, *contracting[0])
        a, b = apart(a.transpose(order)), apart(b)
        contracting = (tuple(map(order.index, contracting[0])), contracting[1])
        batch = (tuple(map(order.index, batch[0])), batch[1])
    return jax.lax.dot_general(
        a,
        b,
        (contracting, batch),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=at_least_float32(a.dtype, b.dtype),
    )


def apart(x: jax.Array) -> jax.Array:
    """Keeps XLA from making a transposition of an array a part of a product."""
    return jax.lax.optimization_barrier(x)
