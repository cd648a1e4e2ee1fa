"""What this agent knows of each registered runtime: who uses it, since when it does nothing, what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime

from msgspec.structs import replace

from gpukeeper.agents.runtimes.port import Provider
from gpukeeper.capacity.idleness import Idleness
from gpukeeper.capacity.owners import Tenant
from gpukeeper.events.instants import parse_utc, utc_text
from gpukeeper.events.modelnames import canonical
from gpukeeper.events.readings import ResidentModel, RuntimeReading
from gpukeeper.projections.host import ALL


class _Entry:
    """One registered runtime."""

    __slots__ = (
        "changed_at",
        "epochs",
        "grace_s",
        "idleness",
        "kept",
        "let_go",
        "loaded",
        "loading",
        "provider",
        "reading",
        "released_at",
        "releasing",
        "settled",
        "using",
        "worked_at",
    )

    def __init__(self, provider: Provider, grace_s: float, gap_max_s: float) -> None:
        self.provider = provider
        self.grace_s = grace_s
        #: Claims of ours that are here, from before their admission until their end.
        self.epochs: set[int] = set()
        #: Those of them that have it load or run by now.
        self.using: set[int] = set()
        #: When a load or run of ours ended last.
        self.worked_at: datetime | None = None
        #: When a load or release of ours began or ended last.
        self.changed_at: datetime | None = None
        self.idleness = Idleness(gap_max_s=gap_max_s)
        self.reading: RuntimeReading | None = None
        self.loading = 0
        #: The options that each model was loaded with last, by its shortest name, where we loaded it.
        self.loaded: dict[str, str] = {}
        #: Models, by their shortest names, that it was told by us to keep for ever, as the log's pins had it then.
        self.kept: set[str] = set()
        #: Models, by their shortest names, that were asked to go and have not been seen to be gone.
        self.let_go: set[str] = set()
        #: How many releases are under way.
        self.releasing = 0
        #: When one of them ended last: what was seen before that may be gone.
        self.released_at: datetime | None = None
        #: Set while nothing is being released here.
        self.settled = asyncio.Event()
        self.settled.set()


class Tenancy:
    """The registered runtimes as owners of memory. Single-threaded, like all of a room."""

    def __init__(self, *, now: Callable[[], datetime]) -> None:
        self._now = now
        self._entries: dict[str, _Entry] = {}

    def register(self, provider: Provider, *, grace_s: float, gap_max_s: float) -> None:
        """From now on it may be asked to let go, by the rules; what is not registered is never touched."""
        entry = self._entries.get(provider.config.name)
        if entry is None or entry.provider is not provider:
            self._entries[provider.config.name] = _Entry(provider, grace_s, gap_max_s)

    def provider(self, runtime: str) -> Provider | None:
        entry = self._entries.get(runtime)
        return None if entry is None else entry.provider

    def providers(self) -> tuple[Provider, ...]:
        return tuple(entry.provider for entry in self._entries.values())

    # --- use

    def enter(self, runtime: str, epoch: int) -> None:
        """A job of ours has come, and may load or run: from now on nobody else may have the runtime let go.

        It has not touched it yet, so what is proven of its idleness still counts for the job itself.
        """
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.epochs.add(epoch)

    def use(self, runtime: str, epoch: int) -> None:
        """The job is about to have it load or run: whatever idleness was proven is over."""
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.using.add(epoch)
            self._worked(entry)

    def leave(self, runtime: str, epoch: int) -> None:
        """The job is over. One that was refused before it touched the runtime leaves its idleness as it was."""
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.epochs.discard(epoch)
            if epoch in entry.using:
                entry.using.discard(epoch)
                self._worked(entry)

    def working(self, runtime: str) -> int:
        """Loads and runs of ours that are there now."""
        entry = self._entries.get(runtime)
        return 0 if entry is None else len(entry.using) + entry.loading

    def _worked(self, entry: _Entry) -> None:
        entry.worked_at = self._now()
        entry.idleness = Idleness(gap_max_s=entry.idleness.gap_max_s)

    def jobs(self, runtime: str, *, but: int | None = None) -> int:
        """Claims of ours that are there, without the one that asks."""
        entry = self._entries.get(runtime)
        return 0 if entry is None else len(entry.epochs - {but})

    def loading(self, runtime: str, change: int) -> None:
        """A load or a fetch begins (+1) or has ended (-1) there."""
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.loading += change
            entry.changed_at = self._now()
            self._worked(entry)

    def loaded(self, runtime: str, model: str, options: str) -> None:
        """We had it load ``model`` (by its shortest name) with these options."""
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.loaded[model] = options
            entry.let_go.discard(model)

    def kept(self, runtime: str, model: str) -> None:
        """We told it to keep ``model`` for ever. Whether it is pinned is the log's word from now on, not the row's."""
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.kept.add(canonical(model))

    def keeps(self, runtime: str, row: ResidentModel) -> bool:
        """Whether the runtime itself wants the model to stay: its row says so, and not because we told it to."""
        entry = self._entries.get(runtime)
        return (row if entry is None else _as_pinned(row, entry.kept)).pinned

    def serves(self, runtime: str, model: str, options: str) -> bool:
        """Whether ``model``, as it is resident there, is loaded with the options that a job needs.

        Where somebody else loaded it nobody knows: that serves a job which names none.
        """
        entry = self._entries.get(runtime)
        known = None if entry is None else entry.loaded.get(canonical(model))
        return options == (known or "")

    def is_releasing(self, runtime: str) -> bool:
        entry = self._entries.get(runtime)
        return entry is not None and entry.releasing > 0

    def released_since(self, runtime: str, moment: datetime) -> bool:
        """Whether something is or was being released there after ``moment``: what was seen then may be gone."""
        entry = self._entries.get(runtime)
        if entry is None:
            return False
        return entry.releasing > 0 or (entry.released_at is not None and entry.released_at >= moment)

    def begin_release(self, runtime: str, model: str | None) -> None:
        """A release is under way there, of this model or of all: whoever comes waits until it has settled."""
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.changed_at = self._now()
            entry.releasing += 1
            entry.settled.clear()
            if model is not None:
                entry.let_go.add(canonical(model))

    def end_release(self, runtime: str) -> None:
        """It has come to its end, whichever."""
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.changed_at = entry.released_at = self._now()
            entry.releasing -= 1
            if entry.releasing == 0:
                entry.settled.set()

    def stays(self, runtime: str, model: str) -> None:
        """It was asked to let go of the model, and did not."""
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.let_go.discard(canonical(model))

    def let_go(self, runtime: str) -> frozenset[str]:
        """Models, by their shortest names, whose rows go because we asked: that they are missing says nothing else."""
        entry = self._entries.get(runtime)
        return frozenset() if entry is None else frozenset(entry.let_go)

    async def until_settled(self, runtime: str) -> None:
        """Wait while something is being released there: what it holds then is not what it holds now."""
        entry = self._entries.get(runtime)
        while entry is not None and entry.releasing:
            await entry.settled.wait()

    # --- evidence

    def looked(self, reading: RuntimeReading) -> RuntimeReading:
        """Fold one look. Returns it with the idleness that is proven by now, for the heartbeat."""
        entry = self._entries.get(reading.runtime)
        if entry is None:
            return reading
        read_at = parse_utc(reading.read_at)
        newest = entry.reading
        if newest is not None and read_at < parse_utc(newest.read_at):
            # Looks may overtake each other. What an older one saw is no news, unless it is work.
            if not reading.healthy or reading.activity != "idle":
                entry.idleness = Idleness(gap_max_s=entry.idleness.gap_max_s)
                entry.worked_at = read_at if entry.worked_at is None else max(read_at, entry.worked_at)
                newest = entry.reading = replace(newest, idle_since=None)
            return newest
        if reading.resident is not None:
            held = {canonical(row.model) for row in reading.resident}
            entry.let_go &= held
            entry.kept &= held
            reading = replace(reading, resident=tuple(_as_pinned(row, entry.kept) for row in reading.resident))
        # A look that began while a load or run of ours went on proves nothing, though that has ended by now.
        before = entry.worked_at is not None and read_at <= entry.worked_at
        entry.idleness = entry.idleness.read(reading, len(entry.using) + entry.loading + before)
        since = entry.idleness.since
        entry.reading = replace(reading, idle_since=None if since is None else utc_text(since))
        return entry.reading

    def reading(self, runtime: str) -> RuntimeReading | None:
        """The newest look."""
        entry = self._entries.get(runtime)
        return None if entry is None else entry.reading

    def sits_on(self, runtime: str, devices: Iterable[str]) -> frozenset[str]:
        """The devices that it holds anything on, as far as that is known; all that it may use otherwise.

        Args:
            runtime: its name.
            devices: all of the host that a runtime without a list of its own may use.
        """
        entry = self._entries.get(runtime)
        if entry is None:
            return frozenset()
        if entry.reading is not None and entry.reading.holdings is not None:
            return frozenset(each.device for each in entry.reading.holdings if each.mb != 0)
        return frozenset(entry.provider.config.devices or devices)

    def expects(self, provider: Provider, model: str) -> RuntimeReading | None:
        """The newest look, where it lists ``model`` and nothing is known by which that would be gone by now.

        A look that does not list it is then no proof that it is gone: busy models are missing from a look or two
        (BASTION 0.4.1).
        """
        entry = self._entries.get(provider.config.name)
        reading = None if entry is None else entry.reading
        row = None if reading is None else provider.find(reading, model)
        if entry is None or reading is None or row is None or row.stopping or _is_over(row.expires_at, self._now()):
            return None
        if canonical(model) in entry.let_go:
            return None
        if entry.changed_at is not None and parse_utc(reading.read_at) <= entry.changed_at:
            # What we load or let go of may push out other things.
            return None
        return reading

    def tenants(
        self, devices: Iterable[str], pins: Mapping[str, tuple[str, ...]], *, but: int | None = None
    ) -> tuple[Tenant, ...]:
        """All of them, as the rules of reclaim see them; ``but`` is the claim that asks, which does not count itself.

        Args:
            devices: all of the host that a runtime without a list of its own may use.
            pins: by runtime, as in :class:`gpukeeper.projections.hostview.HostView`.
        """
        everywhere = tuple(devices)
        now = self._now()
        return tuple(
            Tenant(
                runtime=name,
                releases=entry.provider.releases,
                grace_s=entry.grace_s,
                devices=entry.provider.config.devices or everywhere,
                reading=entry.reading,
                idle_s=entry.idleness.idle_s(now),
                jobs=len(entry.epochs - {but}),
                loading=entry.loading > 0,
                pins=tuple(None if pin == ALL else pin for pin in pins.get(name, ())),
            )
            for name, entry in self._entries.items()
        )


def _is_over(ends_at: str | None, now: datetime) -> bool:
    """Whether a stay has ended; one without an end, or whose end cannot be told, has not."""
    if ends_at is None:
        return False
    try:
        return parse_utc(ends_at) <= now
    except (ValueError, OverflowError):
        return False


def _as_pinned(row: ResidentModel, kept: Collection[str]) -> ResidentModel:
    """The row without a pin that only says what we told the runtime."""
    return replace(row, pinned=False) if row.pinned and canonical(row.model) in kept else row
