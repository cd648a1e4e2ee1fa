"""What this agent knows of each registered runtime: who uses it, since when it does nothing, what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from msgspec.structs import replace

from gpukeeper.agents.runtimes.port import Provider
from gpukeeper.capacity.idleness import Idleness
from gpukeeper.capacity.owners import Tenant
from gpukeeper.events.instants import parse_utc, utc_text
from gpukeeper.events.modelnames import canonical
from gpukeeper.events.readings import RuntimeReading
from gpukeeper.projections.host import ALL


class _Entry:
    """One registered runtime."""

    __slots__ = (
        "at_work",
        "epochs",
        "grace_s",
        "idleness",
        "loaded",
        "loading",
        "provider",
        "reading",
        "released_at",
        "releases",
        "settled",
        "worked_at",
    )

    def __init__(self, provider: Provider, grace_s: float, gap_max_s: float) -> None:
        self.provider = provider
        self.grace_s = grace_s
        #: Claims of ours that are here, from before their admission until their end: others do not release it.
        self.epochs: set[int] = set()
        #: Those of them that had it work, or are just about to.
        self.at_work: set[int] = set()
        #: When we had it load or run last: a look that began before that does not know.
        self.worked_at: datetime | None = None
        self.idleness = Idleness(gap_max_s=gap_max_s)
        self.reading: RuntimeReading | None = None
        self.loading = 0
        #: The options that each model was loaded with last, by its shortest name, where we loaded it.
        self.loaded: dict[str, str] = {}
        #: Releases under way here.
        self.releases = 0
        #: When the last of them ended: what was seen before that may be gone.
        self.released_at: datetime | None = None
        #: Set while nothing is being released here.
        self.settled = asyncio.Event()
        self.settled.set()

    def works(self, now: datetime) -> None:
        """Whatever idleness was proven is over."""
        self.idleness = Idleness(gap_max_s=self.idleness.gap_max_s)
        self.worked_at = now


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
        """A claim of ours is for this runtime. Before it has any work there, the runtime rests as it did before."""
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.epochs.add(epoch)

    def work(self, runtime: str, epoch: int) -> None:
        """The claim is about to have the runtime work: whatever idleness was proven is over."""
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.at_work.add(epoch)
            entry.works(self._now())

    def leave(self, runtime: str, epoch: int) -> None:
        entry = self._entries.get(runtime)
        if entry is None:
            return
        entry.epochs.discard(epoch)
        if epoch in entry.at_work:
            entry.at_work.discard(epoch)
            entry.works(self._now())

    def jobs(self, runtime: str, *, but: int | None = None) -> int:
        """Claims of ours that are there, without the one that asks."""
        entry = self._entries.get(runtime)
        return 0 if entry is None else len(entry.epochs - {but})

    def at_work(self, runtime: str) -> int:
        """Claims and loads of ours that the runtime works for."""
        entry = self._entries.get(runtime)
        return 0 if entry is None else len(entry.at_work) + entry.loading

    def is_loading(self, runtime: str) -> bool:
        entry = self._entries.get(runtime)
        return entry is not None and entry.loading > 0

    def loading(self, runtime: str, change: int) -> None:
        """A load begins (+1) or has ended (-1) there."""
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.loading += change
            entry.works(self._now())

    def loaded(self, runtime: str, model: str, options: str) -> None:
        """We had it load ``model`` (by its shortest name) with these options."""
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.loaded[model] = options

    def serves(self, runtime: str, model: str, options: str) -> bool:
        """Whether ``model``, as it is resident there, is loaded with the options that a job needs.

        Where somebody else loaded it nobody knows: that serves a job which names none.
        """
        entry = self._entries.get(runtime)
        known = None if entry is None else entry.loaded.get(canonical(model))
        return options == (known or "")

    def is_releasing(self, runtime: str) -> bool:
        entry = self._entries.get(runtime)
        return entry is not None and entry.releases > 0

    def released_since(self, runtime: str, moment: datetime) -> bool:
        """Whether something is or was being released there after ``moment``."""
        entry = self._entries.get(runtime)
        if entry is None:
            return False
        return entry.releases > 0 or (entry.released_at is not None and entry.released_at >= moment)

    def releasing(self, runtime: str, *, going: bool) -> None:
        """A release is under way there, or has come to its end. There may be several, each counts."""
        entry = self._entries.get(runtime)
        if entry is None:
            return
        entry.releases += 1 if going else -1
        if entry.releases:
            entry.settled.clear()
        else:
            entry.released_at = self._now()
            entry.settled.set()

    async def until_settled(self, runtime: str) -> None:
        """Wait while something is being released there: what it holds then is not what it holds now."""
        entry = self._entries.get(runtime)
        while entry is not None and entry.releases:
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
                entry.works(read_at if entry.worked_at is None else max(read_at, entry.worked_at))
                newest = entry.reading = replace(newest, idle_since=None)
            return newest
        began_before = entry.worked_at is not None and read_at <= entry.worked_at
        entry.idleness = entry.idleness.read(reading, len(entry.at_work) + entry.loading + began_before)
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
