"""One analysis engine of KataGo that runs inside a container, and the questions that it is answering."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from ulid import ULID

from gpukeeper.agents.containers.port import ContainerFailure, Exec
from gpukeeper.agents.runtimes import katago_wire as wire
from gpukeeper.agents.runtimes.failures import shown
from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.events.reasons import Reason

_log = structlog.get_logger("gpukeeper.katago")

_Line = tuple[wire.Answer, bytes] | RuntimeFailure


class AnalysisEngine:
    """A started engine. One task reads its output and hands each line to the question that it answers."""

    def __init__(self, program: Exec) -> None:
        self.program = program
        self._waiting: dict[str, asyncio.Queue[_Line]] = {}
        #: Questions that were given up, with how many final lines are still to come.
        self._abandoned: dict[str, int] = {}
        self._failure: RuntimeFailure | None = None
        self._reader = asyncio.create_task(self._read(), name="katago")

    @property
    def alive(self) -> bool:
        """Whether its output is still open, as far as this has been read."""
        return not self._reader.done()

    @property
    def asked(self) -> int:
        """How many questions have no end yet."""
        return len(self._waiting) + len(self._abandoned)

    async def ready(self) -> None:
        """Return when it answers, which it does once its model is loaded.

        Raises:
            RuntimeFailure: LOAD_FAILED, with the last that it wrote.
        """
        run_id = str(ULID())
        answers = self.expect(run_id)
        try:
            await self.send(wire.action("query_version", run_id))
            await self.take(answers)
        except RuntimeFailure as failure:
            raise RuntimeFailure(Reason.LOAD_FAILED, failure.detail) from failure
        finally:
            self.forget(run_id)

    def ask(self, analysis: dict[str, Any]) -> Question:
        """A question that is asked when its first line is wanted."""
        return Question(self, analysis)

    async def end(self) -> bool:
        """Kill it. Returns whether it is proven to have ended."""
        ended = await self.program.kill()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._fail(RuntimeFailure(Reason.RUNTIME_CUT, "KataGo was ended"))
        return ended

    # --- for questions

    def expect(self, run_id: str) -> asyncio.Queue[_Line]:
        """Lines with this id are kept from now on."""
        self._waiting[run_id] = asyncio.Queue()
        return self._waiting[run_id]

    def forget(self, run_id: str) -> None:
        """They are not any more."""
        self._waiting.pop(run_id, None)

    def abandon(self, run_id: str, lines: int) -> None:
        """Nobody waits for it any more, yet it is under way until that many final lines have come."""
        self.forget(run_id)
        self._abandoned[run_id] = lines

    async def send(self, line: bytes) -> None:
        """Write one line to the engine.

        Raises:
            RuntimeFailure: it has ended.
        """
        if self._failure is not None:
            raise self._failure
        try:
            await self.program.write(line)
        except ContainerFailure as failure:
            # Its output says more of why it went.
            await asyncio.wait({self._reader}, timeout=1.0)
            raise self._failure or RuntimeFailure(Reason.RUNTIME_CUT, f"KataGo: {failure.detail}") from failure

    async def take(self, answers: asyncio.Queue[_Line]) -> tuple[wire.Answer, bytes]:
        """The next line for one question.

        Raises:
            RuntimeFailure: the line is an error, or the engine has ended.
        """
        if self._failure is not None and answers.empty():
            raise self._failure
        item = await answers.get()
        if isinstance(item, RuntimeFailure):
            raise item
        answer, line = item
        if answer.error is not None:
            where = f" (field {answer.field})" if answer.field else ""
            words = f"KataGo: {shown(answer.error.encode('utf-8', 'replace'))}{where}"
            raise RuntimeFailure(Reason.RUNTIME_ERROR, words)
        return answer, line

    async def _read(self) -> None:
        try:
            while (line := await self.program.line()) is not None:
                self._hand(line)
            code = await self.program.exit_code()
            said = self.program.complaint
            words = f"KataGo ended{'' if code is None else f' with exit code {code}'}{f': {said}' if said else ''}"
            self._fail(RuntimeFailure(Reason.RUNTIME_CUT, shown(words.encode("utf-8", "replace"))))
        except RuntimeFailure as failure:
            self._fail(failure)
        except ContainerFailure as failure:
            self._fail(RuntimeFailure(Reason.RUNTIME_CUT, f"KataGo: {failure.detail}"))

    def _hand(self, line: bytes) -> None:
        if not line.lstrip().startswith(b"{"):
            # Configurations can send its log to standard output too.
            _log.info("katago_says", words=shown(line))
            return
        answer = wire.read(line)
        if answer.id is not None:
            if answer.id in self._waiting:
                self._waiting[answer.id].put_nowait((answer, line))
            elif answer.id in self._abandoned and not answer.is_during_search and answer.warning is None:
                self._abandoned[answer.id] -= 1
                if self._abandoned[answer.id] <= 0 or answer.error is not None:
                    del self._abandoned[answer.id]
        elif answer.error is not None:
            # It could not even read the question's id: nobody knows whose it was.
            for queue in self._waiting.values():
                queue.put_nowait((answer, line))

    def _fail(self, failure: RuntimeFailure) -> None:
        self._failure = self._failure or failure
        self._abandoned.clear()
        for queue in self._waiting.values():
            queue.put_nowait(self._failure)


class Question:
    """One analysis. When :meth:`partial` says that there is no more, ``lines`` holds the final answers."""

    def __init__(self, engine: AnalysisEngine, analysis: dict[str, Any]) -> None:
        self._engine = engine
        self._analysis = analysis
        self._id = str(ULID())
        self._asked = False
        self._answers = engine.expect(self._id)
        self.lines: list[bytes] = []

    async def partial(self) -> bool:
        """Wait for the next line. True: a partial answer. False: the last one, and ``lines`` is whole.

        Raises:
            RuntimeFailure: the engine refused, ended, or sent what it should not.
        """
        engine = self._engine
        if not self._asked:
            self._asked = True
            await engine.send(wire.question(self._analysis, self._id))
        while True:
            answer, line = await engine.take(self._answers)
            if answer.warning is not None:
                _log.info("katago_warns", words=shown(answer.warning.encode("utf-8", "replace")), field=answer.field)
                continue
            if answer.is_during_search:
                return True
            self.lines.append(line)
            if len(self.lines) == wire.turns(self._analysis):
                self.close()
                return False

    async def give_up(self) -> None:
        """Tell the engine to search no further for this one. It says so when it does not any more."""
        self.close()
        if self._asked and self._engine.alive:
            self._engine.abandon(self._id, wire.turns(self._analysis) - len(self.lines))
            await self._engine.send(wire.action("terminate", str(ULID()), terminateId=self._id))

    def close(self) -> None:
        """Expect no further line."""
        self._engine.forget(self._id)
