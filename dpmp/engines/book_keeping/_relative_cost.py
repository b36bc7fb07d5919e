"""Estimates what book-keeping costs, relative to forming the gradients of examples.

The loss of one example is traced, and nothing is compiled or computed: the estimate
depends on shapes alone. It counts multiplications, and the entries that are written to
memory and read again (`_norms.COST_OF_AN_ENTRY`). Both methods make three products for
each product of the loss: its output, and two cotangents. Beside these,

    book-keeping                computes norms          (`summarize` shows their cost)
    gradients of examples       are written and read    once for each parameter

On CPUs the ratio was within a quarter of measured times, for exact sums of float32
gradients of small networks with 1 to 128 positions. It errs against book-keeping:
gradients in bfloat16, and gradients that a loop adds up, cost several times as much. So
a small ratio is worth telling. A large ratio is not evidence for the other method.
"""

import math
from collections.abc import Callable
from typing import Any

from dpmp._typing import PyTree
from dpmp.engines.book_keeping._engine import Program, analyse
from dpmp.engines.book_keeping._norms import COST_OF_AN_ENTRY


def relative_cost(fun: Callable[..., Any], params: PyTree, example: PyTree) -> float:
    """The cost of book-keeping over that of forming the gradient of each example.

    Args:
      fun: the loss of one example.
      params: the parameters, or their shapes.
      example: the example as `fun` takes it, or its shapes.
    """
    program = analyse(lambda *args: (fun(*args), ()), params, example, is_bounded=True)
    products = 3 * _num_products(program)
    norms = sum(term.cost for term in program.terms)
    entries = sum(map(math.prod, program.shapes))
    return (products + norms) / (products + COST_OF_AN_ENTRY * entries)


def _num_products(program: Program) -> int:
    """The number of multiplications of one example's data with parameters."""
    outer = [site.outer for site in program.found if site.outer is not None]
    return sum(math.prod(x.sizes) for x in outer if not x.has_rows)
