"""Finds where a loss needs more than 16 bits, and how 16 bits change its gradient.

`print(precision_report(loss_fn, params, example))` lists the lines of a loss for which
16 bits are too few, with advice for each, and compares loss and gradient with float32.
`compare_policies` says which policies are safe for a private run, given its noise.
The data must be public or synthetic: nothing in the report has noise.
"""

from dpmp.tools.precision_report._comparison import Comparison, GradientComparison
from dpmp.tools.precision_report._findings import Finding
from dpmp.tools.precision_report._report import PrecisionReport, precision_report
from dpmp.tools.precision_report._verdict import Verdict, compare_policies

__all__ = [
    "Comparison",
    "Finding",
    "GradientComparison",
    "PrecisionReport",
    "Verdict",
    "compare_policies",
    "precision_report",
]
