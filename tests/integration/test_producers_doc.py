"""The Python example of docs/producers.md, run as it stands there against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from ulid import ULID

from gpukeeper.events.catalog import BY_TYPE
from gpukeeper.events.connection import Connection, NatsSettings, connect
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.job import ENDS
from gpukeeper.events.recorder import Recorder, Stamp
from gpukeeper.events.spec import parse_submission
from gpukeeper.events.streams import ensure_site
from support.answering import AnsweringSite
from support.nats import NatsServer

pytestmark = pytest.mark.processes

PAGE = (Path(__file__).parents[2] / "docs" / "producers.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The one code block in this language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


@asynccontextmanager
async def answering(connection: Connection) -> AsyncGenerator[JetStreamLog]:
    """A site that answers what is submitted."""
    await ensure_site(connection)
    log = JetStreamLog(connection)
    stamp = Stamp(source="/site/tests", new_id=lambda: str(ULID()), now=lambda: "2025-10-19T14:00:00Z")
    task = asyncio.create_task(AnsweringSite(log, Recorder(log, stamp)).run())
    try:
        yield log
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def answered(connection: Connection) -> AsyncIterator[JetStreamLog]:
    async with answering(connection) as log:
        yield log


async def run_example(settings: NatsSettings, folder: Path, body: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    script = folder / "submit.py"
    script.write_text(block("python"))
    url = settings.servers[0].replace("nats://", f"nats://{settings.user}:{settings.password}@")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        json.dumps(body),
        env=os.environ | {"NATS_URL": url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    assert out, errors.decode()
    return process.returncode, json.loads(out)


async def test_the_example_submits_a_job_and_prints_how_it_ended(
    answered: JetStreamLog, nats_settings: NatsSettings, tmp_path: Path
) -> None:
    code, printed = await run_example(nats_settings, tmp_path, {"model": "m", "prompt": "Why?", "id": "job-1"})

    assert code == 0
    assert (printed["job"], printed["type"]) == ("job-1", "gpuq.job.succeeded.v1")
    assert printed["data"]["result"] == {"text": "Why?"}
    assert len(await answered.read("gpuq.submit.docs")) == 1


async def test_the_example_run_twice_with_one_id_is_one_job(
    answered: JetStreamLog, nats_settings: NatsSettings, tmp_path: Path
) -> None:
    body = {"model": "m", "prompt": "Why?", "id": "job-1"}

    first = await run_example(nats_settings, tmp_path, body)
    second = await run_example(nats_settings, tmp_path, body)

    assert first == second


async def test_the_example_prints_what_is_wrong_with_a_body(
    answered: JetStreamLog, nats_settings: NatsSettings, tmp_path: Path
) -> None:
    code, printed = await run_example(nats_settings, tmp_path, {"model": "m", "prompt": "p", "need": {"vram": 5}})

    assert code == 1
    assert printed["type"] == "gpuq.job.rejected.v1"
    assert printed["data"]["problems"] == [{"path": "need.vram", "message": "unknown field; did you mean 'vram_mb'?"}]


async def test_the_example_needs_no_more_permissions_than_the_page_lists(tmp_path: Path) -> None:
    listed = re.findall(r"^    (gpuq\.submit\.<producer>|\$JS\.\S+)", PAGE, re.MULTILINE)
    allowed = json.dumps([subject.replace("<producer>", "docs") for subject in listed])
    account = f"""SITE {{ jetstream: enabled, users: [
        {{ user: boss, password: b }}
        {{ user: docs, password: d, permissions: {{ publish: {allowed}, subscribe: "_INBOX.>" }} }} ] }}"""
    server = NatsServer(tmp_path / "nats", accounts=account)
    try:
        server.start()
        boss = await connect(NatsSettings(servers=(server.url,), user="boss", password="b"), name="boss")
        async with answering(boss):
            docs = NatsSettings(servers=(server.url,), user="docs", password="d")
            code, _ = await run_example(docs, tmp_path, {"model": "m", "prompt": "Why?"})
        await boss.close()
    finally:
        server.stop()

    assert len(listed) == 6
    assert code == 0
    assert "Violation" not in server.log


@pytest.mark.parametrize("language", ["python", "go", "js"])
def test_every_example_knows_every_end(language: str) -> None:
    code = block(language)

    for end in ENDS:
        assert f'"{end.TYPE.split(".")[2]}"' in code


def test_the_page_names_only_facts_that_exist() -> None:
    for tag in re.findall(r"gpuq\.(?:job|host|device|runtime|route)\.[a-z_]+\.v\d+", PAGE):
        assert tag in BY_TYPE or tag == "gpuq.job.submitted.v1"


def test_the_body_that_the_page_shows_is_a_job() -> None:
    (shown,) = re.findall(r'^    (\{"model".*\})$', PAGE, re.MULTILINE)

    assert not isinstance(parse_submission(shown.encode()), tuple)


def test_the_links_of_the_page_lead_to_files() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / target).is_file()
