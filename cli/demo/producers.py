"""Submits as a program without any library of ours does: connect, publish JSON, read the acknowledgement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import nats

from gpukeeper.cli.credentials import load_credentials

_ANSWER_S = 5.0


class Ack(msgspec.Struct, frozen=True):
    """JetStream's answer to a stored message."""

    stream: str
    seq: int


class RawProducer:
    """A producer with the login that `gpuq up` made for producers: it may submit, and nothing else."""

    def __init__(self, data: Path, name: str) -> None:
        self._data = data
        self._subject = f"gpuq.submit.{name}"
        self.name = name

    async def submit(self, *messages: tuple[str, bytes]) -> list[Ack]:
        """Publish each (message id, body) and return the acknowledgements."""
        site = load_credentials(self._data)
        login = site.producer
        client = await nats.connect(
            site.url or "", user=login.user, password=login.password, inbox_prefix=login.inbox_prefix
        )
        try:
            return [await self._publish(client, message_id, body) for message_id, body in messages]
        finally:
            await client.close()

    async def _publish(self, client: Any, message_id: str, body: bytes) -> Ack:
        answer = await client.request(self._subject, body, timeout=_ANSWER_S, headers={"Nats-Msg-Id": message_id})
        return msgspec.json.decode(answer.data, type=Ack)


def bare(**fields: Any) -> bytes:
    """A job as bare JSON."""
    return json.dumps(fields).encode()


def cloud_event(event_id: str, **fields: Any) -> bytes:
    """A job in a CloudEvent."""
    return json.dumps(
        {
            "specversion": "1.0",
            "id": event_id,
            "source": "/demo/producer",
            "type": "gpuq.job.submitted.v1",
            "data": fields,
        }
    ).encode()
