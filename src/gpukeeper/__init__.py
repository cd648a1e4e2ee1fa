"""gpukeeper: an event-sourced scheduler for GPU inference jobs on a shared log."""

__version__ = "0.1.0"
