"""What somebody sent and nobody has answered yet."""

from __future__ import annotations

import msgspec


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """A submission that nobody has answered."""

    seq: int
    stored_ns: int
    producer: str
    raw: bytes
    #: Whether the producer named itself with what is no token; ``producer`` is then the cleaned name.
    misnamed: bool = False


class Command(msgspec.Struct, frozen=True, array_like=True):
    """An operator's command that nobody has answered. Where it is not readable, ``problem`` says why.

    What it is about is a job, or a device or runtime of a host: the other names are None.
    """

    seq: int
    stored_ns: int
    actor: str
    event_id: str
    job: str | None
    reason: str
    problem: str = ""
    #: The tag of its fact; empty where it is not readable.
    tag: str = ""
    host: str | None = None
    device: str | None = None
    runtime: str | None = None
    model: str | None = None
    vram_mb: int | None = None
    act: str | None = None

    @property
    def about(self) -> str:
        """What it acts on, in one text: two commands about one thing are answered one after the other."""
        return self.job or f"{self.host}/{self.device or self.runtime}"
