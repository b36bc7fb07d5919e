"""Programs that jax has traced: how to read, run and rewrite them.

No other files use the extension modules of jax. Modules import only from rows below
their own:

    rounded_products
    formats   transformations   frozen   losses
    analysis
    interpreter   source_lines
    primitives
"""

from dpmp.programs import (
    analysis,
    formats,
    frozen,
    interpreter,
    losses,
    primitives,
    rounded_products,
    source_lines,
    transformations,
)

__all__ = [
    "analysis",
    "formats",
    "frozen",
    "interpreter",
    "losses",
    "primitives",
    "rounded_products",
    "source_lines",
    "transformations",
]
