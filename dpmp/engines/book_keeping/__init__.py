"""Clipped sums of per-example gradients, most of which are never materialized.

Book-keeping is chosen by `clipped_grad(..., method="book_keeping")` or
`DPSGD(..., method="book_keeping")`. To see which rule each parameter uses, print a
summary. It needs shapes only:

>>> def loss(w, batch):
...     return jnp.mean((batch @ w) ** 2)
>>> shapes = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in [(256, 64), (8, 32, 256)]]
>>> summary = summarize(loss, *shapes)
>>> print(summary.rows[0].rules, summary.rows[0].forms)
('dot',) ('gram',)

`measure_condition_numbers` measures, on public data, the share of gradients that
"bounded" sums would scale down more than their norm requires.

Words that all files use:

    view         a value that is computed from parameters and constants only
    use          a place in the loss where data meets a view of parameters
    position     one outer product in the gradient of a use, such as that of one token
    magnitudes   the sum over positions of norm(left) norm(right): at least the norm
    norm method  one way to compute a part of the squared norm of a gradient
    cached       the activations and cotangents that gradients are computed from
    stored       a gradient is stored if it is materialized once, for norm and sum

Modules import only from rows below their own:

    _summary   _condition_numbers
    _engine
    _choice
    _norms   _plan
    _steps
    _rules
    _uses
    _views
    _equations
    _linalg
"""

from dpmp.engines.book_keeping._condition_numbers import (
    ConditionNumbers,
    measure_condition_numbers,
)
from dpmp.engines.book_keeping._engine import Engine
from dpmp.engines.book_keeping._summary import Summary, summarize

__all__ = [
    "ConditionNumbers",
    "Engine",
    "Summary",
    "measure_condition_numbers",
    "summarize",
]
