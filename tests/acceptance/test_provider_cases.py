"""Every provider over the whole path, and the cases of ComfyUI and vLLM: a fake of each, a declared GPU."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.events.job import Cancelled, Expired, Failed, PlacementVerified, Rejected, Started, Succeeded
from gpukeeper.events.readings import Heartbeat, RuntimeReading
from gpukeeper.events.reasons import Reason
from support.nats import NatsServer
from support.site import HOST, Fake, Site, site_in

pytestmark = pytest.mark.processes

HOLDS_MB = 8_000


def graph(text: str, *, node: str = "SaveImage") -> dict[str, Any]:
    return {"3": {"class_type": "KSampler", "inputs": {"seed": 1}}, "9": {"class_type": node, "inputs": {"text": text}}}


@pytest.fixture
async def site(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Site]:
    async with site_in(tmp_path, nats_server.settings()) as site:
        yield site


async def begin(site: Site, provider: str, settings: dict[str, object] | None = None, **attributes: object) -> Fake:
    fake = await site.runtime(provider, settings, **attributes)
    site.scheduler()
    site.agent()
    await site.ready()
    return fake


def runtime_in(beat: Heartbeat) -> RuntimeReading | None:
    return beat.runtimes[0] if beat.host == HOST and beat.runtimes else None


# --- one job on each


async def test_a_workflow_runs_on_comfyui_and_its_outputs_are_the_result(site: Site) -> None:
    fake = await begin(site, "comfyui")
    job = await site.submit({"model": "comfyui", "workflow": graph("a cat"), "need": {"vram_mb": 8_000}})
    end = await site.watch.end(job)

    assert isinstance(end, Succeeded)
    assert end.result is not None
    assert end.result.output == {"9": {"images": [{"filename": "a cat.png", "type": "output"}]}}
    (placed,) = site.watch.of_job(job, PlacementVerified)
    assert placed.ratio == 1.0
    assert (await fake.counters())["executions"] == 1
    again = await site.run({"model": "comfyui", "runtime": "comfyui", "workflow": graph("a dog")})
    assert isinstance(again, Succeeded)
    await site.check()


@pytest.mark.parametrize(
    "body",
    [{"prompt": "say it"}, {"messages": [{"role": "user", "content": "say it"}]}, {"input": ["say it", "twice"]}],
    ids=["generate", "chat", "embed"],
)
async def test_vllm_is_woken_for_a_job_that_needs_it(site: Site, body: dict[str, Any]) -> None:
    fake = await begin(site, "vllm", {"holds_mb": HOLDS_MB}, sleep_level=1, echo=True)
    job = await site.submit({"model": "tiny", **body})
    end = await site.watch.end(job)

    assert isinstance(end, Succeeded)
    assert end.result is not None
    said = end.result.text or (end.result.message or {}).get("content") or end.result.embeddings
    assert said in ("say it", [[6.0, 1.0], [5.0, 1.0]])
    assert (await fake.counters())["wakes"] == [""]
    await site.check()


async def test_a_hugging_face_server_generates(site: Site) -> None:
    fake = await begin(site, "huggingface", {"holds_mb": HOLDS_MB}, echo=True)
    end = await site.run({"model": "org/tiny", "prompt": "say it"})

    assert isinstance(end, Succeeded)
    assert end.result is not None
    assert end.result.text == "say it"
    assert (await fake.counters())["generations"] == 1
    await site.check()


async def test_a_task_that_the_runtime_cannot_do_fails_with_that_reason_and_reaches_nobody(site: Site) -> None:
    fake = await begin(site, "huggingface", {"holds_mb": HOLDS_MB})
    end = await site.run({"model": "org/tiny", "input": "a text"})

    assert isinstance(end, Failed)
    assert end.reason == Reason.UNSUPPORTED_TASK
    assert await fake.prompts() == {}
    await site.check()


# --- ComfyUI


async def test_c27_a_prompt_that_is_in_neither_list_any_more_is_lost_and_not_run_again(site: Site) -> None:
    """C27, artokun/comfyui-mcp#2507: ComfyUI was started again while it ran."""
    fake = await begin(site, "comfyui", hold=True)
    job = await site.submit({"model": "comfyui", "workflow": graph("a cat"), "need": {"vram_mb": 8_000}})
    await fake.until_asked("a cat")
    await site.heartbeat(lambda beat: any(claim.job == job and claim.tokens for claim in beat.claims))
    await fake.set(forgets=True)
    end = await site.watch.end(job)

    assert isinstance(end, Failed)
    assert end.reason == Reason.RUN_LOST
    assert "neither queue nor history" in end.detail
    assert await fake.prompts() == {"a cat": 1}
    await fake.set(hold=False)
    assert isinstance(
        await site.run({"model": "comfyui", "workflow": graph("next"), "need": {"vram_mb": 1}}), Succeeded
    )
    await site.check()


async def test_c48_twenty_five_looks_that_fail_are_no_failed_job(site: Site) -> None:
    """C48, skypilot#10155: one execution, however often its status could not be had."""
    fake = await begin(site, "comfyui", hold=True)
    job = await site.submit({"model": "comfyui", "workflow": graph("a cat"), "need": {"vram_mb": 8_000}})
    await fake.until_asked("a cat")
    await fake.set(failing_looks=25, hold=False)
    end = await site.watch.end(job)

    assert isinstance(end, Succeeded)
    counters = await fake.counters()
    assert (counters["failed_looks"], counters["executions"]) == (25, 1)
    await site.check()


async def test_a_node_that_fails_ends_the_job_with_its_words(site: Site) -> None:
    await begin(site, "comfyui", node_error="Allocation on device 0 would exceed allowed memory.")
    end = await site.run({"model": "comfyui", "workflow": graph("a cat"), "need": {"vram_mb": 8_000}})

    assert isinstance(end, Failed)
    assert end.reason == Reason.RUNTIME_ERROR
    assert "KSampler" in end.detail
    assert "would exceed allowed memory" in end.detail
    await site.check()


async def test_a_comfyui_on_the_cpu_gets_no_work_that_was_meant_for_a_gpu(site: Site) -> None:
    fake = await begin(site, "comfyui", device_type="cpu")
    end = await site.run({"model": "comfyui", "workflow": graph("a cat"), "need": {"vram_mb": 8_000}})

    assert isinstance(end, Failed)
    assert end.reason == Reason.CPU_FALLBACK
    assert await fake.prompts() == {}
    await site.check()


async def test_a_workflow_that_is_cancelled_is_interrupted_at_the_runtime(site: Site) -> None:
    fake = await begin(site, "comfyui", hold=True)
    job = await site.submit({"model": "comfyui", "workflow": graph("a cat"), "need": {"vram_mb": 8_000}})
    await fake.until_asked("a cat")
    await site.watch.fact(job, Started)
    await site.command("cancel", job)
    end = await site.watch.end(job)

    assert isinstance(end, Cancelled)
    assert (await fake.counters())["interrupts"] == 1
    await site.check()


async def test_a_graph_in_a_file_is_submitted_and_what_it_gave_is_printed_as_json(site: Site) -> None:
    await begin(site, "comfyui")
    file = site.folder / "graph.json"
    file.write_text(json.dumps(graph("a cat")))
    config = str(site.folder / "agent.toml")
    argv = ("submit", "--workflow", str(file), "--vram-mb", "8000", "--id", "cat", "--wait", "--quiet")
    said = await gpuq(*argv, "--config", config)
    again = await gpuq("result", "cat", "--config", config)

    assert json.loads(said) == {"9": {"images": [{"filename": "a cat.png", "type": "output"}]}}
    assert again == said
    await site.check()


async def gpuq(*argv: str) -> bytes:
    """What the program says on stdout; it must succeed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "gpukeeper.cli.main", *argv), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said


async def test_a_workflow_that_names_a_model_of_its_own_is_refused_with_what_to_name(site: Site) -> None:
    await begin(site, "comfyui")
    answer = await site.watch.answer(await site.send({"model": "flux", "workflow": graph("a cat")}))

    assert isinstance(answer, Rejected)
    assert answer.reason == Reason.UNKNOWN_MODEL
    assert "comfyui" in answer.problems[0].message
    await site.check()


# --- vLLM


async def test_c31_a_server_that_is_healthy_and_gives_no_token_ends_the_job_on_its_clock(site: Site) -> None:
    """C31, vllm#39863: health 200, requests waiting, not one token."""
    site.sections["agent"] |= {"stop_proof_s": 3}
    fake = await begin(site, "vllm", {"holds_mb": HOLDS_MB}, stuck=True, engines=[[0, 3], [0, 3]])
    beat = await site.heartbeat(lambda beat: runtime_in(beat) is not None)
    job = await site.submit({"model": "tiny", "prompt": "say it", "deadlines": {"first_byte_s": 1}})
    end = await site.watch.end(job)

    shown = runtime_in(beat)
    assert shown is not None
    assert (shown.healthy, shown.activity) == (True, "busy")
    assert isinstance(end, Expired)
    assert (end.clock, end.limit_s) == ("first_byte", 1.0)
    assert await fake.prompts() == {"say it": 1}
    await site.check()
