"""Where a loss needs more than 16 bits, and how that changes its gradient.

Modules import only from rows below their own:

    _report
    _plot   _text
    _comparison   _findings   _places
    _facts
"""

from dpmp.tools.precision_report._comparison import Comparison as Comparison
from dpmp.tools.precision_report._comparison import (
    GradientComparison as GradientComparison,
)
from dpmp.tools.precision_report._findings import Finding as Finding
from dpmp.tools.precision_report._report import PrecisionReport as PrecisionReport
from dpmp.tools.precision_report._report import precision_report as precision_report
