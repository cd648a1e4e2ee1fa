"""One look for many askers: a look that begins after somebody asked answers everybody who had asked by then."""

from __future__ import annotations

import asyncio

from gpukeeper.agents.runtimes.port import Provider
from gpukeeper.events.readings import RuntimeReading


class FreshLooks:
    """Residency of one runtime, never older than the question.

    Who asks while a look is under way gets the next one, which begins when that is over. So eight attempts that come
    at once cost two looks, not eight.
    """

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._next: asyncio.Future[RuntimeReading] | None = None
        self._running: asyncio.Task[None] | None = None

    async def residency(self) -> RuntimeReading:
        """A reading that was begun after this call."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        answer = self._next
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await asyncio.shield(answer)

    async def _run(self) -> None:
        try:
            while self._next is not None:
                # Let everybody who is about to ask in this turn of the loop share the look.
                await asyncio.sleep(0)
                answer, self._next = self._next, None
                try:
                    answer.set_result(await self._provider.residency())
                except Exception as fault:  # noqa: BLE001
                    # A provider that breaks its word: everybody who asked hears of it, and the next look goes on.
                    answer.set_exception(fault)
                    answer.exception()
        finally:
            self._running = None
