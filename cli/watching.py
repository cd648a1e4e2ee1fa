"""`gpuq watch`: what happens, as it happens."""

from __future__ import annotations

from gpukeeper.cli.eventscreen import EventLines, cloud_event, submission_of
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.inbox import Inbox, following
from gpukeeper.cli.logrange import Filter
from gpukeeper.cli.options import Where
from gpukeeper.cli.printing import one_line, print_json_line, say, tell
from gpukeeper.cli.quantities import clock_time
from gpukeeper.cli.session import open_session
from gpukeeper.cli.waiting import is_end
from gpukeeper.cli.words import IMPORTANT, about, sentence
from gpukeeper.events.codec import Event
from gpukeeper.events.ids import require_token
from gpukeeper.events.job import Succeeded


def news_line(event: Event) -> str:
    """One line of news: time, whom, what."""
    return f"{clock_time(event.stored.stored_ns)}  {one_line(about(event), 80)}  {one_line(sentence(event))}"


async def watch_site(where: Where, *, everything: bool, as_json: bool) -> Exit:
    """Print what is stored from now on, until interrupted.

    Raises:
        LogUnavailable: the log cannot be followed (any more).
    """
    async with open_session(where, follows=True) as session, Inbox(session) as inbox:
        after = await session.log.last_seq()
        await inbox.follow(after=after)
        tell(f"watching what comes after event {after}; Ctrl-C ends")
        while True:
            event = await inbox.next_event()
            if not everything and not isinstance(event.data, IMPORTANT):
                continue
            if as_json:
                print_json_line(cloud_event(event))
            else:
                say(news_line(event))


async def watch_job(where: Where, job_id: str, *, as_json: bool) -> Exit:
    """Print everything about one job, from its submission to its end.

    Raises:
        NotFound: there is no such job.
        LogUnavailable: the log cannot be followed (any more).
    """
    require_token(job_id, "ID")
    lines = EventLines(with_about=False)
    async with open_session(where, follows=True) as session:
        submission_seq = await submission_of(session, job_id)
        wanted = Filter(job=job_id, submission_seq=submission_seq)
        if not as_json:
            say(lines.header())
        async with following(session, *wanted.patterns(), after=submission_seq - 1) as inbox:
            while True:
                event = await inbox.next_event()
                if not wanted.matches(event):
                    continue
                if as_json:
                    print_json_line(cloud_event(event))
                else:
                    say(lines.line(event))
                if is_end(event, job_id):
                    return Exit.OK if isinstance(event.data, Succeeded) else Exit.JOB_FAILED
