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

#: Takes the request's bytes, returns the answer's. Requests to one endpoint are handed on one after another.
Answer = Callable[[bytes], Awaitable[bytes]]
#: Sends the one answer to one request. What cannot be sent is logged and dropped: whoever asked asks again.
Reply = Callable[[bytes], Awaitable[None]]
#: Takes the request's bytes and what answers it, and returns at once: the answer may come much later.
OnQuestion = Callable[[bytes, Reply], Awaitable[None]]

#: No client hears replies here. What is published here acts or is stored, and would be written with our rights.
_NO_INBOX = ("gpuq.", "$")


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
    questions: Mapping[str, tuple[str, OnQuestion]] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Services:
    """Offer ``endpoints`` (name -> subject and answer) and ``questions``, which may wait, under one service name."""
    config = ServiceConfig(
        name=name, version=gpukeeper.__version__, description=description, metadata=dict(metadata or {})
    )
    service = Service(connection.client, config)
    await service.start()
    for endpoint, (subject, answer) in endpoints.items():

        async def handle(request: Request, answer: Answer = answer) -> None:
            if _may_be_answered(request):
                await request.respond(await answer(request.data))

        await service.add_endpoint(name=endpoint, subject=subject, handler=handle)
    for endpoint, (subject, on_question) in (questions or {}).items():

        async def hand_on(request: Request, on_question: OnQuestion = on_question) -> None:
            if _may_be_answered(request):
                await on_question(request.data, _reply_to(request))

        await service.add_endpoint(name=endpoint, subject=subject, handler=hand_on)
    return Services(service)


def _may_be_answered(request: Request) -> bool:
    """Whether it names an inbox: whoever may ask must not thereby write a fact, or call the server's interface."""
    reply: str = request._msg.reply  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - shown nowhere else
    if not reply.startswith(_NO_INBOX):
        return bool(reply)
    _log.warning("reply_subject_refused", subject=request.subject, reply=reply[:80])
    return False


def _reply_to(request: Request) -> Reply:
    async def reply(answer: bytes) -> None:
        try:
            await request.respond(answer)
        except (nats.errors.Error, OSError) as error:
            _log.info("answer_not_sent", subject=request.subject, error=str(error) or type(error).__name__)

    return reply
