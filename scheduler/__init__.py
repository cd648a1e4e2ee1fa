"""Decisions, and the shell that commits them.

What holds in this package:

- ``accept``, ``feasible``, ``rank``, ``route``, ``reap``, ``control`` are pure: folded state, evidence and time go in,
  proposals come out. No clock, ids, randomness, environment or I/O.
- A proposal names the sequence it was decided on. Losing it means: fold on, decide again.
- ``service.py`` is the only module that waits or appends; ``lease.py`` the only one that knows who leads. Two leaders
  are harmless: sequences decide.
"""
