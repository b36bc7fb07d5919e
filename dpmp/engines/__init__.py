"""Gradient engines: per-example squared norms, and weighted sums of gradients.

`_methods.py` defines the interface of an engine, and makes one by its name. The engine
in `_per_example.py` materializes per-example gradients. The engine in `book_keeping`
caches activations and cotangents instead. No engine knows of privacy.
"""

from dpmp.engines._methods import (
    METHODS,
    GradEngine,
    check_method,
    make_engine,
    scaled,
)
from dpmp.engines._per_example import mappable, stack_engine, store_one
from dpmp.engines._signature import Signature, check_float_leaves, check_num_args

__all__ = [
    "METHODS",
    "GradEngine",
    "Signature",
    "check_float_leaves",
    "check_method",
    "check_num_args",
    "make_engine",
    "mappable",
    "scaled",
    "stack_engine",
    "store_one",
]
