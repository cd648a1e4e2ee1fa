"""`make bench`: every figure beside its baseline, measured in one run on real processes."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import structlog
from bench_site import BenchServer
from figures import Figure, show, write
from measure_decisions import measure_decisions
from measure_devices import measure_devices
from measure_handoff import measure_handoff
from measure_jobs import measure_site
from measure_log import fill, measure_accepts, measure_folds, measure_snapshot, open_log

from gpukeeper.events.jetstream import JetStreamLog

BUILD = Path(__file__).parent.parent / "build" / "bench.json"


async def measure_log(folder: Path, *, quick: bool) -> list[Figure]:
    server = BenchServer(folder)
    with server.running() as pid:
        connection = await open_log(server, pid)
        figures = [await measure_accepts(connection, total=1_500 if quick else 6_000)]
        events = 10_000 if quick else 100_000
        await fill(connection, max(0, events - await JetStreamLog(connection).last_seq()))
        figures.append(await measure_folds(connection))
        figures.append(await measure_snapshot(connection, events=50_000 if quick else 1_000_000))
        await connection.close()
    return figures


async def main() -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parser = argparse.ArgumentParser(description="Measure gpukeeper.")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
    parser.add_argument("--only", choices=["decisions", "devices", "handoff", "log", "site"])
    options = parser.parse_args()
    quick: bool = options.quick
    figures: list[Figure] = []
    if options.only in (None, "decisions"):
        figures += measure_decisions(quick=quick)
    if options.only in (None, "log"):
        with tempfile.TemporaryDirectory(prefix="gpuq-bench-") as folder:
            figures += await measure_log(Path(folder), quick=quick)
    if options.only in (None, "devices"):
        with tempfile.TemporaryDirectory(prefix="gpuq-bench-") as folder:
            figures += measure_devices(Path(folder), seconds=5.0 if quick else 20.0)
    if options.only in (None, "handoff"):
        figures += await measure_handoff(jobs=40 if quick else 200)
    if options.only in (None, "site"):
        with tempfile.TemporaryDirectory(prefix="gpuq-bench-") as folder:
            sizes = (300, 30, 5.0) if quick else (2_000, 200, 30.0)
            figures += await measure_site(Path(folder), jobs=sizes[0], singles=sizes[1], idle_s=sizes[2])
    show(figures)
    write(figures, BUILD)
    return 0 if all(one.ok for one in figures) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
