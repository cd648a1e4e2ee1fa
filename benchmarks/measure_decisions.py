"""What one decision about memory costs, without any waiting: the agent takes it between reading and acting."""

from __future__ import annotations

import time
from collections.abc import Callable

from figures import Figure, at_most

from gpukeeper.capacity.admission import Ledger
from gpukeeper.capacity.decision import Question, decide
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.need import Need
from gpukeeper.capacity.reclaim import Owner
from gpukeeper.events.instants import parse_utc
from gpukeeper.events.readings import DeviceReading

_DEVICES = 8
_RUNTIMES = 20
_AT = "2025-06-01T12:00:00.000000Z"
_GOAL_US = 50.0


def _owner(index: int, *, here: bool) -> Owner:
    """Sizes that no few of them add up to anything round; one of four is pinned, in its grace, or busy."""
    return Owner(
        runtime=f"runtime-{index:02}",
        held_mb=1500 + 731 * (index % 7) + index,
        on_device=here,
        activity="busy" if index % 12 == 1 else "idle",
        idle_s=120.0 if index % 12 == 5 else 900.0 + index,
        grace_s=300.0,
        pinned=index % 12 == 9,
        releases="all",
    )


def _question(number: int, owners: tuple[Owner, ...], need_mb: int) -> tuple[Ledger, Question]:
    """A card of 80 GB that is nearly full, with a claim that loads."""
    device = Device(id=f"GPU-{number}", kind="gpu", name="bench", headroom_mb=512)
    reading = DeviceReading(device=device.id, source="nvml", read_at=_AT, total_mb=81_920, used_mb=78_000, free_mb=3920)
    ledger = Ledger().reserve(number + 1, device.id, 1000, parse_utc(_AT))
    need = Need(vram_mb=need_mb, source="declared")
    return ledger, Question(device=device, reading=reading, reserved_mb=1000, need=need, owners=owners)


def _median_us(act: Callable[[], object], *, rounds: int, of: int) -> float:
    """Of this process's own time: what else the machine does meanwhile is not the decision's cost."""
    taken: list[float] = []
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(of):
            act()
        taken.append((time.process_time() - began) / of * 1e6)
    return sorted(taken)[rounds // 2]


def measure_decisions(*, quick: bool) -> list[Figure]:
    """Admission and the choice of releases, for one job on one device of a full host.

    The first figure has the 20 runtimes spread over the 8 devices; the note says what the same costs where all of them
    sit on one device and may go, which is the hardest choice.
    """
    spread = [
        _question(number, tuple(_owner(index, here=index % _DEVICES == number) for index in range(_RUNTIMES)), 6000)
        for number in range(_DEVICES)
    ]
    idle = tuple(_owner(12 * index, here=True) for index in range(_RUNTIMES))
    crowded = [_question(0, idle, 40_000)]

    def decide_all(cases: list[tuple[Ledger, Question]]) -> None:
        for ledger, question in cases:
            ledger.unseen_mb(question.reading)
            decide(question)

    rounds, of = (5, 20) if quick else (15, 100)
    each_us = _median_us(lambda: decide_all(spread), rounds=rounds, of=of) / _DEVICES
    crowded_us = _median_us(lambda: decide_all(crowded), rounds=rounds, of=of)
    note = f"one decision of {_DEVICES} devices x {_RUNTIMES} runtimes; {crowded_us:.0f} us where all 20 may go on one"
    return [at_most("admission_decision", each_us, "us", _GOAL_US, note=note)]
