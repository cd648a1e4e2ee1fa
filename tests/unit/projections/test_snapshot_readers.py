"""A reader that stores no snapshots takes the newest one, whatever its retention; a writer only one of its own."""

from __future__ import annotations

from gpukeeper.events.codec import decode
from gpukeeper.events.memory import MemoryLog
from gpukeeper.events.objects import MemoryObjects
from gpukeeper.projections import snapshot
from gpukeeper.projections.runner import SiteProjection
from gpukeeper.projections.site import Retention, Site
from support.records import record

ODD = Retention(after_s=7.0, above=3)


async def test_a_reader_starts_from_a_snapshot_of_any_retention() -> None:
    log, objects = MemoryLog(now_ns=lambda: 1), MemoryObjects()
    for number in range(3):
        await log.append(record("gpuq.ev.site", str(number)))
    site = Site(ODD)
    for stored in await log.read("gpuq.ev.site"):
        site.apply(decode(stored))
    await snapshot.save(objects, site)

    reader = SiteProjection(log, objects=objects)
    writer = SiteProjection(log, objects=objects, retention=Retention())
    await reader.start()
    await writer.start()
    await reader.stop()
    await writer.stop()

    assert (reader.started_at, reader.site.retention) == (3, ODD)
    assert (writer.started_at, writer.site.retention) == (0, Retention())
    assert await snapshot.load(objects, log, ODD) is not None
