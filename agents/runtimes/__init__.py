"""Runtimes: one module for each kind of inference server, all under one contract (``port.py``)."""
