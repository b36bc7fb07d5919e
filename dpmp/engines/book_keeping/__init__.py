"""Clipped sums of per-example gradients that are not formed.

Modules import only from rows below their own:

    _summary   _extents
    _engine
    _terms   _sums
    _kept
    _norms   _plan
    _gradients   _totals
    _rules
    _sites
    _views   _products
"""

from dpmp.engines.book_keeping._engine import Engine as Engine
from dpmp.engines.book_keeping._extents import Extents as Extents
from dpmp.engines.book_keeping._extents import measure_extents as measure_extents
from dpmp.engines.book_keeping._summary import Summary as Summary
from dpmp.engines.book_keeping._summary import summarize as summarize
