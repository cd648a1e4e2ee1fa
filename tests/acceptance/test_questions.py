"""Producers with the login of `gpuq up` ask what became of their jobs, while the site works and while it breaks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats.errors
import pytest

from gpukeeper.cli.credentials import load_credentials
from gpukeeper.events.connection import Connection, NatsSettings, connect
from gpukeeper.events.job import Accepted, Started
from support.parts import Part
from support.site import Fake, Site, site_in
from support.wait import until_answered

pytestmark = pytest.mark.processes


class Producer:
    """What a producer can do: send requests."""

    def __init__(self, connection: Connection) -> None:
        self._client = connection.client

    async def request(self, subject: str, body: bytes, timeout_s: float = 60.0) -> dict[str, Any]:
        return json.loads((await self._client.request(subject, body, timeout=timeout_s)).data)

    async def submit(self, **job: object) -> int:
        body = json.dumps({"model": "fake", "prompt": "p"} | job).encode()
        return (await self.request("gpuq.submit.me", body))["seq"]

    async def ask(self, **question: object) -> dict[str, Any]:
        return await self.request("gpuq.ask.job", json.dumps(question).encode())

    async def try_to_ask(self, **question: object) -> dict[str, Any] | None:
        """None where nobody can answer now."""
        try:
            answer = await self.request("gpuq.ask.job", json.dumps(question).encode(), timeout_s=2)
        except (nats.errors.NoRespondersError, TimeoutError):
            return None
        return None if answer.get("error", {}).get("retryable") else answer


@asynccontextmanager
async def producer_of(site: Site) -> AsyncGenerator[Producer]:
    found = load_credentials(site.data)
    login = found.producer
    assert found.url is not None
    settings = NatsSettings(
        servers=(found.url,), user=login.user, password=login.password, inbox_prefix=login.inbox_prefix
    )
    connection = await connect(settings, name="producer")
    try:
        yield Producer(connection)
    finally:
        await connection.close()


class Running:
    """A whole site of `gpuq up`, its runtime, and a producer."""

    def __init__(self, site: Site, up: Part, fake: Fake, producer: Producer) -> None:
        self.site = site
        self.up = up
        self.fake = fake
        self.producer = producer


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with site_in(tmp_path) as site:
        site.devices = [{"id": "cpu0", "source": "static", "kind": "cpu", "total_mb": 1000, "slots": 1}]
        fake = await site.llama(echo=True)
        up = site.up()
        await site.follow_up()
        await site.ready()
        async with producer_of(site) as producer:
            yield Running(site, up, fake, producer)


async def test_a_producer_follows_a_job_from_the_queue_to_its_result(running: Running) -> None:
    ask = running.producer.ask
    await running.fake.set(hold=True)
    first, second = await running.producer.submit(id="one"), await running.producer.submit(id="two", prompt="Why?")
    await running.site.watch.fact("one", Started)

    told = await ask(job="one")
    assert (told["phase"], told["host"], told["device"], told["submission_seq"]) == ("running", "box", "cpu0", first)
    told = await ask(submission_seq=second, until="ended", wait_s=0.1)
    assert (told["job"], told["queue_place"], told["ended"], told["timed_out"]) == ("two", 1, False, True)

    waits = [asyncio.create_task(ask(submission_seq=seq, until="ended", wait_s=60)) for seq in (first, second)]
    await running.fake.set(hold=None)
    one, two = await asyncio.gather(*waits)
    assert (one["phase"], two["phase"]) == ("succeeded", "succeeded")
    assert two["result"]["text"] == "Why?"


async def test_a_result_that_is_too_large_for_an_event_comes_whole(running: Running) -> None:
    prompt = "x" * 100_000
    told = await running.producer.ask(
        submission_seq=await running.producer.submit(prompt=prompt), until="ended", wait_s=60
    )

    assert told["result"]["text"] == prompt
    assert told["result_ref"]["size"] > len(prompt)


async def test_questions_are_answered_by_the_scheduler_that_comes_after_a_killed_one(running: Running) -> None:
    ended = await running.producer.submit(id="one")
    before = await running.producer.ask(submission_seq=ended, until="ended", wait_s=60)
    os.kill(running.site.child_of_up(running.up, "scheduler"), signal.SIGKILL)
    left = await running.producer.submit(id="two")

    after = await until_answered(
        lambda: running.producer.try_to_ask(submission_seq=left, until="ended", wait_s=1), "somebody answers"
    )
    assert after["submission_seq"] == left
    assert (await running.producer.ask(submission_seq=left, until="ended", wait_s=60))["phase"] == "succeeded"
    assert await running.producer.ask(submission_seq=ended, until="ended") == before


async def test_a_question_that_waits_when_the_scheduler_stops_is_sent_elsewhere(running: Running) -> None:
    asked = asyncio.create_task(running.producer.ask(job="nobody", wait_s=60))
    # Answered after the one before was taken in.
    assert (await running.producer.ask(job="nobody", wait_s=0))["error"]["code"] == "unknown_job"
    os.kill(running.site.child_of_up(running.up, "scheduler"), signal.SIGTERM)

    assert (await asked)["error"] == {
        "code": "stopping",
        "message": "this scheduler stops: ask again",
        "retryable": True,
    }


async def test_thousands_of_questions_do_not_hold_up_a_submission(running: Running) -> None:
    """All wait for one job; meanwhile others are accepted and run."""
    await running.fake.set(hold=True)
    seq = await running.producer.submit(id="one")
    await running.site.watch.fact("one", Started)
    waits = [
        asyncio.create_task(running.producer.ask(submission_seq=seq, until="ended", wait_s=60)) for _ in range(2000)
    ]
    await running.producer.ask(job="one")
    await running.producer.submit(id="two", prompt="another")
    await running.site.watch.fact("two", Accepted)
    await running.fake.set(hold=None)

    assert {told["phase"] for told in await asyncio.gather(*waits)} == {"succeeded"}
    assert (await running.producer.ask(job="two", until="ended", wait_s=60))["phase"] == "succeeded"
    await running.site.check()
