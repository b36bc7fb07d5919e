"""Clipped sums of per-example gradients that are never formed.

Words that all files use:

    view       a value that is computed from parameters and constants only
    site       a place in the loss where data meets a view of parameters
    position   one outer product in the gradient of a site, such as that of one token
    extent     the sum over positions of |left| |right|: at least the norm
    term       a part of the squared norm of a parameter's gradient
    kept       a gradient is kept if it is formed once, for its norm and for the sum

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
