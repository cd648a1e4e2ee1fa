"""Devices: where readings come from (NVML, host memory, declarations), all under one contract (``port.py``)."""
