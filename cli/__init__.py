"""The command line, and the only place that starts processes.

What holds in this package:

- Programs are started with argument lists, never through a shell, and no secret stands on a command line.
- Every child ends with its parent, also when the parent is killed (``deathsignal.py``).
- Modules that worker processes import stay free of typer and rich.
"""
