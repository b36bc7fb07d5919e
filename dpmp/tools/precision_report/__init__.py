"""Finds where a loss needs more than 16 bits, and how 16 bits change its gradient.

`print(precision_report(loss_fn, params, example))` lists the lines of a loss for which
16 bits are too few, with advice for each, and compares loss and gradient with float32.
The data must be public or synthetic: nothing in the report has noise.
"""

from dpmp.tools.precision_report._comparison import Comparison, GradientComparison
from dpmp.tools.precision_report._findings import Finding
from dpmp.tools.precision_report._report import PrecisionReport, precision_report

__all__ = [
    "Comparison",
    "Finding",
    "GradientComparison",
    "PrecisionReport",
    "precision_report",
]
