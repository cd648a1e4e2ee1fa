"""Where the log lines of a command go: stderr, never stdout, one line an event."""

from __future__ import annotations

import sys

import structlog


def log_to_stderr(level: int) -> None:
    """One line an event on stderr: time, level, a short name, fields. Bodies and secrets are never fields."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),
        cache_logger_on_first_use=False,  # sys.stderr is looked up anew: tests replace it
    )
