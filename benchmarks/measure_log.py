"""Appends, folds and starts from a snapshot."""

from __future__ import annotations

import asyncio
import time
from itertools import count

from bench_site import BenchServer, prepare
from figures import Figure, at_least_ratio, at_most
from msgspec.structs import replace
from nats.js.api import ConsumerConfig, DeliverPolicy

from gpukeeper.events import device, job, route
from gpukeeper.events.clock import new_id, now_rfc3339
from gpukeeper.events.codec import decode, encode
from gpukeeper.events.connection import Connection
from gpukeeper.events.fact import Fact
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.log import Record, Stored
from gpukeeper.events.objects import JetStreamObjects
from gpukeeper.events.recorder import Recorder, Stamp
from gpukeeper.events.subjects import LOG_STREAM, SNAPSHOTS_BUCKET
from gpukeeper.projections import snapshot
from gpukeeper.projections.runner import SiteProjection
from gpukeeper.projections.site import Site

_PRODUCERS = 64
_CLOCK = job.Clock(limit_s=600.0)
_CLOCKS = job.Clocks(queue=_CLOCK, load=_CLOCK, first_byte=_CLOCK, idle=_CLOCK, run=_CLOCK)
_BODY = b'{"model":"fake","prompt":"' + b"x" * 300 + b'","max_tokens":16}'


async def raw_rate(connection: Connection, total: int, subject: str = "gpuq.submit.raw") -> float:
    """Appends per second of the bare client, 64 at once."""
    numbers = iter(range(total))
    stamp = new_id()

    async def producer() -> None:
        for number in numbers:
            await connection.js.publish(subject, _BODY, headers={"Nats-Msg-Id": f"{stamp}-{number}"})

    began = time.perf_counter()
    await asyncio.gather(*(producer() for _ in range(_PRODUCERS)))
    return total / (time.perf_counter() - began)


async def _our_rate(connection: Connection, total: int) -> float:
    recorder = Recorder(JetStreamLog(connection), Stamp(source="/bench", new_id=new_id, now=now_rfc3339))
    numbers = iter(range(total))

    async def producer() -> None:
        for _ in numbers:
            await recorder.settle(Record(subject="gpuq.submit.ours", body=_BODY, event_id=new_id()))

    began = time.perf_counter()
    await asyncio.gather(*(producer() for _ in range(_PRODUCERS)))
    return total / (time.perf_counter() - began)


async def measure_accepts(connection: Connection, *, total: int = 6_000, rounds: int = 3) -> Figure:
    """Publish to acknowledgement, ours and the bare client's, in turns; the median of the rounds."""
    await raw_rate(connection, 500)
    ours: list[float] = []
    raw: list[float] = []
    for _ in range(rounds):
        raw.append(await raw_rate(connection, total))
        ours.append(await _our_rate(connection, total))
    return at_least_ratio(
        "durable_accepts", sorted(ours)[rounds // 2], sorted(raw)[rounds // 2], "accepts/s", 0.7, "64 producers"
    )


def life_of(number: int) -> list[tuple[str, Fact | None]]:
    """The subjects and facts of one job's life; None stands for its submission."""
    name, host, gpu = f"j{number}", "bench", f"d{number % 8}"
    return [
        ("gpuq.submit.bench", None),
        (
            f"gpuq.ev.job.{name}",
            job.Accepted(
                job=name,
                submission_seq=0,
                producer="bench",
                digest="0" * 64,
                kind="inference",
                task="generate",
                model="fake",
                clocks=_CLOCKS,
            ),
        ),
        (
            f"gpuq.ev.route.{host}.{name}",
            route.Routed(
                job=name, host=host, device=gpu, runtime="noop", submission_seq=1, job_seq=2, attempt=1, clocks=_CLOCKS
            ),
        ),
        (
            f"gpuq.ev.device.{host}.{gpu}",
            device.Claimed(
                host=host, device=gpu, slot=0, job=name, attempt=1, route_seq=3, boot_id="b", instance_id="i"
            ),
        ),
        (
            f"gpuq.ev.job.{name}",
            job.Admitted(
                job=name,
                host=host,
                device=gpu,
                slot=0,
                epoch=4,
                attempt=1,
                route_seq=3,
                runtime="noop",
                instance_id="i",
                resident=True,
            ),
        ),
        (
            f"gpuq.ev.job.{name}",
            job.PlacementVerified(job=name, epoch=4, runtime="noop", model="fake", intended="cpu"),
        ),
        (f"gpuq.ev.job.{name}", job.Started(job=name, epoch=4, attempt=1)),
        (f"gpuq.ev.job.{name}", job.Succeeded(job=name, epoch=4, attempt=1)),
        (f"gpuq.ev.device.{host}.{gpu}", device.Released(host=host, device=gpu, epoch=4, job=name)),
    ]


def body_of(fact: Fact | None) -> bytes:
    if fact is None:
        return _BODY
    return encode(fact, event_id=new_id(), source="/bench", subject="bench", time=now_rfc3339())


async def fill(connection: Connection, events: int) -> None:
    """Write a history of whole jobs into the log, 64 appends at once."""
    log = JetStreamLog(connection)
    places = asyncio.Semaphore(_PRODUCERS)

    async def write(subject: str, fact: Fact | None) -> None:
        async with places:
            await log.append(Record(subject=subject, body=body_of(fact), event_id=new_id()))

    written = 0
    for number in count():
        if written >= events:
            return
        life = life_of(number)
        await asyncio.gather(*(write(subject, fact) for subject, fact in life))
        written += len(life)


async def measure_folds(connection: Connection) -> Figure:
    """A whole fold of the log, against the client's own ordered consumer with an empty callback."""
    last = await JetStreamLog(connection).last_seq()
    raw: list[float] = []
    ours: list[float] = []
    for _ in range(2):
        raw.append(last / await _raw_read_s(connection, last))
        began = time.perf_counter()
        projection = SiteProjection(JetStreamLog(connection))
        await projection.start()
        ours.append(last / (time.perf_counter() - began))
        await projection.stop()
    return at_least_ratio("fold_rate", max(ours), max(raw), "events/s", 0.5, f"log of {last} events")


async def _raw_read_s(connection: Connection, last: int) -> float:
    done = asyncio.Event()
    seen = 0

    async def on_message(_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == last:
            done.set()

    began = time.perf_counter()
    subscription = await connection.js.subscribe(
        "gpuq.>",
        stream=LOG_STREAM,
        ordered_consumer=True,
        config=ConsumerConfig(deliver_policy=DeliverPolicy.ALL, filter_subjects=["gpuq.>"]),
        cb=on_message,
        pending_msgs_limit=4_194_304,
        pending_bytes_limit=1_073_741_824,
    )
    await asyncio.wait_for(done.wait(), 120)
    took_s = time.perf_counter() - began
    await subscription.unsubscribe()
    return took_s


def site_of(events: int) -> Site:
    """The state after ``events`` events, folded in memory."""
    site = Site()
    seq = number = 0
    while seq < events:
        base_ns = 1_700_000_000_000_000_000 + number * 1_000_000
        submission = seq + 1
        epoch = seq + 4
        for subject, fact in life_of(number):
            seq += 1
            if isinstance(fact, job.Accepted):
                fact = replace(fact, submission_seq=submission)
            elif isinstance(fact, device.Released):
                fact = replace(fact, epoch=epoch)
            site.apply(decode(Stored(seq, base_ns + seq, subject, body_of(fact))))
        number += 1
    return site


async def measure_snapshot(connection: Connection, *, events: int = 1_000_000) -> Figure:
    """How long a start takes from a snapshot of the state that a million events left."""
    log = JetStreamLog(connection)
    objects = JetStreamObjects(connection, SNAPSHOTS_BUCKET)
    site = site_of(events)
    # The snapshot must name an event of this log: let it stand at the log's end.
    last = await log.last_seq()
    stored = await log.get(last)
    assert stored is not None
    site.seq, site.stored_ns = last, stored.stored_ns
    jobs = len(site.jobs)
    await snapshot.save(objects, site)
    size_mb = len(snapshot.encode_state(site)) / 1_048_576
    del site
    began = time.perf_counter()
    projection = SiteProjection(log, objects=objects)
    await projection.start()
    took_s = time.perf_counter() - began
    assert projection.started_at == last, "the snapshot was passed over"
    assert len(projection.site.jobs) == jobs
    await projection.stop()
    return at_most("start_from_snapshot", took_s, "s", 3.0, note=f"{events} events, {jobs} jobs, {size_mb:.0f} MB")


async def open_log(server: BenchServer, pid: int) -> Connection:
    connection = await server.connect(pid)
    await prepare(connection)
    return connection
