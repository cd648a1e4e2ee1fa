from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import structlog.testing

import gpukeeper.events
import gpukeeper.projections
from gpukeeper.events.codec import Event
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.log import Record
from gpukeeper.events.memory import MemoryLog
from gpukeeper.events.objects import MemoryObjects
from gpukeeper.projections import snapshot
from gpukeeper.projections.runner import SiteProjection
from gpukeeper.projections.site import Retention, Site
from gpukeeper.projections.snapshot import encode_state, folding_modules
from support.history import History

RETENTION = Retention()


@pytest.fixture
def h() -> History:
    history = History()
    history.joined()
    history.is_running("a")
    history.is_routed("b")
    history.submitted()
    history.cancel_wanted("b")
    return history


class CopiedLog(MemoryLog):
    """A log that is given the events of a history, with their times."""

    def __init__(self) -> None:
        super().__init__(now_ns=lambda: self.at_ns)
        self.at_ns = 0

    async def copy(self, h: History) -> CopiedLog:
        """Take what the history has and this log has not."""
        for event in h.events[await self.last_seq() :]:
            stored = event.stored
            self.at_ns = stored.stored_ns
            await self.append(Record(subject=stored.subject, body=stored.body, event_id=f"m{stored.seq}"))
        return self


async def log_of(h: History) -> CopiedLog:
    return await CopiedLog().copy(h)


async def test_a_snapshot_gives_back_the_very_state(h: History) -> None:
    objects = MemoryObjects()
    await snapshot.save(objects, h.site)

    found = await snapshot.load(objects, await log_of(h), RETENTION)

    assert found is not None
    assert encode_state(found) == encode_state(h.site)
    assert snapshot.digest(found) == snapshot.digest(h.site)


async def test_without_a_snapshot_there_is_none(h: History) -> None:
    assert await snapshot.load(MemoryObjects(), await log_of(h), RETENTION) is None


async def test_the_newest_few_are_kept_and_the_newest_is_taken(h: History) -> None:
    objects = MemoryObjects()
    names: list[str] = []
    for number in range(5):
        h.accepted(f"j{number}")
        names.append(await snapshot.save(objects, h.site))

    found = await snapshot.load(objects, await log_of(h), RETENTION)

    assert await objects.names() == names[-3:]
    assert found is not None
    assert found.seq == h.seq


async def test_a_snapshot_of_the_empty_site_fits_any_log(h: History) -> None:
    objects = MemoryObjects()
    await snapshot.save(objects, Site())

    found = await snapshot.load(objects, await log_of(h), RETENTION)

    assert found is not None
    assert found.seq == 0


async def passed_over(objects: MemoryObjects, log: MemoryLog, retention: Retention = RETENTION) -> list[str]:
    """Load, expect nothing, and return the reasons that were logged."""
    with structlog.testing.capture_logs() as entries:
        assert await snapshot.load(objects, log, retention) is None
    return [str(entry["reason"]) for entry in entries]


async def test_of_other_code_the_newest_snapshot_is_kept_for_who_goes_back_to_it(h: History) -> None:
    objects = MemoryObjects()
    for name in ("site-ffffffffffff-1", "site-aaaaaaaaaaaa-3", "site-000000000000-2", "not ours"):
        await objects.put(name, b"")

    mine = await snapshot.save(objects, h.site)

    assert await objects.names() == ["site-000000000000-2", "not ours", mine]


def test_the_version_of_the_code_is_that_of_what_folding_imports_and_of_nothing_else() -> None:
    """In a process of its own, since this one has imported everything."""
    program = (
        "import sys, gpukeeper.events.codec, gpukeeper.projections.site\n"
        "print(*(m.removeprefix('gpukeeper.') for m in sys.modules if m.startswith('gpukeeper.')))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = {name for name in ran.stdout.split() if "." in name}
    packages = {"events": gpukeeper.events.__path__, "projections": gpukeeper.projections.__path__}

    hashed = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name, _ in folding_modules(packages)
    }

    assert {name for name in hashed if "." in name} == imported | {"projections.snapshot"}


def test_modules_in_folders_of_a_package_count_too(tmp_path: Path) -> None:
    (tmp_path / "facts").mkdir()
    (tmp_path / "facts" / "job.py").touch()
    (tmp_path / "codec.py").touch()
    (tmp_path / "client.py").touch()

    assert [name for name, _ in folding_modules({"events": [str(tmp_path)]})] == [
        "events/codec.py",
        "events/facts/job.py",
    ]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda body: body[:-1], "corrupt"),
    "empty": (lambda body: b"", "corrupt"),
    "zeros": (lambda body: b"\x00" * 50, "corrupt"),
    "changed": (lambda body: body[:-1] + bytes([body[-1] ^ 0xFF]), "digest does not match"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
async def test_a_damaged_snapshot_is_passed_over(h: History, damage: Callable[[bytes], bytes], reason: str) -> None:
    objects = MemoryObjects()
    name = await snapshot.save(objects, h.site)
    body = await objects.get(name)
    assert body is not None
    await objects.put(name, damage(body))

    (found,) = await passed_over(objects, await log_of(h))

    assert reason in found


async def test_a_state_of_another_shape_under_the_right_name_is_passed_over(h: History) -> None:
    objects = MemoryObjects()
    name = await snapshot.save(objects, h.site)
    body = await objects.get(name)
    assert body is not None
    fields = msgspec.msgpack.decode(body)
    state = msgspec.msgpack.encode([1, 2, 3])
    fields["state"] = msgspec.Raw(state)
    fields["digest"] = hashlib.sha256(state).hexdigest()
    await objects.put(name, msgspec.msgpack.encode(fields))

    (found,) = await passed_over(objects, await log_of(h))

    assert "corrupt" in found


async def test_an_older_snapshot_is_taken_where_the_newest_is_damaged(h: History) -> None:
    objects = MemoryObjects()
    await snapshot.save(objects, h.site)
    older = h.seq
    h.accepted("later")
    await objects.put(await snapshot.save(objects, h.site), b"damaged")

    found = await snapshot.load(objects, await log_of(h), RETENTION)

    assert found is not None
    assert found.seq == older


async def test_snapshots_of_other_code_are_passed_over(h: History) -> None:
    objects = MemoryObjects()
    name = await snapshot.save(objects, h.site)
    body = await objects.get(name)
    assert body is not None
    await objects.put(name.replace(snapshot.code_version(), "0" * 12), body)
    await objects.delete(name)

    assert await passed_over(objects, await log_of(h)) == ["all were made by other code"]


async def test_a_snapshot_with_another_retention_is_passed_over(h: History) -> None:
    """It has forgotten more, or less, than this fold would have."""
    objects = MemoryObjects()
    await snapshot.save(objects, h.site)

    assert await passed_over(objects, await log_of(h), Retention(above=5)) == ["it was made with another retention"]


async def test_a_snapshot_of_another_log_is_passed_over(h: History) -> None:
    objects = MemoryObjects()
    await snapshot.save(objects, h.site)
    other = History()
    other.after(5).joined()
    shorter = await log_of(other)
    for number in range(30):
        other.accepted(f"o{number}")
    longer = await log_of(other)

    assert "another log" in (await passed_over(objects, shorter))[0]
    assert await passed_over(objects, longer) == ["it belongs to another log"]


async def test_a_snapshot_whose_event_has_aged_out_is_taken_where_the_log_goes_on_right_after_it(h: History) -> None:
    objects = MemoryObjects()
    await snapshot.save(objects, h.site)
    taken_at = h.seq
    log = await log_of(h)
    log.age_out(taken_at)
    idle = await snapshot.load(objects, log, RETENTION)
    h.accepted("later")
    await log.copy(h)
    going_on = await snapshot.load(objects, log, RETENTION)
    log.age_out(taken_at + 1)

    assert idle is not None
    assert going_on is not None
    assert idle.seq == going_on.seq == taken_at
    assert "has aged out" in (await passed_over(objects, log))[0]


async def test_an_older_event_after_the_snapshot_is_of_another_log(h: History) -> None:
    objects = MemoryObjects()
    await snapshot.save(objects, h.site)
    taken_at = h.seq
    older = MemoryLog(now_ns=lambda: 5)
    for number in range(taken_at + 1):
        await older.append(Record(subject="gpuq.ev.site", body=b"", event_id=str(number)))
    older.age_out(taken_at)

    assert await passed_over(objects, older) == ["it belongs to another log"]


class Failing(MemoryObjects):
    """A bucket that does not answer about some."""

    def __init__(self, *, names_fail: bool = False, bodies_fail: bool = False) -> None:
        super().__init__()
        self._names_fail = names_fail
        self._bodies_fail = bodies_fail

    async def names(self) -> list[str]:
        if self._names_fail:
            raise LogUnavailable("the bucket does not answer")
        return await super().names()

    async def get(self, name: str, *, size_max: int | None = None) -> bytes | None:
        if self._bodies_fail:
            raise LogUnavailable("the object is broken")
        return await super().get(name, size_max=size_max)


async def test_a_bucket_that_does_not_answer_is_passed_over(h: History) -> None:
    assert await passed_over(Failing(names_fail=True), await log_of(h)) == ["the bucket does not answer"]


async def test_an_object_that_cannot_be_read_is_passed_over(h: History) -> None:
    objects = Failing(bodies_fail=True)
    await snapshot.save(objects, h.site)

    assert await passed_over(objects, await log_of(h)) == ["the object is broken"]


async def test_a_log_that_does_not_answer_is_no_reason_to_pass_a_snapshot_over(h: History) -> None:
    objects = MemoryObjects()
    await snapshot.save(objects, h.site)
    log = await log_of(h)
    log.unreadable = True

    with pytest.raises(LogUnavailable):
        await snapshot.load(objects, log, RETENTION)


# --- keeping a site folded


async def started(
    log: MemoryLog, objects: MemoryObjects | None = None, on_event: Callable[[Event], None] | None = None
) -> SiteProjection:
    projection = SiteProjection(log, objects=objects, on_event=on_event)
    await projection.start(silent_s=5)
    return projection


async def test_a_start_without_snapshots_folds_everything(h: History) -> None:
    projection = await started(await log_of(h))

    assert encode_state(projection.site) == encode_state(h.site)
    assert projection.started_at == 0
    await projection.stop()


async def test_a_start_is_the_snapshot_and_what_came_after_it(h: History) -> None:
    objects = MemoryObjects()
    first = await started(await log_of(h), objects)
    await first.save()
    await first.stop()
    taken_at = h.seq
    h.accepted("later")
    seen: list[int] = []
    second = await started(await log_of(h), objects, on_event=lambda event: seen.append(event.seq))

    assert second.started_at == taken_at
    assert seen == list(range(taken_at + 1, h.seq + 1))
    assert encode_state(second.site) == encode_state(h.site)
    await second.stop()


async def test_a_started_projection_folds_on_as_events_are_stored(h: History) -> None:
    log = await log_of(h)
    projection = await started(log)
    h.accepted("later")
    await log.copy(h)

    await projection.wait_folded(h.seq, timeout_s=5)

    assert "later" in projection.site.jobs
    await projection.stop()
    await projection.stop()
    h.accepted("unheard")
    await log.copy(h)
    assert "unheard" not in projection.site.jobs


async def test_a_start_whose_fold_raises_says_so_at_once(h: History) -> None:
    def cannot(event: Event) -> None:
        raise ArithmeticError(f"not {event.seq}")

    projection = SiteProjection(await log_of(h), on_event=cannot)

    with pytest.raises(ArithmeticError, match="not 1"):
        await asyncio.wait_for(projection.start(), 10)


async def test_a_start_on_an_empty_log_waits_for_nothing() -> None:
    projection = await started(MemoryLog(now_ns=lambda: 1), MemoryObjects())

    assert projection.site.seq == 0
    await projection.stop()


async def test_a_start_on_a_log_whose_newest_event_has_aged_out_waits_for_nothing(h: History) -> None:
    """The stream's last sequence is of an event that nobody will ever be handed."""
    log = await log_of(h)
    log.age_out(h.seq)
    projection = await started(log, MemoryObjects())

    assert projection.site.seq == 0
    h.accepted("later")
    await log.copy(h)
    assert list(projection.site.jobs) == ["later"]
    await projection.stop()


async def test_a_start_on_a_snapshot_whose_log_is_empty_now_keeps_the_state(h: History) -> None:
    objects = MemoryObjects()
    await snapshot.save(objects, h.site)
    log = await log_of(h)
    log.age_out(h.seq)

    projection = await started(log, objects)

    assert encode_state(projection.site) == encode_state(h.site)
    await projection.stop()


async def test_nothing_is_saved_where_there_is_no_place_for_it(h: History) -> None:
    projection = await started(await log_of(h))

    assert await projection.save() is None
    await projection.stop()
