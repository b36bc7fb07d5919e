"""Programs that jax has traced: how to read, run and rewrite them.

No other files use the extension modules of jax. Modules import only from rows below
their own:

    rounded_products
    formats   transformations   frozen   losses
    float8   analysis
    interpreter   source_lines
    primitives
"""

from dpmp.programs import (
    analysis,
    float8,
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
    "float8",
    "formats",
    "frozen",
    "interpreter",
    "losses",
    "primitives",
    "rounded_products",
    "source_lines",
    "transformations",
]
