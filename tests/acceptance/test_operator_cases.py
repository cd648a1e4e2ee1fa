"""What operators ask for, on the whole path: `gpuq` commands, the events they become, and what the host does.

Memory is on a card of the stub driver; containers run on a real Docker engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.cli.exitcodes import Exit
from gpukeeper.events.device import Drained, Reclaimed, ReclaimRequested, Resumed
from gpukeeper.events.job import Accepted, Admitted, Started, Succeeded
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import Acted, HealthChanged, ModelUnloaded
from support.card_site import CARD, EMPTY_MB, TOTAL_MB, beats, begin, comfyui, job, ollama, waits
from support.dockerd import DockerDaemon
from support.fake_http import Exchange, FakeServer
from support.llamacpp_fake import FakeLlamaCpp
from support.nats import NatsServer
from support.operators import Said, gpuq
from support.shared_cards import SharedCards
from support.site import HOST, Served, Site, site_in
from support.waiting import until

pytestmark = pytest.mark.processes
pytest_plugins = ["support.nvml_fixture", "support.card_fixture", "support.docker_fixture"]

HELD_MB = 20_000
#: Requests with a body that a look sends all the same: they ask, and change nothing.
ASKING = ("/api/show",)


# --- reclaim, pin, unpin


async def test_reclaim_frees_what_is_idle_and_tells_what_the_device_shows(site: Site, card: SharedCards) -> None:
    async with comfyui(site, card, held_mb=HELD_MB) as owner:
        await begin(site)
        await beats(site, "comfyui", "idle")
        said = await gpuq(site, "reclaim", HOST, CARD, "--reason", "a game", "--json")
        again = await gpuq(site, "reclaim", HOST, CARD, "--vram-mb", "22000", "--json")

    assert (said.code, said.err) == (Exit.OK, "")
    assert (said.document["state"], said.document["freed_mb"]) == ("freed", HELD_MB)
    types = [each["type"] for each in said.document["events"]]
    assert types[:3] == ["device.reclaim_wanted", "device.reclaim_requested", "device.reclaimed"]
    (reclaimed,) = site.watch.of_device(HOST, CARD, Reclaimed)
    assert (reclaimed.promised_mb, reclaimed.measured_mb, reclaimed.free_mb) == (HELD_MB, HELD_MB, EMPTY_MB)
    assert [(fact.runtime, fact.why) for fact in site.watch.all(ModelUnloaded)] == [("comfyui", "operator")]
    assert (again.code, again.document["reason"]) == (Exit.OK, "not_needed")
    assert owner.frees == 1
    assert not site.watch.all(Accepted)
    await site.check()


async def test_reclaim_within_the_grace_is_refused_in_words_and_nobody_is_asked(site: Site, card: SharedCards) -> None:
    site.sections["agent"]["idle_grace_s"] = 300.0
    async with comfyui(site, card, held_mb=HELD_MB) as owner:
        await begin(site)
        await beats(site, "comfyui", "idle", times=1)
        said = await gpuq(site, "reclaim", HOST, CARD)

    assert said.code == Exit.REFUSED
    assert "in_grace" in said.out
    assert "of 300 s" in said.out
    assert "comfyui" in said.out
    assert owner.frees == 0
    assert not site.watch.all(ReclaimRequested)
    await site.check()


async def test_what_is_pinned_is_kept_from_operators_and_jobs_until_it_is_unpinned(
    site: Site, card: SharedCards
) -> None:
    """C58's kind: a pin wins over a wish and over a job's need."""
    async with ollama(site, card), comfyui(site, card, held_mb=HELD_MB) as owner:
        await begin(site)
        pinned = await gpuq(site, "pin", HOST, "comfyui", "--reason", "demo at noon")
        await beats(site, "comfyui", "idle")
        refused = await gpuq(site, "reclaim", HOST, CARD, "--json")
        wanted = await site.submit(job("large", 10_000))
        words = await waits(site, wanted)
        await beats(site, "comfyui", "idle")
        frees = owner.frees
        unpinned = await gpuq(site, "unpin", HOST, "comfyui")
        end = await site.watch.end(wanted)

    assert (pinned.code, unpinned.code) == (Exit.OK, Exit.OK)
    assert refused.code == Exit.REFUSED
    assert {each["runtime"]: each["kept"] for each in refused.document["stays"]} == {
        "comfyui": "pinned",
        "ollama": "other_device",
    }
    assert frees == 0
    assert "pinned" in words
    assert isinstance(end, Succeeded)
    assert owner.frees == 1
    await site.check()


# --- drain and resume


async def test_a_drained_device_lets_its_job_go_on_and_begins_nothing_until_it_is_resumed(
    site: Site, card: SharedCards
) -> None:
    async with ollama(site, card) as runtime:
        await begin(site)
        runtime.hold = asyncio.Event()
        running = await site.submit(job("runs", 6_000))
        await site.watch.fact(running, Started)
        drained = await gpuq(site, "drain", HOST, CARD, "--reason", "new fan")
        waiting = await site.submit(job("waits", 6_000))
        words = await waits(site, waiting, Reason.DRAINED)
        runtime.hold.set()
        end = await site.watch.end(running)
        await beats(site, "ollama", "idle")
        shown = await gpuq(site, "devices", "--json")
        begun_before = len(site.watch.of_job(waiting, Admitted))
        resumed = await gpuq(site, "resume", f"{HOST}/{CARD}")
        after = await site.watch.end(waiting)

    assert (drained.code, resumed.code) == (Exit.OK, Exit.OK)
    assert isinstance(end, Succeeded)
    assert "new fan" in words
    assert shown.document["hosts"][0]["devices"][0]["drained"].endswith(": new fan")
    assert begun_before == 0
    assert isinstance(after, Succeeded)
    assert (len(site.watch.all(Drained)), len(site.watch.all(Resumed))) == (1, 1)
    await site.check()


# --- preview


def changing(*servers: FakeServer) -> list[str]:
    """The paths of all requests so far that could change anything."""
    return [path for server in servers for path, _ in server.bodies if path not in ASKING]


async def test_a_preview_of_the_recorded_example_reports_what_stays_and_changes_nothing(
    site: Site, card: SharedCards
) -> None:
    """22,000 MB are asked, too little is free, ComfyUI is within its grace: it is reported, and nothing starts."""
    site.sections["agent"]["idle_grace_s"] = 300.0
    async with ollama(site, card) as other, comfyui(site, card, held_mb=21_670) as owner:
        await begin(site)
        await beats(site, "comfyui", "idle")
        await site.watch.caught_up()
        before = len(site.watch.events)
        asked = ("preview", "--model", "m:8b", "--vram-mb", "22000", "--host", HOST, "--device", CARD)
        words = await gpuq(site, *asked)
        document = await gpuq(site, *asked, "--json")
        fits = await gpuq(site, "preview", "--model", "m:8b", "--vram-mb", "1000")
        never = await gpuq(site, "preview", "--model", "m:8b", "--vram-mb", str(TOTAL_MB + 1))
        await site.watch.caught_up()
        after = len(site.watch.events)
        requests = changing(owner, other)

    assert words.code == Exit.NO_ROOM
    assert "22000 MB" in words.out
    assert "comfyui" in words.out
    assert "of 300 s" in words.out
    assert words.out.endswith("This is a preview: nothing was released and nothing started.\n")
    (place,) = document.document["places"]
    assert (document.document["outcome"], place["reason"]) == ("denied", "insufficient")
    assert [(each["runtime"], each["held_mb"], each["kept"]) for each in place["stays"]] == [
        ("comfyui", 21_670, "in_grace")
    ]
    assert (fits.code, never.code) == (Exit.OK, Exit.NO_ROOM)
    assert after == before, "a preview leaves no event"
    assert not site.watch.all(Accepted)
    assert requests == []
    assert (owner.frees, other.load_calls) == (0, 0)


async def test_a_preview_says_who_would_be_released_and_releases_nobody(site: Site, card: SharedCards) -> None:
    async with ollama(site, card) as other, comfyui(site, card, held_mb=HELD_MB) as owner:
        await begin(site)
        await beats(site, "comfyui", "idle")
        await site.watch.caught_up()
        before = len(site.watch.events)
        words = await gpuq(site, "preview", "--model", "m:8b", "--vram-mb", "22000")
        await site.watch.caught_up()
        after = len(site.watch.events)
        requests = changing(owner, other)

    assert words.code == Exit.OK
    assert "comfyui" in words.out
    assert after == before
    assert requests == []
    assert owner.frees == 0


# --- containers


@pytest.fixture
async def hosted(tmp_path: Path, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """A site whose host computes on its CPU, where runtimes may name containers."""
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    async with site_in(tmp_path, nats_server.settings()) as site:
        site.devices = [{"id": "cpu0", "source": "static", "kind": "cpu", "total_mb": 24_000, "slots": 2}]
        yield site


def lives_in(site: Site, server: FakeLlamaCpp, name: str, container: str | None = None) -> None:
    """A llama.cpp server of the test, which the registry says to live in that container."""
    server.count_prompts = True
    site.served.append(Served(name, "llamacpp", server, {} if container is None else {"container": container}))


async def serve(site: Site, *healthy: str) -> None:
    """Start the parts, and wait until those runtimes answer; others may not."""
    site.scheduler()
    site.agent()
    for name in healthy:
        await health(site, name, healthy=True)


async def health(site: Site, runtime: str, *, healthy: bool, words: str = "", times: int = 1) -> HealthChanged:
    """Wait for the ``times``-th event that says so."""

    def look() -> HealthChanged | None:
        facts = [fact for fact in site.watch.all(HealthChanged) if fact.runtime == runtime]
        found = [fact for fact in facts if fact.healthy == healthy and words in fact.detail]
        return found[times - 1] if len(found) >= times else None

    return await site.watch.until(look, f"{runtime} is {'' if healthy else 'un'}healthy ({words!r}, {times} times)")


def acts(site: Site) -> list[tuple[str, bool, Reason | None]]:
    return [(fact.act, fact.done, fact.reason) for fact in site.watch.all(Acted)]


async def test_an_operator_stops_begins_and_restarts_a_runtimes_container(
    hosted: Site, docker_engine: DockerDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine.url)
    docker_engine.make("op-acts", "sleep", "1000")
    async with FakeLlamaCpp() as contained, FakeLlamaCpp(model="other") as other:
        lives_in(hosted, contained, "contained", "op-acts")
        lives_in(hosted, other, "other")
        await serve(hosted, "contained", "other")
        stopped = await gpuq(hosted, "runtime", "stop", HOST, "contained", "--reason", "upgrade", "--json")
        after_stop = docker_engine.status("op-acts")
        await health(hosted, "contained", healthy=False, words="op-acts is stopped")
        waiting = await hosted.submit({"model": "fake", "prompt": "waits for the container"})
        await waits(hosted, waiting, Reason.NO_ROUTE)
        elsewhere = await hosted.run({"model": "other", "prompt": "goes on"})
        begun = await gpuq(hosted, "runtime", "begin", f"{HOST}/contained")
        end = await hosted.watch.end(waiting)
        started_at = docker_engine.client.inspect_container("op-acts")["State"]["StartedAt"]
        restarted = await gpuq(hosted, "runtime", "restart", HOST, "contained")
        again = docker_engine.client.inspect_container("op-acts")["State"]["StartedAt"]
        await hosted.check()

    assert (stopped.code, stopped.document["state"], after_stop) == (Exit.OK, "done", "exited")
    assert (begun.code, restarted.code) == (Exit.OK, Exit.OK)
    assert docker_engine.status("op-acts") == "running"
    assert started_at != again
    assert isinstance(elsewhere, Succeeded)
    assert isinstance(end, Succeeded)
    assert acts(hosted) == [("stop", True, None), ("begin", True, None), ("restart", True, None)]


async def test_a_container_whose_runtime_runs_a_job_is_neither_stopped_nor_restarted(
    hosted: Site, docker_engine: DockerDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine.url)
    docker_engine.make("op-busy", "sleep", "1000")
    async with FakeLlamaCpp() as contained:
        lives_in(hosted, contained, "contained", "op-busy")
        await serve(hosted, "contained")
        contained.hold = asyncio.Event()
        running = await hosted.submit({"model": "fake", "prompt": "runs"})
        await hosted.watch.fact(running, Started)
        refused = [await gpuq(hosted, "runtime", act, HOST, "contained") for act in ("stop", "restart")]
        status = docker_engine.status("op-busy")
        contained.hold.set()
        end = await hosted.watch.end(running)
        stopped = await gpuq(hosted, "runtime", "stop", HOST, "contained")
        await hosted.check()

    assert [each.code for each in refused] == [Exit.REFUSED] * 2
    assert all("owner_busy" in each.out + each.err for each in refused)
    assert status == "running"
    assert isinstance(end, Succeeded)
    assert stopped.code == Exit.OK


async def test_a_container_that_only_holds_memory_is_stopped_for_a_job_and_begun_again(
    site: Site, card: SharedCards, docker_engine: DockerDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver lists its process under the host's number; whose it is shows its control group."""
    monkeypatch.setenv("DOCKER_HOST", docker_engine.url)
    docker_engine.make("op-holds", "sleep", "1000")
    pid = docker_engine.client.inspect_container("op-holds")["State"]["Pid"]
    card.hold("op-holds", 10_000, on=CARD, pid=pid)
    async with ollama(site, card):
        site.extra_runtimes.append(
            {"name": "holder", "provider": "container", "container": "op-holds", "release": "stop", "sole_client": True}
        )
        await begin(site)
        await health(site, "holder", healthy=True)
        wanted = await site.submit(job("large", 20_000))
        await until(lambda: docker_engine.status("op-holds") == "exited", "the container is stopped")
        card.hold("op-holds", 0, on=CARD)
        end = await site.watch.end(wanted)
        begun = await gpuq(site, "runtime", "begin", HOST, "holder")
        await site.check()

    assert isinstance(end, Succeeded)
    (reclaimed,) = site.watch.of_device(HOST, CARD, Reclaimed)
    assert (reclaimed.runtime, reclaimed.promised_mb, reclaimed.measured_mb) == ("holder", 10_000, 10_000)
    assert begun.code == Exit.OK
    assert docker_engine.status("op-holds") == "running"


async def test_c34_a_container_that_keeps_restarting_gets_no_job_and_is_not_begun(
    hosted: Site, docker_engine: DockerDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C34, eugr/spark-vllm-docker#257: about 35 restarts, each of which leaked memory."""
    monkeypatch.setenv("DOCKER_HOST", docker_engine.url)
    docker_engine.make("op-loops", "false", restart="unless-stopped")
    async with FakeLlamaCpp() as contained, FakeLlamaCpp(model="other") as other:
        lives_in(hosted, contained, "contained", "op-loops")
        lives_in(hosted, other, "other")
        await serve(hosted, "other")
        told = await health(hosted, "contained", healthy=False, words="crash-looping")
        waiting = await hosted.submit({"model": "fake", "runtime": "contained", "prompt": "waits"})
        await waits(hosted, waiting, Reason.NO_ROUTE)
        begun = await gpuq(hosted, "runtime", "begin", HOST, "contained", "--json")
        restarted = await gpuq(hosted, "runtime", "restart", HOST, "contained")
        shown = await gpuq(hosted, "devices", "--json")
        elsewhere = await hosted.run({"model": "other", "prompt": "goes on"})
        stopped = await gpuq(hosted, "runtime", "stop", HOST, "contained")
        status = docker_engine.status("op-loops")
        prompts = dict(contained.prompts)

    assert "restarted" in told.detail
    assert (begun.code, begun.document["state"], begun.document["reason"]) == (
        Exit.REFUSED,
        "refused",
        "crash_looping",
    )
    assert restarted.code == Exit.REFUSED
    assert (stopped.code, status) == (Exit.OK, "exited")
    assert acts(hosted) == [
        ("begin", False, Reason.CRASH_LOOPING),
        ("restart", False, Reason.CRASH_LOOPING),
        ("stop", True, None),
    ]
    runtimes = {each["runtime"]: each for each in shown.document["hosts"][0]["runtimes"]}
    assert "crash-looping" in runtimes["contained"]["detail"]
    assert isinstance(elsewhere, Succeeded)
    assert prompts == {}
    assert not hosted.watch.of_job(waiting, Admitted)


async def test_a_container_that_is_removed_under_us_is_a_clear_state_and_the_rest_goes_on(
    hosted: Site, docker_engine: DockerDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine.url)
    docker_engine.make("op-gone", "sleep", "1000")
    async with FakeLlamaCpp() as contained, FakeLlamaCpp(model="other") as other:
        lives_in(hosted, contained, "contained", "op-gone")
        lives_in(hosted, other, "other")
        await serve(hosted, "contained", "other")
        docker_engine.remove("op-gone")
        told = await health(hosted, "contained", healthy=False, words="does not exist")
        said = {act: await gpuq(hosted, "runtime", act, HOST, "contained") for act in ("begin", "stop", "restart")}
        elsewhere = await hosted.run({"model": "other", "prompt": "goes on"})
        docker_engine.make("op-gone", "sleep", "1000")
        await health(hosted, "contained", healthy=True, times=2)
        back = await hosted.run({"model": "fake", "prompt": "back"})
        await hosted.check()

    assert "op-gone" in told.detail
    assert {act: each.code for act, each in said.items()} == dict.fromkeys(said, Exit.JOB_FAILED)
    assert all("does not exist" in each.out + each.err for each in said.values())
    assert isinstance(elsewhere, Succeeded)
    assert isinstance(back, Succeeded)


class OddEngine(FakeServer):
    """Answers as an engine does that cannot be used."""

    def __init__(self, body: dict[str, Any], status: int = 200) -> None:
        super().__init__()
        self._body, self._status = body, status

    def answer(self, exchange: Exchange) -> None:
        exchange.respond_json(self._body, status=self._status)


#: Why the engine cannot be used -> (what answers in its place, what is said of it).
ENGINES: dict[str, tuple[OddEngine | None, str]] = {
    "absent": (None, "no container engine at "),
    "forbidden": (OddEngine({"message": "not for you"}, 403), "does not allow it"),
    "too old": (OddEngine({"Version": "1.10", "ApiVersion": "1.22"}), "or newer is needed"),
    "no engine at all": (OddEngine({"hello": "world"}), "is no container engine"),
}


@pytest.mark.parametrize("why", ENGINES)
async def test_an_engine_that_cannot_be_used_is_a_clear_state_and_jobs_go_on(
    hosted: Site, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    engine, words = ENGINES[why]
    async with FakeLlamaCpp() as contained, engine or FakeServer():
        url = f"unix://{hosted.folder}/none" if engine is None else engine.url.replace("http:", "tcp:")
        monkeypatch.setenv("DOCKER_HOST", url)
        lives_in(hosted, contained, "contained", "any")
        hosted.extra_runtimes.append({"name": "plain", "provider": "container", "container": "plain"})
        await serve(hosted, "contained")
        told = await health(hosted, "plain", healthy=False)
        end = await hosted.run({"model": "fake", "prompt": "goes on"})
        begun = await gpuq(hosted, "runtime", "begin", HOST, "plain")
        shown = await gpuq(hosted, "devices")
        doctor = await gpuq(hosted, "doctor", "--json")
        again = await hosted.run({"model": "fake", "prompt": "and on"})
        await hosted.check()

    assert words in told.detail
    assert [type(each) for each in (end, again)] == [Succeeded] * 2
    assert begun.code == Exit.JOB_FAILED
    assert words in begun.out + begun.err
    assert acts(hosted) == [("begin", False, Reason.CONTAINER_ENGINE)]
    assert shown.code == Exit.OK
    assert words in check_of(doctor, "containers")["detail"]


def check_of(doctor: Said, name: str) -> dict[str, Any]:
    """What `gpuq doctor --json` says under this name."""
    (found,) = [check for check in doctor.document["checks"] if check["name"] == name]
    return found
