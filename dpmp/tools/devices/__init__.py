"""Measures which dtypes a device multiplies, how fast and how exactly.

`print(measure_dtypes())`, or `python -m dpmp devices`, measures this device in some
seconds and says which policy to train with.

Modules import only from rows below their own:

    _measure
    _report   _products
"""

from dpmp.tools.devices._measure import add_devices_command, measure_dtypes
from dpmp.tools.devices._report import DeviceReport, Row

__all__ = ["DeviceReport", "Row", "add_devices_command", "measure_dtypes"]
