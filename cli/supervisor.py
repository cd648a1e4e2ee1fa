"""Keeps a few programs running, in order: each is started when those before it are ready, and stopped before them.

One task owns each program; nothing here polls. A program that dies is started again after a bounded wait; one that
keeps dying ends the whole, as a part that is missing in silence is worse than a service that is down and says why.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gpukeeper.cli.errors import exit_code_of
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.processes import BoundedLog, Child
from gpukeeper.cli.restarts import RestartPolicy, restart_delay_s
from gpukeeper.events.errors import GpukeeperError

_LAST_LINES = 10
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One program to keep running."""

    name: str
    argv: tuple[str, ...]
    #: Added to the environment of this process.
    env: Mapping[str, str] = {}
    #: From SIGTERM to SIGKILL, in seconds: the program's own grace and a margin.
    stop_grace_s: float = 10.0
    #: Returns once the program serves; bounded. An error that is not retryable ends the whole. None: ready at once.
    ready: Callable[[Child], Awaitable[object]] | None = None


class Supervisor:
    """Runs ``parts`` until :meth:`stop`, a signal, or a part that cannot be kept running.

    Logs go to ``<log_folder>/<name>.log``, bounded. ``say`` gets one line for everything an operator should know;
    with ``verbose`` also each line of each part, after its name.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        log_folder: Path,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        verbose: bool = False,
        restarts: RestartPolicy | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self._parts = tuple(parts)
        self._log_folder = log_folder
        self._environ = dict(environ)
        self._own_log = BoundedLog(log_folder / "up.log", echo=say)
        self._echo = say
        self._verbose = verbose
        self._restarts = restarts or RestartPolicy()
        self._on_ready = on_ready
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()
        self._failed: Exit | None = None

    def stop(self, *, at_once: bool = False) -> None:
        """Ask :meth:`run` to stop everything, the last part first; ``at_once`` leaves nobody time to finish."""
        self._stopping.set()
        if at_once:
            self._at_once.set()

    async def run(self) -> Exit:
        """Run until stopped; return the exit status of the whole, which tells a failure and a stop at once.

        SIGTERM, SIGINT and SIGHUP (but under ``nohup``) stop it; a further SIGINT at once. May be called once.

        Raises:
            ProcessStuck: a program did not end even after SIGKILL.
        """
        loop = asyncio.get_running_loop()
        # `nohup` ignores SIGHUP, which is a wish to outlive the terminal. A shell also ignores SIGINT for what a
        # script starts with `&`, which is no wish at all.
        outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = [number for number in _SIGNALS if number != signal.SIGHUP or not outlives_terminal]
        for number in handled:
            loop.add_signal_handler(number, self._signalled, number)
        keepers = [_Keeper(part, self) for part in self._parts]
        try:
            await self._start(keepers)
            await self._stopping.wait()
        finally:
            # Also when cancelled: no program is left behind.
            problems = [problem for keeper in reversed(keepers) if (problem := await keeper.stop()) is not None]
            for number in handled:
                loop.remove_signal_handler(number)
            self._own_log.close()
        if problems:
            raise problems[0]
        if self._failed is not None:
            return self._failed
        return Exit.INTERRUPTED if self._at_once.is_set() else Exit.OK

    async def _start(self, keepers: Sequence[_Keeper]) -> None:
        for keeper in keepers:
            keeper.start()
            await _first(keeper.ready.wait(), self._stopping.wait())
            if self._stopping.is_set():
                return
        if self._on_ready is not None:
            self._on_ready()

    def _signalled(self, number: signal.Signals) -> None:
        again = self._stopping.is_set()
        if again and number == signal.SIGINT:
            self.say("stopping at once")
        elif not again:
            self.say(f"stopping after {number.name}; Ctrl-C stops at once")
        self.stop(at_once=again and number == signal.SIGINT)

    # --- what a keeper needs of the whole

    def fail(self, sentence: str, last_lines: Sequence[str], status: Exit) -> None:
        """A part cannot be kept running: stop everything. Of several, the first decides about the status."""
        self._failed = self._failed or status
        self.say(sentence)
        for line in last_lines[-_LAST_LINES:]:
            self.say(f"  {line}")
        self._stopping.set()

    def log_of(self, name: str) -> BoundedLog:
        def echo(line: str) -> None:
            self._echo(f"[{name}] {line}")

        return BoundedLog(self._log_folder / f"{name}.log", echo=echo if self._verbose else None)

    def environment_of(self, part: Part) -> dict[str, str]:
        return {**self._environ, **part.env}

    def say(self, sentence: str) -> None:
        """Tell the operator, and keep it in ``up.log`` too: the terminal may be gone."""
        self._own_log.write_line(f"{datetime.now(UTC).isoformat(timespec='seconds')} {sentence}".encode())

    @property
    def restarts(self) -> RestartPolicy:
        return self._restarts

    @property
    def at_once(self) -> asyncio.Event:
        return self._at_once


class _Keeper:
    """The one task that starts, watches, restarts and stops one part."""

    def __init__(self, part: Part, whole: Supervisor) -> None:
        self._part = part
        self._whole = whole
        self._log = whole.log_of(part.name)
        self._may_stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.ready = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep())
        # However it ends, the whole must not wait for a part that nobody keeps.
        self._task.add_done_callback(lambda _: self._whole.stop())

    async def stop(self) -> BaseException | None:
        """Stop the program and wait for its end; return what went wrong with keeping it, to be raised.

        Until then it is kept running, whatever else is stopping.
        """
        self._may_stop.set()
        if self._task is None:
            return None
        await asyncio.wait({self._task})
        return self._task.exception()

    async def _keep(self) -> None:
        deaths: list[float] = []
        policy = self._whole.restarts
        while not self._may_stop.is_set():
            how = await self._run_once()
            if self._may_stop.is_set():
                break
            now = time.monotonic()
            deaths = [death for death in deaths if now - death <= policy.window_s] + [now]
            delay_s = restart_delay_s(deaths, now, policy)
            status = exit_code_of(how) if isinstance(how, GpukeeperError) else Exit.MISCONFIGURED
            if isinstance(how, GpukeeperError) and not how.retryable:
                self._whole.fail(f"{self._part.name}: {how}", self._log.tail(), status)
                break
            if delay_s is None:
                often = f"{len(deaths)} times in {policy.window_s:g} s"
                self._whole.fail(f"{self._part.name}: {how}, {often}; its last lines:", self._log.tail(), status)
                break
            self._whole.say(f"{self._part.name}: {how}; starting it again in {delay_s:g} s")
            await _first(self._may_stop.wait(), timeout_s=delay_s)

    async def _run_once(self) -> str | GpukeeperError:
        """Start the program and watch it to its end; return how it ended."""
        environment = self._whole.environment_of(self._part)
        child = await Child.start(self._part.argv, log=self._log, env=environment)
        try:
            if self._part.ready is not None:
                problem = await self._until_ready(self._part.ready(child))
                if problem is not None:
                    return problem
            self.ready.set()
            await _first(child.wait(), self._may_stop.wait())
            if child.ended:
                return _in_words(await child.wait())
            return "stopped"
        finally:
            if not child.ended:
                await self._stop_child(child)

    async def _until_ready(self, ready: Awaitable[object]) -> GpukeeperError | None:
        task = asyncio.ensure_future(ready)
        await _first(task, self._may_stop.wait())
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            return None
        error = task.exception()
        if error is None or isinstance(error, GpukeeperError):
            return error
        raise error

    async def _stop_child(self, child: Child) -> None:
        code = await child.stop(self._part.stop_grace_s, at_once=self._whole.at_once)
        if code == -signal.SIGKILL and not self._whole.at_once.is_set():
            grace = f"{self._part.stop_grace_s:g} s"
            self._whole.say(f"{self._part.name}: did not stop within {grace} and was killed")


async def _first(*waits: Awaitable[object], timeout_s: float | None = None) -> None:
    """Wait until one of ``waits`` is done, or for ``timeout_s``; those that were made here are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    own = [task for task, wait in zip(tasks, waits, strict=True) if task is not wait]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in own:
            task.cancel()


def _in_words(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
