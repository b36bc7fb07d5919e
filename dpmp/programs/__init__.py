"""Programs that jax has traced: how to read, run and rewrite them.

No other files use the extension modules of jax. Modules import only from rows below
their own:

    complex_products
    rounded_products   transformations   losses   cotangents
    formats   frozen
    float8   bodies   convolutions
    interpreter   source_lines
    primitives
"""

from dpmp.programs import (
    bodies,
    complex_products,
    convolutions,
    cotangents,
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
    "bodies",
    "complex_products",
    "convolutions",
    "cotangents",
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
