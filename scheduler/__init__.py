"""Decisions over folded state. Pure: no clock, ids, randomness, environment or I/O inside."""
