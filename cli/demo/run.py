"""`gpuq demo`: starts it, plays it, and leaves nothing behind, whatever happens."""

from __future__ import annotations

import asyncio
import signal
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.printing import one_line, say, tell
from gpukeeper.events.errors import ConfigError
from gpukeeper.events.tasks import end_all

if TYPE_CHECKING:
    from gpukeeper.cli.demo.narration import Narration
    from gpukeeper.cli.demo.site import DemoSite

#: What the extra `demo` brings, as import names.
_MODULES = ("xllamacpp", "gguf", "numpy")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_demo() -> Exit:
    """Play the demonstration; OK only when everything was as it should be.

    Raises:
        ConfigError: the extra is not installed.
    """
    require_extra(_MODULES)
    return asyncio.run(_run())


def require_extra(modules: tuple[str, ...]) -> None:
    """Raise ConfigError where one of ``modules`` cannot be imported."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the demo needs {', '.join(missing)}: pip install 'gpukeeper[demo]'", missing=missing)


async def _run() -> Exit:
    """A signal ends the playing. The cleaning up that follows heeds no more signals, and is bounded."""
    from gpukeeper.cli.demo.narration import Narration
    from gpukeeper.cli.demo.site import DemoSite

    loop = asyncio.get_running_loop()
    narration = Narration()
    site = DemoSite()
    interrupted = asyncio.Event()
    for number in _SIGNALS:
        loop.add_signal_handler(number, interrupted.set)
    playing = asyncio.create_task(_play(site, narration))
    waiting = asyncio.create_task(interrupted.wait())
    try:
        await asyncio.wait({playing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        await end_all({waiting} if playing.done() else {playing, waiting})
    finally:
        left = await site.stop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    narration.step("The end")
    narration.check("every process has ended, and the folder is gone", holds=not left)
    for each in left:
        narration.line(f"left behind: {each}")
    if playing.cancelled() or interrupted.is_set():
        return Exit.INTERRUPTED
    if (error := playing.exception()) is not None:
        raise error
    if narration.wrong:
        tell(f"gpuq: {len(narration.wrong)} not as it should be: {one_line('; '.join(narration.wrong), 2000)}")
        return Exit.JOB_FAILED
    return Exit.OK


async def _play(site: DemoSite, narration: Narration) -> None:
    from gpukeeper.cli.demo.script import play

    say("gpuq demo: a whole site in a temporary folder, with a real llama.cpp server and a tiny model made just now.")
    await site.start()
    await play(site, narration)
