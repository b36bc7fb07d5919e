"""Measures which dtypes a device multiplies, how fast and how exactly.

`print(measure_dtypes())`, or `python -m dpmp devices`, measures this device in some
seconds and says which policy to train with.
"""

from dpmp.tools.devices._measure import (
    DeviceReport,
    Row,
    add_devices_command,
    measure_dtypes,
)

__all__ = ["DeviceReport", "Row", "add_devices_command", "measure_dtypes"]
