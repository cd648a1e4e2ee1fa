"""What the demonstration shows, step by step. Each step says what it does, shows it, and checks it."""

from __future__ import annotations

import asyncio
import shlex
from asyncio.subprocess import PIPE

from gpukeeper.cli.demo.narration import Narration
from gpukeeper.cli.demo.producers import RawProducer, bare, cloud_event
from gpukeeper.cli.demo.site import DEVICE_MB, HOST, MODEL, DemoSite
from gpukeeper.cli.eventscreen import EventLines, submission_of
from gpukeeper.cli.inbox import following
from gpukeeper.cli.livesite import LiveSite
from gpukeeper.cli.logrange import Filter
from gpukeeper.cli.printing import one_line, say, write_text
from gpukeeper.cli.quantities import megabytes
from gpukeeper.cli.session import Session
from gpukeeper.cli.waiting import read_result, text_of, until_ended
from gpukeeper.cli.words import problems_in_words, sentence
from gpukeeper.events import subjects
from gpukeeper.events.codec import decode
from gpukeeper.events.errors import WaitTimedOut
from gpukeeper.events.ids import job_id_at
from gpukeeper.events.job import Rejected, Succeeded
from gpukeeper.events.log import Stored
from gpukeeper.events.reasons import Reason
from gpukeeper.projections.job import ACTIVE, Phase
from gpukeeper.projections.site import Site
from gpukeeper.projections.snapshot import digest

_END_S = 30.0
#: Name, tokens and priority. The first runs long enough for the others to queue behind it.
_QUEUED = (("demo-a", 200, 0), ("demo-b", 30, 0), ("demo-c", 30, 0), ("demo-urgent", 30, 10))
_STREAMED_TOKENS = 80


async def play(demo: DemoSite, narration: Narration) -> None:
    """Play all of it on a site that is up.

    Raises:
        GpukeeperError: the site did not do its part, in words.
    """
    async with demo.session() as session:
        live = LiveSite(session)
        try:
            await demo.until_joined(session, live)
            _show_site(session, live, narration)
            producer = RawProducer(session.data, "demo")
            await _show_producers(session, producer, narration)
            streamed = await _show_stream(demo, session, narration)
            await _show_refusal(session, producer, narration)
            await _show_queue(session, producer, narration)
            await _show_history(session, streamed, narration)
            await _show_refold(session, live, narration)
        except TimeoutError:
            raise WaitTimedOut(f"the jobs of the demonstration did not end within {_END_S:g} s") from None
        finally:
            await live.stop()


def _show_site(session: Session, live: LiveSite, narration: Narration) -> None:
    narration.step("A site is up: NATS, a scheduler, an agent")
    narration.line(f"NATS at {session.settings.servers[0]}, its data and everything else in {session.data.parent}")
    host = live.site.hosts[HOST]
    for device in live.site.devices.values():
        narration.line(f"device {device.key}: {device.name}, {megabytes(device.total_mb)}, {device.slots} slot")
    for runtime in host.registry:
        narration.line(f"runtime {runtime.name}: {runtime.provider} at {runtime.url}, models: {runtime.models}")
    healthy = [runtime.name for runtime in host.registry if runtime.healthy]
    narration.check("the agent has joined, and its runtime answers", holds=bool(healthy) and not host.left)


async def _show_producers(session: Session, producer: RawProducer, narration: Narration) -> None:
    narration.step("Programs submit with a plain NATS publish, as bare JSON and as a CloudEvent")
    first = bare(id="demo-json", model=MODEL, prompt="Hello", max_tokens=12)
    second = cloud_event("demo-event-1", id="demo-event", model=MODEL, prompt="Hello again", max_tokens=12)
    for body in (first, second):
        narration.line(f"publish gpuq.submit.{producer.name}  {body.decode()}")
    acks = await producer.submit(("demo-json-1", first), ("demo-event-1", second), ("demo-event-1", second))
    narration.line(f"acknowledged as sequences {', '.join(str(ack.seq) for ack in acks)} of the log")
    narration.check("the same message sent twice is stored once", holds=acks[1].seq == acks[2].seq)
    for job_id in ("demo-json", "demo-event"):
        text = await _text_of_end(session, job_id, narration)
        narration.check(f"{job_id} succeeded and said: {text}", holds=bool(text))


async def _show_stream(demo: DemoSite, session: Session, narration: Narration) -> str:
    narration.step("The command line submits and shows the text as it is generated")
    job_id = "demo-stream"
    arguments = ("submit", "--stream", "--id", job_id, "--model", MODEL, "--max-tokens", str(_STREAMED_TOKENS))
    narration.line(f"$ gpuq {shlex.join((*arguments, 'Tell me more'))}")
    process = await asyncio.create_subprocess_exec(
        *demo.gpuq(*arguments, "Tell me more"), stdout=PIPE, stderr=PIPE, env=demo.environ
    )
    heard = b""
    pieces = 0
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        while piece := await process.stdout.read(4096):
            heard += piece
            pieces += 1
            write_text(piece.decode("utf-8", "replace"))
        said = await process.stderr.read()
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = await _text_of_end(session, job_id, narration)
    shown = heard.decode("utf-8", "replace").rstrip("\n")
    narration.line(f"on stderr: {said.decode('utf-8', 'replace').strip()}")
    narration.check(
        f"the text came in {pieces} pieces and is the result of {job_id}", holds=shown == text and pieces > 1
    )
    narration.check("exit status 0", holds=status == 0)
    return job_id


async def _show_refusal(session: Session, producer: RawProducer, narration: Narration) -> None:
    narration.step("A job that can never fit is refused with the field and the reason, and blocks nobody")
    body = bare(id="demo-huge", model=MODEL, prompt="Hello", need={"vram_mb": DEVICE_MB * 100})
    narration.line(f"publish gpuq.submit.{producer.name}  {body.decode()}")
    (ack,) = await producer.submit(("demo-huge-1", body))
    stored = await session.log.get(ack.seq)
    assert stored is not None
    place = job_id_at(stored.seq, stored.stored_ns)
    async with following(session, subjects.job(place), after=ack.seq) as inbox:
        fact = (await until_ended(inbox, place, timeout_s=_END_S)).data
    assert isinstance(fact, Rejected)
    narration.line(f"rejected: {problems_in_words(fact.problems)}")
    narration.check(f"refused with reason {fact.reason}", holds=fact.reason is Reason.NEED_EXCEEDS_DEVICES)


async def _show_queue(session: Session, producer: RawProducer, narration: Narration) -> None:
    narration.step("Four jobs for one slot: the queue as it moves (the last one is urgent)")
    jobs = [
        (f"{name}-1", bare(id=name, model=MODEL, prompt=name, max_tokens=tokens, priority=priority))
        for name, tokens, priority in _QUEUED
    ]
    names = [name for name, _, _ in _QUEUED]
    after = await session.log.last_seq()
    site = Site()
    order: list[str] = []
    shown = ""
    async with following(session, after=0) as inbox, asyncio.timeout(_END_S):
        await producer.submit(*jobs)
        while not all(name in site.jobs and site.jobs[name].ended for name in names):
            event = await inbox.next_event()
            site.apply(event)
            if event.seq <= after:
                continue
            running = [job_id for job_id in site.live if site.jobs[job_id].phase in ACTIVE]
            order += [name for name in running if name not in order]
            line = f"running: {', '.join(running) or '-':<12}  waiting: {', '.join(site.queue) or '-'}"
            if line != shown:
                narration.line(line)
                shown = line
    narration.line(f"they ran in this order: {', '.join(order)}")
    succeeded = all(site.jobs[name].phase is Phase.SUCCEEDED for name in names)
    narration.check("all four succeeded, one at a time", holds=succeeded and sorted(order) == sorted(names))
    narration.check("the urgent one passed those that waited", holds=order[1:2] == ["demo-urgent"])


async def _show_history(session: Session, job_id: str, narration: Narration) -> None:
    narration.step(f"Everything that happened to {job_id}, with the time between")
    submission_seq = await submission_of(session, job_id)
    wanted = Filter(job=job_id, submission_seq=submission_seq)
    lines = EventLines(with_about=False)
    events = [
        event for event in await session.history(*wanted.patterns(), after=submission_seq - 1) if wanted.matches(event)
    ]
    for event in events:
        say(f"   {one_line(lines.line(event), 160)}")
    ends = [event for event in events if isinstance(event.data, Succeeded)]
    narration.check(f"{len(events)} events, one end", holds=len(ends) == 1)


async def _show_refold(session: Session, live: LiveSite, narration: Narration) -> None:
    narration.step("The log is the only truth: the state folded again from its first event")
    live_digest, seq = digest(live.site), live.site.seq
    live_jobs = len(live.site.jobs)
    again = Site(live.site.retention)

    def fold(stored: Stored) -> None:
        if stored.seq <= seq:
            again.apply(decode(stored))

    follower = await session.log.follow(fold, after=0)
    try:
        await follower.wait_seen(seq, _END_S)
    finally:
        await follower.stop()
    narration.line(f"live state:       sequence {seq}, {live_jobs} jobs, digest {live_digest}")
    narration.line(f"folded from 1 on: sequence {again.seq}, {len(again.jobs)} jobs, digest {digest(again)}")
    narration.check("they are the same, byte for byte", holds=(again.seq, digest(again)) == (seq, live_digest))


async def _text_of_end(session: Session, job_id: str, narration: Narration) -> str | None:
    """The text of the job's result, once it has ended; None where it did not succeed."""
    async with following(session, subjects.job(job_id), after=0) as inbox:
        end = await until_ended(inbox, job_id, timeout_s=_END_S)
    if isinstance(end.data, Succeeded):
        return text_of(await read_result(session, end.data))
    narration.line(f"{job_id} {sentence(end)}")
    return None
