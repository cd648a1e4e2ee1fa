"""Messages for tests of the log."""

from __future__ import annotations

import msgspec

from gpukeeper.events.log import Record


def record(subject: str, event_id: str, *, expected: int | None = None, data: object = None) -> Record:
    """An event with this id, whose type nobody knows."""
    body = msgspec.json.encode(
        {
            "specversion": "1.0",
            "id": event_id,
            "source": "/tests",
            "type": "tests.note.v1",
            "subject": "tests",
            "time": "2025-10-19T14:00:00Z",
            "data": data,
        }
    )
    return Record(subject=subject, body=body, event_id=event_id, expected=expected)
