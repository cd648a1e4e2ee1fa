"""Whole jobs through real processes: throughput, time to the first byte, and what an idle site costs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp
import msgspec
from bench_site import (
    BenchServer,
    children_of,
    cpu_s,
    part,
    prepare,
    rss_mb,
    runtime,
    until_file,
    whole_site,
    write_config,
)
from figures import Figure, at_least, at_least_ratio, at_most
from measure_log import raw_rate

from gpukeeper.events.clock import new_id
from gpukeeper.events.codec import decode
from gpukeeper.events.connection import Connection
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.log import Stored
from gpukeeper.events.subjects import ALL_JOBS
from gpukeeper.projections.runner import SiteProjection

_WINDOW = 48
_START_S = 20.0


async def measure_site(folder: Path, *, jobs: int, singles: int, idle_s: float) -> list[Figure]:
    """Start a site with eight slots and measure it."""
    server = BenchServer(folder)
    with server.running() as nats_pid, runtime(folder) as port_file:
        connection = await server.connect(nats_pid)
        await prepare(connection)
        await raw_rate(connection, 1_000, subject="gpuq.ev.warmup")
        port = await until_file(port_file)
        config = write_config(folder, nats_url=server.url, runtime_port=port, slots=8)
        with part("scheduler", folder, config), part("agent", folder, config):
            await _until_ready(connection)
            await _throughput(connection, 200)
            figures = await _first_bytes(connection, port, singles)
            rates: list[tuple[float, float, float, float]] = []
            for _ in range(5):
                raw = await raw_rate(connection, 4_000, subject="gpuq.ev.raw")
                await asyncio.sleep(1)
                rate, events_each = await _throughput(connection, jobs)
                rates.append((rate / (raw / events_each), rate, raw / events_each, events_each))
            rates.sort()
            _, rate, baseline, events_each = rates[len(rates) // 2]
            note = f"8 slots, {events_each:.2f} events a job, {_WINDOW} jobs outstanding"
            figures.append(at_least_ratio("noop_jobs", rate, baseline, "jobs/s", 0.6, note))
            figures.append(at_least("noop_jobs_absolute", rate, "jobs/s", 200))
        await connection.close()
        with whole_site(folder, runtime_port=port) as up:
            figures += await _idle(up, idle_s)
    return figures


async def _until_ready(connection: Connection) -> None:
    """Wait until the scheduler leads and the host's runtime is known."""
    projection = SiteProjection(JetStreamLog(connection))
    await projection.start()
    try:
        async with asyncio.timeout(_START_S):
            while True:
                hosts = projection.site.hosts.values()
                if projection.site.leader and any(r.healthy for host in hosts for r in host.registry):
                    break
                await asyncio.sleep(0.05)
    finally:
        await projection.stop()


async def _throughput(connection: Connection, jobs: int) -> tuple[float, float]:
    """Jobs per second with a bounded number outstanding, and events per job, counted in the log."""
    log = JetStreamLog(connection)
    places = asyncio.Semaphore(_WINDOW)
    ended = 0
    done = asyncio.Event()

    def on_stored(stored: Stored) -> None:
        nonlocal ended
        # A look at the bytes: what measures should cost little beside what is measured.
        if b'"type":"gpuq.job.succeeded.v1"' in stored.body:
            ended += 1
            places.release()
            if ended == jobs:
                done.set()
        elif b'"type":"gpuq.job.failed.v1"' in stored.body or b'"type":"gpuq.job.rejected.v1"' in stored.body:
            raise TypeError(f"a job ended otherwise: {decode(stored).data}")

    before = await log.last_seq()
    follower = await log.follow(on_stored, after=before, subjects=(ALL_JOBS,))
    stamp = new_id()[-8:]
    publishing: set[asyncio.Task[object]] = set()
    began = time.perf_counter()
    for number in range(jobs):
        await places.acquire()
        body = msgspec.json.encode({"id": f"{stamp}-{number}", "model": "fake", "prompt": "hello", "max_tokens": 1})
        headers = {"Nats-Msg-Id": f"{stamp}-{number}"}
        task = asyncio.create_task(connection.js.publish("gpuq.submit.bench", body, headers=headers))
        publishing.add(task)
        task.add_done_callback(publishing.discard)
    await asyncio.wait_for(done.wait(), 120)
    took_s = time.perf_counter() - began
    await asyncio.sleep(0.5)
    events = await log.last_seq() - before
    await follower.stop()
    return jobs / took_s, events / jobs


async def _first_bytes(connection: Connection, port: str, singles: int) -> list[Figure]:
    """Submission to first byte on an idle site, beyond a direct call to the same runtime."""
    arrived: asyncio.Queue[float] = asyncio.Queue()

    async def on_chunk(_: object) -> None:
        arrived.put_nowait(time.perf_counter())

    subscription = await connection.client.subscribe("gpuq.out.*", cb=on_chunk)
    direct: list[float] = []
    ours: list[float] = []
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", trust_env=False) as client:
        for number in range(singles + 10):
            body = {"model": "fake", "prompt": "hello", "n_predict": 1, "stream": True}
            began = time.perf_counter()
            async with client.post("/completion", json=body) as response:
                await response.content.readany()
                direct.append(time.perf_counter() - began)
            while not arrived.empty():
                arrived.get_nowait()
            job = msgspec.json.encode({"model": "fake", "prompt": "hello", "max_tokens": 1})
            began = time.perf_counter()
            await connection.js.publish("gpuq.submit.single", job, headers={"Nats-Msg-Id": new_id()})
            ours.append(await asyncio.wait_for(arrived.get(), 10) - began)
            await asyncio.sleep(0.03)
            if number < 10:
                direct.clear()
                ours.clear()
    await subscription.unsubscribe()
    extra = sorted((one - plain) * 1000 for one, plain in zip(ours, direct, strict=True))
    call_ms = sorted(direct)[len(direct) // 2] * 1000
    p50, p99 = extra[len(extra) // 2], extra[min(len(extra) - 1, int(len(extra) * 0.99))]
    note = f"{singles} jobs one by one, beyond a direct call"
    return [
        at_most("first_byte_p50", p50, "ms", 10, baseline=call_ms, note=note),
        at_most("first_byte_p99", p99, "ms", 30, baseline=call_ms, note=note),
    ]


async def _idle(up: int, idle_s: float) -> list[Figure]:
    """What all processes of `gpuq up` use while nothing happens, the NATS server aside."""
    await asyncio.sleep(8)
    parts = {name: pid for pid, name in children_of(up).items() if "nats-server" not in name}
    assert set(parts) == {"scheduler", "agent"}, parts
    pids = {"up": up, **parts}
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    await asyncio.sleep(idle_s)
    used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    memory = {name: rss_mb(pid) for name, pid in pids.items()}
    shown = ", ".join(f"{name} {100 * used[name] / idle_s:.2f} % {memory[name]:.0f} MB" for name in pids)
    return [
        at_most("idle_cpu", 100 * sum(used.values()) / idle_s, "% of a core", 2.0, note=shown),
        at_most("idle_memory", sum(memory.values()), "MB", 200.0, note="all processes together"),
    ]
