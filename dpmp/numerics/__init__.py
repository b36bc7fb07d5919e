"""Sums of clipped gradients: in integers, or in floats whose rounding is bounded.

No module here knows of privacy. Modules import only from rows below their own:

    _arithmetic
    _bounded   _exact
    _float_sums   _squared_norms
    _grid   _reduction
    _stored   _packing
"""

from dpmp.numerics._bounded import BoundedSums
from dpmp.numerics._exact import ExactSums
from dpmp.numerics._grid import GridArray

__all__ = ["BoundedSums", "ExactSums", "GridArray"]
