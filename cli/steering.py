"""`gpuq drain`, `resume`, `pin`, `unpin`, `runtime` and `reclaim`: a command, and what became of it."""

from __future__ import annotations

import asyncio

from gpukeeper.cli.answering import Answers
from gpukeeper.cli.commanding import raise_if_refused, send, unanswered
from gpukeeper.cli.devicewords import kept_in_words
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.freeing import Freeing
from gpukeeper.cli.inbox import Inbox, following
from gpukeeper.cli.options import Where
from gpukeeper.cli.orders import Order
from gpukeeper.cli.printing import one_line, print_json, say, tell
from gpukeeper.cli.quantities import megabytes
from gpukeeper.cli.reasonwords import in_words
from gpukeeper.cli.session import open_session
from gpukeeper.cli.words import sentence, type_name
from gpukeeper.events import subjects
from gpukeeper.events.codec import Event
from gpukeeper.events.device import ReclaimRefused
from gpukeeper.events.errors import WaitTimedOut


async def carry_out(where: Where, order: Order, *, timeout_s: float, as_json: bool) -> Exit:
    """Send the command, wait for its answers, and show them.

    Raises:
        NotFound: there is no such host, device or runtime.
        Refused: the scheduler refused, and why.
        WaitTimedOut: nobody answered in time; the command, or the wish, stands in the log.
        LogUnavailable: the command is not stored, or nobody can say.
    """
    subject = (subjects.device if order.on_device else subjects.runtime)(order.place.host, order.place.name)
    async with open_session(where) as session:
        seq = await send(session, order.fact, about=str(order.place), what=f"`{order.what}`")
        heard = Answers(seq)
        async with following(session, subject, subjects.SITE, after=seq) as inbox:
            try:
                async with asyncio.timeout(timeout_s):
                    await _hear(inbox, heard, order, seq, prints=not as_json)
            except TimeoutError:
                if heard.yes is None:
                    raise await unanswered(session, f"`{order.what}`", timeout_s, seq=seq) from None
    return _tell(order, heard, seq, timeout_s, as_json=as_json)


async def _hear(inbox: Inbox, heard: Answers, order: Order, seq: int, *, prints: bool) -> None:
    while not heard.ended:
        event = await inbox.next_event()
        raise_if_refused(event, seq, f"`{order.what}` is not done", place=str(order.place))
        if heard.take(event) and prints:
            say(f"{order.place} {one_line(_sentence(event), 2000)}")


def _sentence(event: Event) -> str:
    """One event; who stays, and why, follows in lines of their own (:func:`_tell_freed`)."""
    fact = event.data
    if isinstance(fact, ReclaimRefused) and fact.considered:
        return f"nothing is freed, {in_words(fact.reason)}"
    return sentence(event)


def _tell(order: Order, heard: Answers, seq: int, timeout_s: float, *, as_json: bool) -> Exit:
    """The outcome as one document, or what the lines have not said yet."""
    if not heard.ended:
        _raise_unless_freed(order, heard, timeout_s)
    if as_json:
        shown = [{"seq": event.seq, "type": type_name(event), "text": sentence(event)} for event in heard.events]
        names = {"host": order.place.host, "name": order.place.name, "model": order.place.model}
        print_json({"command": order.verb, **names, "seq": seq, **heard.document(), "events": shown})
    elif heard.freeing is not None:
        _tell_freed(order, heard.freeing)
    return heard.exit


def _raise_unless_freed(order: Order, heard: Answers, timeout_s: float) -> None:
    """The agent has not said its last word; where something was freed already that is told all the same."""
    assert heard.yes is not None
    host, wanted_seq = order.place.host, heard.yes.seq
    words = (
        f"`{order.what}` is wanted as event {wanted_seq}, and the agent of {host} has not answered in full within "
        f"{timeout_s:g} s; it may still do it: see `gpuq events --host {host}`"
    )
    if heard.freeing is None or not heard.freeing.freed_mb:
        raise WaitTimedOut(words, wanted_seq=wanted_seq)
    tell(f"gpuq: {words}")


def _tell_freed(order: Order, freeing: Freeing) -> None:
    for each in freeing.considered:
        if each.kept is not None:
            say(f"  {one_line(kept_in_words(each))}")
    of = "" if freeing.vram_mb is None else f"; wanted usable: {megabytes(freeing.vram_mb)}"
    say(f"{order.place} freed as measured: {megabytes(freeing.freed_mb)}{of}")
