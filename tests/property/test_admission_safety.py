"""Invariant 2: granted VRAM + other use + headroom never exceeds the capacity, whatever comes in whatever order."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, initialize, multiple, rule

from gpukeeper.capacity.admission import Admit, Ledger, admit
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.need import Need
from gpukeeper.events.instants import parse_utc, utc_text
from gpukeeper.events.readings import DeviceReading

START = parse_utc("2025-06-01T12:00:00Z")
DEVICE = "GPU-1"


class Card(RuleBasedStateMachine):
    """A card with a truth of its own; the agent knows only its readings and its reservations.

    Models load bit by bit, jobs end while their models stay resident, others come and go on the card, and admissions
    are decided on the newest reading, which may be older than all of that. Only what others took since the reading is
    beyond any agent's knowledge, so the invariant is stated with the others' use as the deciding reading saw it.
    """

    granted = Bundle("granted")
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.ticks = 0
        self.ledger = Ledger()
        self.epoch = 0
        #: By epoch: what is promised, and how much of it is on the card so far.
        self.promised: dict[int, int] = {}
        self.held: dict[int, int] = {}
        #: Models whose jobs have ended.
        self.resident: dict[int, int] = {}
        self.others_mb = 0
        self.others_seen_mb = 0

    @initialize(
        total_mb=st.integers(4000, 10_000),
        headroom_mb=st.sampled_from([0, 0, 300, 1500]),
        limit_mb=st.sampled_from([None, None, 500, 5000, 12_000]),
        others_mb=st.sampled_from([0, 0, 700, 3000, 9000]),
    )
    def begin(self, total_mb: int, headroom_mb: int, limit_mb: int | None, others_mb: int) -> None:
        self.total_mb = total_mb
        self.device = Device(id=DEVICE, kind="gpu", name="card", headroom_mb=headroom_mb, limit_mb=limit_mb)
        self.others_mb = min(others_mb, total_mb)
        self.capacity_mb = total_mb if limit_mb is None else min(total_mb, limit_mb)
        self.read()

    def tick(self) -> timedelta:
        self.ticks += 1
        return timedelta(seconds=self.ticks)

    @property
    def on_card_mb(self) -> int:
        return self.others_mb + sum(self.held.values()) + sum(self.resident.values())

    @rule()
    def read(self) -> None:
        self.others_seen_mb = self.others_mb
        free_mb = self.total_mb - self.on_card_mb
        self.reading = DeviceReading(
            device=DEVICE,
            source="nvml",
            read_at=utc_text(START + self.tick()),
            total_mb=self.total_mb,
            used_mb=self.on_card_mb,
            free_mb=free_mb,
        )
        self.ledger = self.ledger.seen_in(self.reading)
        # Nothing piles up: what is neither live nor missing in the reading is forgotten.
        assert {each.epoch for each in self.ledger.reservations} == set(self.promised)

    @rule(target=granted, need_mb=st.integers(0, 2500) | st.sampled_from([None, 6000]))
    def ask(self, need_mb: int | None) -> int | MultipleResults[int]:
        decision = admit(
            device=self.device,
            reading=self.reading,
            reserved_mb=self.ledger.unseen_mb(self.reading),
            need=Need(vram_mb=need_mb),
            resident=False,
            allow_unknown_need=True,
        )
        self.epoch += 1
        event(f"{type(decision).__name__}, need {'known' if need_mb is not None else 'unknown'}")
        if not isinstance(decision, Admit):
            return multiple()
        self.ledger = self.ledger.reserve(self.epoch, DEVICE, decision.reserve_mb, START + self.tick())
        self.promised[self.epoch] = decision.reserve_mb
        self.held[self.epoch] = 0
        claimed_mb = sum(self.promised.values()) + sum(self.resident.values())
        assert claimed_mb + self.others_seen_mb + self.device.headroom_mb <= self.capacity_mb
        return self.epoch

    @rule(epoch=granted, share=st.floats(0, 1))
    def load_some(self, epoch: int, share: float) -> None:
        self.held[epoch] = max(self.held[epoch], int(share * self.promised[epoch]))

    @rule(target=running, epoch=consumes(granted))
    def finish_loading(self, epoch: int) -> int:
        self.held[epoch] = self.promised[epoch]
        self.ledger = self.ledger.loaded(epoch, START + self.tick())
        return epoch

    @rule(epoch=consumes(granted))
    def give_up_loading(self, epoch: int) -> None:
        del self.promised[epoch], self.held[epoch]
        self.ledger = self.ledger.release(epoch)

    @rule(epoch=consumes(running))
    def end_and_stay_resident(self, epoch: int) -> None:
        self.resident[epoch] = self.promised.pop(epoch)
        del self.held[epoch]
        self.ledger = self.ledger.release(epoch)

    @rule()
    def unload_what_is_resident(self) -> None:
        self.resident.clear()

    @rule(others_mb=st.integers(0, 9000))
    def others_come_and_go(self, others_mb: int) -> None:
        room_mb = self.total_mb - sum(self.promised.values()) - sum(self.resident.values())
        self.others_mb = max(0, min(others_mb, room_mb))


TestCard = Card.TestCase
TestCard.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
