"""Which dtypes a device multiplies, how fast and how exactly; what to train in.

Modules import only from rows below their own:

    _measure
    _report   _products
"""

from dpmp.tools.devices._measure import add_devices_command as add_devices_command
from dpmp.tools.devices._measure import measure_dtypes as measure_dtypes
from dpmp.tools.devices._report import DeviceReport as DeviceReport
from dpmp.tools.devices._report import Row as Row
