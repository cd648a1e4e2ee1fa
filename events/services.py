"""Agents and schedulers answer probes as NATS micro services, so that `nats micro ls|info|stats` shows a site."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import nats.errors
import structlog
from nats.micro.request import Request
from nats.micro.service import Service, ServiceConfig

import gpukeeper
from gpukeeper.events.connection import Connection

_log = structlog.get_logger("gpukeeper.services")

#: Takes the request's bytes, returns the answer's.
Answer = Callable[[bytes], Awaitable[bytes]]


class Services:
    """The endpoints of one process."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stopped = False

    async def stop(self) -> None:
        """Answer no more. May be called twice, and on a closed connection."""
        if self._stopped:
            return
        self._stopped = True
        try:
            await self._service.stop()
        except (nats.errors.Error, TimeoutError) as error:
            _log.debug("service_stop_unanswered", error=str(error))


async def serve(
    connection: Connection,
    *,
    name: str,
    description: str,
    endpoints: Mapping[str, tuple[str, Answer]],
    metadata: Mapping[str, str] | None = None,
) -> Services:
    """Offer ``endpoints`` (name -> subject and answer) under one service name."""
    config = ServiceConfig(
        name=name, version=gpukeeper.__version__, description=description, metadata=dict(metadata or {})
    )
    service = Service(connection.client, config)
    await service.start()
    for endpoint, (subject, answer) in endpoints.items():

        async def handle(request: Request, answer: Answer = answer) -> None:
            await request.respond(await answer(request.data))

        await service.add_endpoint(name=endpoint, subject=subject, handler=handle)
    return Services(service)
