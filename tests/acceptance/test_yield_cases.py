"""Cases C26, C29, C31, C32 and vLLM's sleep on the whole path: who yields a card, who does not, and what is shown.

Submission, log, scheduler, agent, the binding of NVML and its shared library are real; the runtimes are fakes whose
memory shows on the cards of the stub driver.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpukeeper.events.device import HandedOff, Reclaimed, ReclaimFailed, ReclaimRequested
from gpukeeper.events.fact import Fact
from gpukeeper.events.job import Admitted, Cancelled, Denied, Expired, Succeeded
from gpukeeper.events.readings import Activity
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import HealthChanged, ModelUnloaded, Suspect
from support.card_site import BEATS, CARD, EMPTY_MB, GRACE_S, beats, begin, comfyui, job, ollama, vllm, waits
from support.nats import NatsServer
from support.shared_cards import SharedCards
from support.site import DEVICE, HOST, Served, Site, site_in
from support.vllm_fake import FakeVllm
from support.waiting import until

pytestmark = pytest.mark.processes
pytest_plugins = ["support.nvml_fixture", "support.card_fixture"]


def of_card(site: Site, kind: type[Fact]) -> list[Fact]:
    return list(site.watch.of_device(HOST, CARD, kind))


# --- C26: memory that shows up late


async def test_c26_memory_that_shows_seconds_after_free_is_waited_for_and_the_job_is_admitted(
    site: Site, card: SharedCards
) -> None:
    """C26, artokun/comfyui-mcp#2050: 1,205 of 24,564 MB are free right after /free, and 22,875 later."""
    async with ollama(site, card), comfyui(site, card, held_mb=EMPTY_MB - 1_205) as owner:
        await begin(site)
        wanted = await site.submit(job("large", 20_000))
        card.prompt = False
        await until(lambda: owner.frees > 0, "ComfyUI is asked to let go")
        await site.new_heartbeat(lambda beat: [each.free_mb for each in beat.devices] == [1_205], times=BEATS)
        assert not of_card(site, Reclaimed)
        card.prompt = True
        end = await site.watch.end(wanted)

    assert isinstance(end, Succeeded)
    (reclaimed,) = site.watch.of_device(HOST, CARD, Reclaimed)
    assert (reclaimed.runtime, reclaimed.measured_mb, reclaimed.free_mb) == ("comfyui", EMPTY_MB - 1_205, EMPTY_MB)
    (handed,) = site.watch.of_device(HOST, CARD, HandedOff)
    assert (handed.job, handed.need_mb, handed.free_mb) == (wanted, 20_000, EMPTY_MB)
    assert not site.watch.of_job(wanted, Denied)
    assert len(site.watch.of_job(wanted, Admitted)) == 1
    assert owner.frees == 1
    await site.check()


async def test_c26_memory_that_shows_in_steps_is_waited_for_to_the_last_of_them(site: Site, card: SharedCards) -> None:
    """C26's neighbour: the first figure that moves is not the last one."""
    async with ollama(site, card), comfyui(site, card, held_mb=21_000) as owner:
        owner.on_held = None
        await begin(site)
        wanted = await site.submit(job("large", 20_000))
        await until(lambda: owner.frees > 0, "ComfyUI is asked to let go")
        for left_mb in (14_000, 7_000):
            card.hold("comfyui", left_mb, on=CARD)
            shown = EMPTY_MB - left_mb
            await site.new_heartbeat(lambda beat, shown=shown: [each.free_mb for each in beat.devices] == [shown])
        assert not of_card(site, Reclaimed)
        card.hold("comfyui", 0, on=CARD)
        end = await site.watch.end(wanted)

    assert isinstance(end, Succeeded)
    (reclaimed,) = site.watch.of_device(HOST, CARD, Reclaimed)
    assert reclaimed.measured_mb == 21_000
    assert not site.watch.of_job(wanted, Denied)
    assert owner.frees == 1
    await site.check()


# --- C29: what counts as work


async def test_c29_a_socket_that_a_page_holds_open_keeps_no_memory(site: Site, card: SharedCards) -> None:
    """C29, llama-swap#1001: an idle websocket was counted as a request, so that ComfyUI could never be swapped out."""
    async with ollama(site, card), comfyui(site, card, held_mb=20_000) as owner:
        reader, writer = await asyncio.open_connection("127.0.0.1", owner.port)
        try:
            writer.write(
                b"GET /ws?clientId=tab HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
            )
            head = await reader.readuntil(b"\r\n\r\n")
            await begin(site)
            end = await site.run(job("large", 10_000))
            held_open = owner.sockets
        finally:
            writer.close()
            await writer.wait_closed()

    assert head.startswith(b"HTTP/1.1 101 ")
    assert isinstance(end, Succeeded)
    assert (held_open, owner.frees) == (1, 1)
    (asked,) = site.watch.of_device(HOST, CARD, ReclaimRequested)
    assert asked.idle_s is not None
    assert asked.idle_s >= GRACE_S
    await site.check()


async def test_c29_a_prompt_that_runs_or_waits_keeps_it_and_its_end_begins_the_grace(
    site: Site, card: SharedCards
) -> None:
    """C29's other side: somebody else's prompts, one that runs and one behind it."""
    async with ollama(site, card), comfyui(site, card, held_mb=20_000) as owner:
        owner.hold = asyncio.Event()
        for text in ("first", "second"):
            owner.queue_prompt({"1": {"class_type": "KSampler", "inputs": {"text": text}}})
        await begin(site)
        wanted = await site.submit(job("large", 10_000))
        words = await waits(site, wanted)
        await beats(site, "comfyui", "busy")
        assert owner.frees == 0
        owner.hold.set()
        end = await site.watch.end(wanted)

    assert isinstance(end, Succeeded)
    assert "comfyui" in words
    assert (owner.executions, owner.frees) == (2, 1)
    (asked,) = site.watch.of_device(HOST, CARD, ReclaimRequested)
    assert asked.idle_s is not None
    assert asked.idle_s >= GRACE_S
    await site.check()


# --- C31: healthy, and gives nothing


async def test_c31_a_server_that_gives_no_token_is_suspect_while_it_is_busy_and_trusted_when_it_idles(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    """C31, vllm#39863: health 200, running 0, waiting 6; one backend stayed in rotation for 85 minutes."""
    stuck, good = FakeVllm(), FakeVllm()
    stuck.stuck, stuck.engines = True, [[0.0, 6.0]]
    for fake in (stuck, good):
        fake.count_prompts = True
    async with site_in(tmp_path, nats_server.settings()) as site, stuck, good:
        site.devices = [{"id": DEVICE, "source": "static", "kind": "gpu", "total_mb": 24_000, "slots": 3}]
        site.sections["agent"] |= {"stop_proof_s": 3}
        site.served += [Served("a-stuck", "vllm", stuck, {"holds_mb": 8_000})]
        site.served += [Served("b-good", "vllm", good, {"holds_mb": 8_000})]
        await begin(site)
        named = {"model": "tiny", "runtime": "a-stuck"}
        first = await site.submit({**named, "prompt": "stuck", "deadlines": {"first_byte_s": 1}})
        suspected = await site.watch.until(lambda: site.watch.all(Suspect), "it is suspect")
        waiting = await site.submit({**named, "prompt": "later"})
        words = await waits(site, waiting, Reason.NO_ROUTE)
        elsewhere = [await site.run({"model": "tiny", "prompt": f"elsewhere {number}"}) for number in range(3)]
        end = await site.watch.end(first)
        await beats(site, "a-stuck", "busy")
        runtime = site.watch.site.hosts[HOST].runtime("a-stuck")
        prompts = dict(stuck.prompts)
        stuck.stuck, stuck.engines = False, None
        again = await site.watch.end(waiting)
        await site.check()

    assert (suspected[0].runtime, suspected[0].reason) == ("a-stuck", Reason.DEADLINE)
    assert isinstance(end, Expired)
    assert (end.clock, end.limit_s) == ("first_byte", 1.0)
    assert "suspect: deadline" in words
    assert [type(each) for each in elsewhere] == [Succeeded] * 3
    assert prompts == {"stuck": 1}, "nothing more is sent there"
    assert runtime is not None
    assert runtime.healthy
    assert (runtime.suspect or "").startswith("deadline: ")
    cleared = [fact for fact in site.watch.all(HealthChanged) if fact.runtime == "a-stuck"][-1]
    assert (cleared.healthy, cleared.suspect) == (True, None)
    assert isinstance(again, Succeeded)


# --- C31 and C32: what a vLLM's metrics say


def metrics(*series: str) -> str:
    return "\n".join(series) + "\n"


IDLE_SERIES = ('vllm:num_requests_running{engine="0"} 0.0', 'vllm:num_requests_waiting{engine="0"} 0.0')


@pytest.mark.parametrize(
    ("text", "activity"),
    [
        pytest.param(metrics(*IDLE_SERIES, 'vllm:num_requests_running{engine="1"} 1.0'), "busy", id="second engine"),
        pytest.param(metrics(*IDLE_SERIES, 'vllm:num_requests_waiting{engine="1"} 6.0'), "busy", id="only waiting"),
        pytest.param(metrics(IDLE_SERIES[0]), "unknown", id="waiting is absent"),
        pytest.param(metrics(IDLE_SERIES[1]), "unknown", id="running is absent"),
        pytest.param(metrics(*IDLE_SERIES, 'vllm:num_requests_running{engine="1"} NaN'), "unknown", id="not a number"),
        pytest.param(metrics(*IDLE_SERIES, 'vllm:num_requests_running{engine="1"} -1'), "unknown", id="negative"),
        pytest.param("", "unknown", id="nothing at all"),
        pytest.param("<html><body>nginx</body></html>", "unknown", id="another page"),
    ],
)
async def test_c31_c32_a_vllm_stays_until_every_series_says_that_nothing_runs_or_waits(
    site: Site, card: SharedCards, text: str, activity: Activity
) -> None:
    """C32, LLMKube's drain-before-roll; C31: six requests wait, and none runs."""
    async with ollama(site, card), vllm(site, card, holds_mb=16_000) as owner:
        owner.metrics_text = text
        await begin(site)
        wanted = await site.submit(job("large", 20_000))
        words = await waits(site, wanted)
        await beats(site, "vllm", activity)
        assert owner.sleeps == []
        assert not of_card(site, ReclaimRequested)
        owner.metrics_text = None
        end = await site.watch.end(wanted)

    assert isinstance(end, Succeeded)
    assert "vllm" in words
    assert owner.sleeps == [1]
    await site.check()


# --- sleeping and waking


@pytest.mark.parametrize("level", [1, 2])
async def test_a_vllm_sleeps_for_another_runtimes_job_and_is_woken_for_its_own(
    site: Site, card: SharedCards, level: int
) -> None:
    async with ollama(site, card) as other, vllm(site, card, holds_mb=20_000) as owner:
        site.served[-1].settings["release"] = f"sleep{level}"
        await begin(site)
        ends = [await site.run(job("there", 6_000))]
        asleep = owner.sleep_level
        ends.append(await site.run(job("back again", 20_000, model="tiny")))
        awake = owner.sleep_level
        ends.append(await site.run(job("and there", 6_000)))

    assert [type(end) for end in ends] == [Succeeded] * 3
    second = ends[1]
    assert isinstance(second, Succeeded)
    assert second.result is not None
    assert "!" not in (second.result.text or "!"), "it answers from weights, not from memory that holds nothing"
    assert (asleep, awake, owner.sleeps) == (level, 0, [level, level])
    assert owner.wakes == ([""] if level == 1 else ["weights", "kv_cache"])
    assert other.unloads == 1
    released = [(fact.runtime, fact.why) for fact in site.watch.all(ModelUnloaded)]
    assert released == [("vllm", "reclaim"), ("ollama", "reclaim"), ("vllm", "reclaim")]
    assert [fact.runtime for fact in site.watch.all(Reclaimed)] == ["vllm", "ollama", "vllm"]
    await site.check()


async def test_a_vllm_that_cannot_sleep_stays_in_service_and_the_job_waits_with_its_words(
    site: Site, card: SharedCards
) -> None:
    """It was started without sleep mode: it is asked, refuses, and goes on to serve."""
    async with ollama(site, card), vllm(site, card, holds_mb=16_000) as owner:
        owner.can_sleep = False
        await begin(site)
        wanted = await site.submit(job("large", 20_000))
        failed = await site.watch.until(lambda: site.watch.of_device(HOST, CARD, ReclaimFailed), "the release fails")
        await waits(site, wanted, Reason.RELEASE_FAILED)
        own = await site.run({"model": "tiny", "prompt": "goes on"})
        await beats(site, "vllm", "idle")
        asked = owner.requests["/sleep"]
        await site.command("cancel", wanted)
        end = await site.watch.end(wanted)

    assert failed[0].reason == Reason.RELEASE_FAILED
    assert "--enable-sleep-mode" in failed[0].detail
    assert isinstance(own, Succeeded)
    assert isinstance(end, Cancelled)
    assert asked == len(site.watch.of_device(HOST, CARD, ReclaimRequested)), "each time it is asked is an event"
    assert asked <= 2, "it is not asked again at once"
    assert not site.watch.all(Reclaimed)
    await site.check()
