"""How an Ollama gives memory back, fetches what is missing, and refuses rather than spills."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes.ollama import Ollama
from gpukeeper.agents.runtimes.port import PullProgress, RuntimeFailure
from gpukeeper.events.readings import ResidentModel
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import Work
from support.fake_http import Fault, FaultKind
from support.ollama import DISK_FULL, OUT_OF_VRAM, FakeOllama
from support.rig import reached

SIZE = 5_137_025_024


@pytest_asyncio.fixture
async def fake() -> AsyncGenerator[FakeOllama]:
    async with FakeOllama() as server:
        yield server


@pytest_asyncio.fixture
async def ollama(fake: FakeOllama) -> AsyncGenerator[Ollama]:
    async with registered(fake) as provider:
        yield provider


@asynccontextmanager
async def registered(fake: FakeOllama, **settings: Any) -> AsyncGenerator[Ollama]:
    """The provider of this server, with these settings in its registry entry."""
    provider = Ollama(RuntimeConfig(name="o", provider="ollama", url=fake.url, **settings), look_timeout_s=2.0)
    try:
        yield provider
    finally:
        await provider.close()


async def row_of(ollama: Ollama, model: str = "m:8b") -> ResidentModel | None:
    reading = await ollama.residency()
    assert reading.resident is not None
    return ollama.find(reading, model)


async def fetched(ollama: Ollama, model: str) -> list[PullProgress]:
    return [progress async for progress in ollama.pull(model)]


async def failure_of(work: Any) -> RuntimeFailure:
    with pytest.raises(RuntimeFailure) as caught:
        await work
    return caught.value


# --- release


async def test_a_release_asks_for_one_model_and_leaves_the_others(fake: FakeOllama, ollama: Ollama) -> None:
    await ollama.load("m:8b", on_cpu=False)
    await ollama.load("qwen3", on_cpu=False)

    await ollama.release("m:8b")

    assert list(fake.loaded) == ["qwen3:latest"]
    assert fake.bodies[-1] == ("/api/generate", {"model": "m:8b", "keep_alive": 0, "stream": False})


async def test_a_release_of_everything_is_refused_and_nothing_is_asked(fake: FakeOllama, ollama: Ollama) -> None:
    failure = await failure_of(ollama.release(None))

    assert failure.reason is Reason.NOT_RELEASABLE
    assert not fake.bodies


async def test_a_runtime_whose_registry_entry_forbids_it_is_never_asked_to_release(fake: FakeOllama) -> None:
    async with registered(fake, release="none") as ollama:
        await ollama.load("m:8b", on_cpu=False)

        failure = await failure_of(ollama.release("m:8b"))

        assert (ollama.releases, failure.reason) == ("none", Reason.NOT_RELEASABLE)
        assert fake.unloads == 0


@pytest.mark.parametrize("model", ["none:1b", "m:8b"])
async def test_a_release_that_is_refused_keeps_the_words(fake: FakeOllama, ollama: Ollama, model: str) -> None:
    """A model that is not installed any more is refused though it may still be held (ollama#15027)."""
    fake.unload_error = "unable to unload"

    failure = await failure_of(ollama.release(model))

    assert failure.reason is Reason.RELEASE_FAILED
    assert ("not found" if model == "none:1b" else "unable to unload") in failure.detail


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("empty", Reason.RUNTIME_EMPTY_REPLY), ("html", Reason.RUNTIME_BAD_REPLY), ("drop", Reason.RUNTIME_CUT)],
)
async def test_a_release_without_a_readable_answer_is_not_accepted(
    fake: FakeOllama, ollama: Ollama, kind: FaultKind, reason: Reason
) -> None:
    fake.faults["/api/generate"] = Fault(kind)

    assert (await failure_of(ollama.release("m:8b"))).reason is reason


async def test_a_release_whose_answer_does_not_say_it_is_done_is_not_accepted(fake: FakeOllama, ollama: Ollama) -> None:
    fake.faults["/api/generate"] = Fault("status", status=200, body='{"model":"m:8b"}')

    assert (await failure_of(ollama.release("m:8b"))).reason is Reason.RUNTIME_BAD_REPLY


async def test_c5_an_accepted_release_may_leave_the_model_stopping_for_ever(fake: FakeOllama, ollama: Ollama) -> None:
    fake.stays = True
    await ollama.load("m:8b", on_cpu=False)

    await ollama.release("m:8b")

    rows = [await row_of(ollama) for _ in range(3)]
    assert [row is not None and row.stopping for row in rows] == [True, True, True]


async def test_c24_an_accepted_release_may_give_back_a_share_though_no_row_is_left(
    fake: FakeOllama, ollama: Ollama
) -> None:
    used: list[int] = []
    fake.on_vram = used.append
    fake.release_share = 0.6
    await ollama.load("m:8b", on_cpu=False)

    await ollama.release("m:8b")

    assert await row_of(ollama) is None
    assert used == [SIZE, SIZE - int(SIZE * 0.6)]


async def test_c41_a_release_is_accepted_only_when_its_late_reply_has_come(fake: FakeOllama, ollama: Ollama) -> None:
    fake.hold_unload = asyncio.Event()
    await ollama.load("m:8b", on_cpu=False)
    release = asyncio.create_task(ollama.release("m:8b"))
    await reached(lambda: fake.unloads == 1, "the release is asked for")
    during = (release.done(), await row_of(ollama) is not None)

    fake.hold_unload.set()
    await release

    assert during == (False, True)
    assert await row_of(ollama) is None


async def test_c41_a_release_that_nobody_waits_for_any_more_may_still_land(fake: FakeOllama, ollama: Ollama) -> None:
    fake.hold_unload = asyncio.Event()
    await ollama.load("m:8b", on_cpu=False)
    release = asyncio.create_task(ollama.release("m:8b"))
    await reached(lambda: fake.unloads == 1, "the release is asked for")
    release.cancel()
    await asyncio.gather(release, return_exceptions=True)
    kept = await row_of(ollama)

    fake.hold_unload.set()

    assert kept is not None
    await reached(lambda: not fake.loaded, "the late release lands")


# --- refuse_spill


async def test_a_host_may_have_a_load_refused_that_would_spill(fake: FakeOllama) -> None:
    fake.vram_room = SIZE // 2
    async with registered(fake, refuse_spill=True) as ollama:
        failure = await failure_of(ollama.load("m:8b", on_cpu=False))

        assert failure.reason is Reason.LOAD_FAILED
        assert OUT_OF_VRAM in failure.detail
        assert "refuse_spill" in failure.detail
        assert await row_of(ollama) is None


async def test_a_load_spills_where_nobody_asked_it_to_refuse(fake: FakeOllama, ollama: Ollama) -> None:
    fake.vram_room = SIZE // 2

    await ollama.load("m:8b", on_cpu=False)

    row = await row_of(ollama)
    assert row is not None
    assert row.vram_bytes == SIZE // 2


@pytest.mark.parametrize(
    ("on_cpu", "options", "loaded", "run"),
    [
        (False, {}, {"num_gpu": 999}, {}),
        (False, {"num_gpu": 12}, {"num_gpu": 12}, {"num_gpu": 12}),
        (True, {}, {"num_gpu": 0}, {"num_gpu": 0}),
    ],
)
async def test_the_run_takes_the_placement_that_was_loaded(
    fake: FakeOllama, on_cpu: bool, options: dict[str, Any], loaded: dict[str, Any], run: dict[str, Any]
) -> None:
    """A run that names no layers takes the model as it is, whoever loaded it."""
    async with registered(fake, refuse_spill=True) as ollama:
        work = Work(prompt="x", options=options)

        await ollama.load("m:8b", on_cpu=on_cpu, work=work)
        async for _ in ollama.run("m:8b", "generate", work, on_cpu=on_cpu):
            pass

    assert [body.get("options", {}) for _, body in fake.bodies] == [loaded, run]
    assert fake.loads == 1


async def test_a_failed_load_says_nothing_of_spilling_where_the_job_chose_the_layers(fake: FakeOllama) -> None:
    fake.load_error = "boom"
    async with registered(fake, refuse_spill=True) as ollama:
        failure = await failure_of(ollama.load("m:8b", on_cpu=False, work=Work(prompt="x", options={"num_gpu": 12})))

    assert failure.reason is Reason.LOAD_FAILED
    assert "refuse_spill" not in failure.detail


# --- pull


async def test_a_fetch_tells_how_far_it_is_and_ends_when_the_model_is_there(fake: FakeOllama, ollama: Ollama) -> None:
    progress = await fetched(ollama, "small:1b")

    assert [one.status for one in progress][::6] == ["pulling manifest", "success"]
    assert progress[2] == PullProgress(status="pulling abc", completed_bytes=500_000, total_bytes=1_000_000)
    assert "small:1b" in ((await ollama.look()).models or ())


@pytest.mark.parametrize("words", [DISK_FULL, "pull model manifest: file does not exist"])
async def test_the_words_of_a_failed_fetch_are_kept(fake: FakeOllama, ollama: Ollama, words: str) -> None:
    fake.pull_error = DISK_FULL

    failure = await failure_of(fetched(ollama, "small:1b" if words == DISK_FULL else "none:1b"))

    assert failure.reason is Reason.PROVISION_FAILED
    assert words in failure.detail
    assert "small:1b" not in fake.installed


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("status", status=500, body='{"error":"no space left on device"}'), Reason.PROVISION_FAILED),
        (Fault("cut"), Reason.RUNTIME_CUT),
        (Fault("drop"), Reason.RUNTIME_CUT),
        (Fault("status", status=200, body='{"status":"pulling manifest"}\n'), Reason.RUNTIME_CUT),
        (Fault("html"), Reason.RUNTIME_BAD_REPLY),
        (Fault("empty"), Reason.RUNTIME_EMPTY_REPLY),
    ],
    ids=["500", "cut", "drop", "no success", "html", "empty"],
)
async def test_a_fetch_that_does_not_end_with_success_has_failed(
    fake: FakeOllama, ollama: Ollama, fault: Fault, reason: Reason
) -> None:
    fake.faults["/api/pull"] = fault

    assert (await failure_of(fetched(ollama, "small:1b"))).reason is reason


async def test_a_fetch_that_is_left_is_given_up_by_the_server(fake: FakeOllama, ollama: Ollama) -> None:
    fake.hold_pull = asyncio.Event()
    async with aclosing(ollama.pull("small:1b")) as pulling:
        async for progress in pulling:
            if progress.completed_bytes:
                break

    await reached(lambda: fake.pulls_aborted == 1, "the server gives the fetch up")
    assert "small:1b" not in fake.installed


@pytest.mark.parametrize("figure", ["null", '"7"', "-1", "1e300", "0", "[]"])
async def test_a_figure_of_a_fetch_that_is_none_is_unknown(fake: FakeOllama, ollama: Ollama, figure: str) -> None:
    line = f'{{"status":"pulling abc","total":{figure},"completed":{figure}}}\n{{"status":"success"}}\n'
    fake.faults["/api/pull"] = Fault("status", status=200, body=line)

    progress = await fetched(ollama, "small:1b")

    assert progress[0] == PullProgress(status="pulling abc")
