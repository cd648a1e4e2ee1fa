"""`gpuq status` and `gpuq result`."""

from __future__ import annotations

from gpukeeper.cli.errors import NotFound
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.inbox import Inbox
from gpukeeper.cli.jobview import job_document, job_lines
from gpukeeper.cli.livesite import LiveSite
from gpukeeper.cli.options import Where
from gpukeeper.cli.printing import one_line, print_json, say
from gpukeeper.cli.session import Session, open_session
from gpukeeper.cli.viewing import View, view_to_end
from gpukeeper.cli.waiting import is_end
from gpukeeper.events import subjects
from gpukeeper.events.clock import now_ns
from gpukeeper.events.codec import Event
from gpukeeper.events.ids import job_id_at, require_token
from gpukeeper.events.spec import Submission, parse_submission
from gpukeeper.projections.alone import fold_alone
from gpukeeper.projections.site import Site

_LABEL_WIDTH = 9


async def show_status(where: Where, job_id: str, *, as_json: bool) -> Exit:
    """Print one job.

    Raises:
        NotFound: there is no such job.
    """
    require_token(job_id, "ID")
    async with open_session(where) as session:
        live = LiveSite(session)
        try:
            await live.start()
            history = await session.history(subjects.job(job_id))
            job = live.site.jobs.get(job_id) or fold_alone(history, job_id)
            if job is None:
                return await _show_submitted(session, live.site, job_id, as_json=as_json)
            document = job_document(job, history, live.site, live.heard, now_ns=now_ns())
        finally:
            await live.stop()
    if as_json:
        print_json(document)
    else:
        for label, text in job_lines(document):
            say(f"{label:<{_LABEL_WIDTH}}  {one_line(text, 2000)}")
    return Exit.OK


async def _show_submitted(session: Session, site: Site, job_id: str, *, as_json: bool) -> Exit:
    """A submission that nobody has answered yet is no job yet, and is not lost either."""
    for waiting in site.submissions.values():
        parsed = parse_submission(waiting.raw)
        asked = parsed.spec.id if isinstance(parsed, Submission) else None
        if job_id in (asked, job_id_at(waiting.seq, waiting.stored_ns)):
            runs = await session.scheduler_answers()
            why = "not answered yet" if runs else "no scheduler is running"
            document = {"id": job_id, "phase": "submitted", "submission_seq": waiting.seq, "detail": why}
            if as_json:
                print_json(document)
            else:
                say(f"{'job':<{_LABEL_WIDTH}}  {job_id}")
                say(f"{'phase':<{_LABEL_WIDTH}}  submitted as sequence {waiting.seq}, not yet accepted: {why}")
            return Exit.OK
    raise no_such_job(job_id)


async def show_result(where: Where, job_id: str, view: View, *, waits: bool) -> Exit:
    """Print what a job came to.

    Raises:
        NotFound: there is no such job, or it has no result (yet).
        WaitTimedOut: it did not end in time; it goes on.
    """
    subject = subjects.job(job_id)
    async with open_session(where, follows=waits) as session, Inbox(session) as inbox:
        if view.streams:
            await inbox.hear_output(job_id)
        if not waits:
            require_ended(await session.history(subject), job_id)
        elif await session.log.last(subject) is None:
            raise no_such_job(job_id)
        await inbox.follow(subject, after=0)
        return await view_to_end(session, inbox, job_id, view, {})


def require_ended(history: list[Event], job_id: str) -> None:
    """Raise :class:`NotFound` where the events of a job hold no end."""
    if not history:
        raise no_such_job(job_id)
    if not any(is_end(event, job_id) for event in history):
        raise NotFound(f"job {job_id} has not ended, so it has no result yet; --wait waits for it", job=job_id)


def no_such_job(job_id: str) -> NotFound:
    """The error for an id that names no job."""
    return NotFound(f"there is no job {job_id}", job=job_id)
