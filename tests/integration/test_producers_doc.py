"""The Python example of docs/producers.md, run as it stands there with the producer's login of a real site."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, get_args

import pytest
from nats.aio.msg import Msg

from gpukeeper.events.ask import Answer, Code, Question
from gpukeeper.events.catalog import BY_TYPE
from gpukeeper.events.connection import NatsSettings, connect
from gpukeeper.events.job import ENDS
from gpukeeper.events.spec import parse_submission
from gpukeeper.events.streams import ensure_site
from gpukeeper.projections.job import Phase
from support.nats import NatsServer
from support.site import Site, site_in

pytestmark = pytest.mark.processes

PAGE = (Path(__file__).parents[2] / "docs" / "producers.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The first code block in this language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[0]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """A site of `gpuq up`."""
    async with site_in(tmp_path) as site:
        site.devices = [{"id": "cpu0", "source": "static", "kind": "cpu", "total_mb": 1000, "slots": 1}]
        await site.llama(echo=True)
        site.up()
        await site.follow_up()
        await site.ready()
        yield site


async def run_example(site_json: Path, body: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    script = site_json.parent / "submit.py"
    script.write_text(block("python"))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        str(site_json),
        json.dumps(body),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    assert out, errors.decode()
    assert not errors, errors.decode()
    return process.returncode, json.loads(out)


async def test_the_example_submits_a_job_and_prints_its_result(site: Site) -> None:
    code, printed = await run_example(site.data / "site.json", {"model": "fake", "prompt": "Why?", "id": "job-1"})

    assert code == 0
    assert (printed["job"], printed["phase"]) == ("job-1", "succeeded")
    assert printed["result"]["text"] == "Why?"


async def test_the_example_run_twice_is_one_submission_and_one_job(site: Site) -> None:
    body = {"model": "fake", "prompt": "Why?"}

    first = await run_example(site.data / "site.json", body)
    second = await run_example(site.data / "site.json", body)

    assert first == second
    assert len(site.watch.by_subject["gpuq.submit.docs"]) == 1
    assert await site.fakes[0].prompts() == {"Why?": 1}


async def test_another_body_of_the_same_id_and_another_producer_are_answered_too(site: Site) -> None:
    """What the same message id would swallow."""
    site_json = site.data / "site.json"
    await run_example(site_json, {"model": "fake", "prompt": "Why?", "id": "job-1"})
    _, other = await run_example(site_json, {"model": "fake", "prompt": "Why not?", "id": "job-1"})
    assert (other["phase"], other["reason"]) == ("rejected", "duplicate_id")

    body = json.dumps({"model": "fake", "prompt": "Why?", "id": "job-1"}).encode()
    digest = hashlib.sha256(b"elsewhere\n" + body).hexdigest()
    seq = await site.publish("gpuq.submit.elsewhere", body, msg_id=digest)
    assert seq is not None
    assert (await site.watch.answer(seq)).job == "job-1"


async def test_the_example_prints_what_is_wrong_with_a_body(site: Site) -> None:
    code, printed = await run_example(
        site.data / "site.json", {"model": "fake", "prompt": "p", "need": {"vram_mb": "5 GB"}}
    )

    assert code == 1
    (shown,) = re.findall(r'^     (\[\{"path".*\}\]), …', PAGE, re.MULTILINE)
    assert printed["problems"] == json.loads(shown)


async def test_the_page_says_where_the_login_is(site: Site) -> None:
    stored = json.loads((site.data / "site.json").read_text())

    for field in ("url", "producer.user", "producer.password", "producer.inbox_prefix"):
        assert f"`{field}`" in PAGE
        value = stored
        for step in field.split("."):
            value = value[step]
        assert isinstance(value, str)


async def test_the_accounts_that_the_page_shows_let_a_producer_submit_and_ask_and_no_more(tmp_path: Path) -> None:
    (accounts,) = re.findall(r"^    accounts \{\n(.*?)^    \}\n", PAGE, re.MULTILINE | re.DOTALL)
    server = NatsServer(tmp_path / "nats", accounts=accounts)
    async with AsyncExitStack() as stack:
        stack.callback(server.stop)
        server.start()
        logins = {"site": "_INBOX", "reports": "_INBOX_reports"}
        site, reports = [
            await connect(NatsSettings(servers=(server.url,), user=user, password="…", inbox_prefix=prefix), name=user)
            for user, prefix in logins.items()
        ]
        stack.push_async_callback(site.close)
        stack.push_async_callback(reports.close)
        await ensure_site(site)

        async def answer(message: Msg) -> None:
            await message.respond(b"answer")

        await site.client.subscribe("gpuq.ask.job", cb=answer)
        await site.client.flush()
        ack = await reports.client.request("gpuq.submit.reports", b"{}", timeout=20)
        assert json.loads(ack.data) == {"stream": "GPUQ_LOG", "seq": 1}
        assert (await reports.client.request("gpuq.ask.job", b"{}", timeout=20)).data == b"answer"
        for subject in ("gpuq.submit.other", "gpuq.ev.site", "$JS.API.INFO"):
            with pytest.raises(TimeoutError):
                await reports.client.request(subject, b"{}", timeout=0.2)
            assert subject.lower() in reports.denied


def test_the_page_lists_what_can_be_asked_and_answered() -> None:
    for field in (*Question.__struct_fields__, *Answer.__struct_fields__):
        assert f"`{field}`" in PAGE, field
    for word in (*Phase, "submitted", "known", "answered", "ended", *get_args(Code)):
        assert f"`{word}`" in PAGE, word


def test_the_page_names_every_end() -> None:
    for end in ENDS:
        assert f"`{end.TYPE.split('.')[2]}`" in PAGE


@pytest.mark.parametrize("language", ["python", "go", "js", "sh"])
def test_every_example_makes_the_message_id_of_producer_and_body(language: str) -> None:
    code = block(language)

    assert "Nats-Msg-Id" in code
    assert "sha256" in code
    assert re.search(r"\\n", code)


def test_the_page_names_only_facts_that_exist() -> None:
    for tag in re.findall(r"gpuq\.(?:job|host|device|runtime|route)\.[a-z_]+\.v\d+", PAGE):
        assert tag in BY_TYPE or tag == "gpuq.job.submitted.v1"


def test_the_body_that_the_page_shows_is_a_job() -> None:
    (shown,) = re.findall(r'^    (\{"model".*\})$', PAGE, re.MULTILINE)

    assert not isinstance(parse_submission(shown.encode()), tuple)


def test_the_links_of_the_page_lead_to_files_and_headings() -> None:
    headings = {
        re.sub(r"[^a-z -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", PAGE, re.M)
    }
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGE):
        if target.startswith("#"):
            assert target[1:] in headings, target
        else:
            assert (Path(__file__).parents[2] / "docs" / target).is_file(), target
