"""Decisions, and the shell that commits them.

What holds in this package:

- ``accept``, ``feasible``, ``rank``, ``route``, ``reap``, ``control`` are pure: folded state, evidence and time go in,
  proposals come out. No clock, ids, randomness, environment or I/O.
- A proposal names the sequence it was decided on. Losing it means: fold on, decide again.
- ``desk.py`` commits what was decided, ``service.py`` is the process around it, and ``lease.py`` alone knows who leads.
  Nothing else waits or appends. Two leaders are harmless: sequences decide.
"""
