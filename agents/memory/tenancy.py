"""What this agent knows of each registered runtime: who uses it, since when it does nothing, what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

import msgspec
from msgspec.structs import replace

from gpukeeper.agents.runtimes.port import Provider
from gpukeeper.capacity.idleness import Idleness
from gpukeeper.capacity.owners import Tenant
from gpukeeper.events.instants import parse_utc, utc_text
from gpukeeper.events.modelnames import canonical
from gpukeeper.events.readings import RuntimeReading
from gpukeeper.projections.host import ALL


class Use(msgspec.Struct, frozen=True):
    """A resident model that a job of ours rests on."""

    #: By its shortest name.
    model: str
    options: str
    #: Its request is on the way: from now on the runtime itself knows that the model is in use.
    asked: bool = False


class _Entry:
    """One registered runtime."""

    __slots__ = (
        "changed_at",
        "epochs",
        "grace_s",
        "idleness",
        "loaded",
        "loading",
        "provider",
        "reading",
        "settled",
        "uses",
    )

    def __init__(self, provider: Provider, grace_s: float, gap_max_s: float) -> None:
        self.provider = provider
        self.grace_s = grace_s
        #: Claims of ours that are here, from before their admission until their end.
        self.epochs: set[int] = set()
        self.idleness = Idleness(gap_max_s=gap_max_s)
        self.reading: RuntimeReading | None = None
        self.loading = 0
        #: The options that each model was loaded with last, by its shortest name, where we loaded it.
        self.loaded: dict[str, str] = {}
        #: When we last had it load something or let go of something.
        self.changed_at: datetime | None = None
        #: What each claim's job has in use, from when it was seen to be there until the claim ends.
        self.uses: dict[int, Use] = {}
        #: Set while nothing is being released here.
        self.settled = asyncio.Event()
        self.settled.set()

    @property
    def working(self) -> int:
        """Loads of ours, and jobs of ours that rest on a model here."""
        return self.loading + len(self.uses)

    def works(self) -> None:
        """We have it do something, or had until now: whatever idleness was proven is over."""
        self.idleness = Idleness(gap_max_s=self.idleness.gap_max_s)


class Tenancy:
    """The registered runtimes as owners of memory. Single-threaded, like all of a room."""

    def __init__(self, *, now: Callable[[], datetime]) -> None:
        self._now = now
        self._entries: dict[str, _Entry] = {}
        #: Set, and replaced, whenever a job's use of a model changes.
        self._uses_changed = asyncio.Event()

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
        """A job of ours is about to load or run there: nothing is released there for anybody else.

        It has not touched the runtime yet, so what was proven of its idleness stays: else a job could never get the
        memory that another model of its own runtime holds.
        """
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.epochs.add(epoch)

    def leave(self, runtime: str, epoch: int) -> None:
        entry = self._entries.get(runtime)
        if entry is None:
            return
        entry.epochs.discard(epoch)
        if entry.uses.pop(epoch, None) is not None:
            entry.works()
            self._tell_uses()

    def use(self, runtime: str, epoch: int, model: str, options: str, *, asked: bool = False) -> None:
        """The job of ``epoch`` rests on this model's being there as it is, until it leaves."""
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.uses[epoch] = Use(canonical(model), options, asked)
            entry.works()
            self._tell_uses()

    def _tell_uses(self) -> None:
        told, self._uses_changed = self._uses_changed, asyncio.Event()
        told.set()

    def in_use(self, runtime: str, model: str, *, but: int) -> bool:
        """Whether a job of ours, but for this one, rests on the model."""
        entry = self._entries.get(runtime)
        name = canonical(model)
        return entry is not None and any(epoch != but and use.model == name for epoch, use in entry.uses.items())

    def load_would_harm(self, runtime: str, model: str, options: str, *, but: int) -> bool:
        """Whether a load there would take away what another job of ours rests on.

        One with other options replaces a model, also while it works. What no request has reached yet, a runtime takes
        for idle: it may throw it out for any other model.
        """
        entry = self._entries.get(runtime)
        name = canonical(model)
        return entry is not None and any(
            (use.model == name and use.options != options) if use.asked else (use.model, use.options) != (name, options)
            for epoch, use in entry.uses.items()
            if epoch != but
        )

    async def until_harmless(self, runtime: str, model: str, options: str, *, but: int) -> None:
        """Wait while a load would harm. Who waits holds the turn: nobody else's load begins meanwhile."""
        while self.load_would_harm(runtime, model, options, but=but):
            await self._uses_changed.wait()

    def jobs(self, runtime: str, *, but: int | None = None) -> int:
        """Claims of ours that are there, without the one that asks."""
        entry = self._entries.get(runtime)
        return 0 if entry is None else len(entry.epochs - {but})

    def working(self, runtime: str) -> int:
        """Loads and jobs of ours that have it do something now. A claim that only waits for room is none."""
        entry = self._entries.get(runtime)
        return 0 if entry is None else entry.working

    def loading(self, runtime: str, change: int) -> None:
        """A load or a fetch begins (+1) or has ended (-1) there."""
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.loading += change
            entry.works()
            entry.changed_at = self._now()

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
        return entry is not None and not entry.settled.is_set()

    def releasing(self, runtime: str, *, going: bool) -> None:
        """A release is under way there, or has come to its end."""
        entry = self._entries.get(runtime)
        if entry is not None and going:
            entry.settled.clear()
        elif entry is not None:
            entry.settled.set()

    async def until_settled(self, runtime: str) -> None:
        """Wait while something is being released there: what it holds then is not what it holds now."""
        entry = self._entries.get(runtime)
        if entry is not None:
            await entry.settled.wait()

    # --- evidence

    def looked(self, reading: RuntimeReading) -> RuntimeReading:
        """Fold one look. Returns it with the idleness that is proven by now, for the heartbeat."""
        entry = self._entries.get(reading.runtime)
        if entry is None:
            return reading
        entry.idleness = entry.idleness.read(reading, entry.working)
        since = entry.idleness.since
        entry.reading = replace(reading, idle_since=None if since is None else utc_text(since))
        return entry.reading

    def reading(self, runtime: str) -> RuntimeReading | None:
        """The newest look."""
        entry = self._entries.get(runtime)
        return None if entry is None else entry.reading

    def let_go(self, runtime: str) -> None:
        """It let go of something for us: what it was seen to hold before is no longer expected there."""
        entry = self._entries.get(runtime)
        if entry is not None:
            entry.changed_at = self._now()

    def why_expected(self, provider: Provider, model: str, *, but: int) -> str | None:
        """Why a look that does not list ``model`` is no proof that it is gone, in words; None where it may be.

        Busy models are missing from a look or two (BASTION 0.4.1).
        """
        entry = self._entries.get(provider.config.name)
        if entry is None:
            return None
        if self.in_use(provider.config.name, model, but=but):
            return "a job of ours uses it"
        reading = entry.reading
        row = None if reading is None else provider.find(reading, model)
        if reading is None or row is None or row.stopping or _is_over(row.expires_at, self._now()):
            return None
        if entry.changed_at is not None and parse_utc(reading.read_at) <= entry.changed_at:
            # What we load or let go of may push out other things.
            return None
        return f"it was listed at {reading.read_at}"

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
