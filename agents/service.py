"""The agent of one host: follows its routes, runs attempts on its slots, and answers for its devices."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import nats.errors
import structlog

import gpukeeper
from gpukeeper.agents.attempt import Attempt, Stop
from gpukeeper.agents.config import ABANDON_S, GOODBYE_S, STOP_MARGIN_S, AgentConfig, RuntimeConfig
from gpukeeper.agents.containers.steward import Steward
from gpukeeper.agents.devices.inventory import Inventory
from gpukeeper.agents.memory.takeover import close_releases
from gpukeeper.agents.memory.wishes import Wishes
from gpukeeper.agents.outputs import Outputs
from gpukeeper.agents.provisioning import Provisioner
from gpukeeper.agents.room import HostRoom
from gpukeeper.agents.runtimes.port import Provider
from gpukeeper.agents.runtimes.registry import build, find_runtimes
from gpukeeper.agents.surveyor import Surveyor
from gpukeeper.agents.writer import OwnSubject
from gpukeeper.events import subjects
from gpukeeper.events.catchup import catch_up, unless_set
from gpukeeper.events.clock import new_id, now, now_rfc3339
from gpukeeper.events.codec import decode
from gpukeeper.events.connection import Connection
from gpukeeper.events.device import ClaimLapsed
from gpukeeper.events.errors import GpukeeperError
from gpukeeper.events.host import Joined, Left
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.log import Follower, Stored
from gpukeeper.events.objects import JetStreamObjects
from gpukeeper.events.readings import ClaimBeat, Heartbeat
from gpukeeper.events.reasons import Reason
from gpukeeper.events.recorder import Recorder, Stamp
from gpukeeper.events.services import Services, serve
from gpukeeper.events.tasks import end_all
from gpukeeper.projections import snapshot
from gpukeeper.projections.hostview import HostView
from gpukeeper.projections.site import Retention

_log = structlog.get_logger("gpukeeper.agent")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROBE_S = 1.0
_FIND_RUNTIMES_EVERY_S = 30.0
#: A route whose attempt broke before it was claimed is taken up again after this long.
_TAKE_UP_AGAIN_S = 5.0
#: Drivers come up late, and slices of a card come and go.
_FIND_DEVICES_EVERY_S = 60.0


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent answers to a probe."""

    host: str
    instance_id: str
    pid: int
    #: Attempts under way.
    claims: int = 0
    #: It takes nothing more and will be gone soon.
    stopping: bool = False


class HostTaken(GpukeeperError):
    """Another agent speaks for this host."""

    code = "host_taken"


class AgentService:
    """One agent process.

    Args:
        connection: the site's NATS.
        config: devices, runtimes and clocks.
        retention: of the site's snapshots, from which the agent starts.
    """

    def __init__(self, connection: Connection, config: AgentConfig, retention: Retention | None = None) -> None:
        self._connection = connection
        self._config = config
        self._retention = retention or Retention()
        self.instance_id = new_id()
        self._log = JetStreamLog(connection)
        self._beats = JetStreamLog(connection, stream=subjects.BEATS_STREAM)
        self._recorder = Recorder(
            self._log,
            Stamp(source=f"/site/{config.site}/agent/{config.host}", new_id=new_id, now=now_rfc3339),
        )
        self._inventory = Inventory(config, now=now)
        self._outputs = Outputs(connection.client.publish)
        self._providers: dict[str, Provider] = {}
        self._attempts: dict[int, Attempt] = {}
        self._tasks: dict[asyncio.Task[None], int] = {}
        #: Routes that were claimed and are over, until their claims come back through the log.
        self._claimed: set[int] = set()
        #: Routes that are left alone for a while.
        self._left_alone: set[int] = set()
        self._stopping = False
        #: Sequence of our own `joined` fact.
        self._joined_seq = 0
        self._fenced = asyncio.Event()
        #: Held while the host is announced.
        self._joining = asyncio.Lock()
        self._room: HostRoom | None = None
        self._host_subject: OwnSubject | None = None
        #: Of the containers that the registry names, where it names any.
        self._steward: Steward | None = None
        if any(each.container is not None for each in config.runtimes):
            self._steward = Steward.of_host(config)
        self._wishes: Wishes | None = None

    @property
    def room(self) -> HostRoom:
        assert self._room is not None, "run() first"
        return self._room

    async def run(self, stop: asyncio.Event) -> None:
        """Serve the host until ``stop``.

        Raises:
            HostTaken: another agent speaks for it, now or while this one ran.
            GpukeeperError: the log cannot be followed any more.
        """
        await self._refuse_if_taken(stop)
        if stop.is_set():
            return
        followed = await unless_set(stop, self._follow())
        if followed is None:
            return
        view, follower = followed
        services: Services | None = None
        try:
            self._room = HostRoom(
                host=self._config.host,
                boot_id=boot_id(),
                instance_id=self.instance_id,
                log=self._log,
                recorder=self._recorder,
                payloads=JetStreamObjects(self._connection, subjects.PAYLOADS_BUCKET),
                inventory=self._inventory,
                outputs=self._outputs,
                view=view,
            )
            self._room.stop_proof_limit_s = self._config.stop_proof_s
            self._room.recheck_after_s = self._config.recheck_after_s
            self._room.observer.steward = self._steward
            self._room.provisioner = Provisioner(self._room, leaves_mb=self._config.pull_leaves_disk_mb)
            self._wishes = Wishes(self._room, self._steward)
            for config in await find_runtimes(self._config):
                self._providers[config.name] = build(config, steward=self._steward)
            surveyor = Surveyor(
                self._room, self._config, self._beats, self._providers, self._claim_beats, self._on_device_lost
            )
            services = await self._serve()
            await self._join(surveyor)
            # Only then has every claim been seen that an earlier instance could still make.
            await catch_up(follower, self._joined_seq)
            await self._end_predecessors_claims()
            await close_releases(self._room, self._joined_seq)
            await self._offer_slots(surveyor)
            await self._work(surveyor, follower, stop)
        finally:
            if services is not None:
                await services.stop()
            await follower.stop()
            if self._wishes is not None:
                await self._wishes.close()
            if self._room is not None and self._room.provisioner is not None:
                await self._room.provisioner.close()
            for provider in self._providers.values():
                await provider.close()
            if self._steward is not None:
                await self._steward.close()
            await self._inventory.close()

    # --- coming

    async def _refuse_if_taken(self, stop: asyncio.Event) -> None:
        """One agent a host: the claims of a second would fence the first's. One that is going is waited for.

        Raises:
            HostTaken: another agent is there to stay, or took longer to go than it may.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._config.stop_grace_s + STOP_MARGIN_S
        while (other := await self._ask_other()) is not None:
            if not other.stopping or loop.time() >= give_up_at:
                raise HostTaken(
                    f"host {self._config.host!r} already has a live agent (pid {other.pid}, instance "
                    f"{other.instance_id}, {other.claims} claims); stop it, or give this one another host name",
                    host=self._config.host,
                    pid=other.pid,
                    instance_id=other.instance_id,
                )
            _log.info("waiting_for_predecessor", pid=other.pid, instance=other.instance_id, claims=other.claims)
            try:
                async with asyncio.timeout(_PROBE_S):
                    await stop.wait()
            except TimeoutError:
                continue
            return

    async def _ask_other(self) -> Presence | None:
        """Who speaks for this host now, if anybody answers."""
        subject = subjects.agent_ping(self._config.host)
        try:
            answer = await self._connection.client.request(subject, b"", timeout=_PROBE_S)
        except (TimeoutError, nats.errors.Error):
            return None
        try:
            return msgspec.json.decode(answer.data, type=Presence)
        except msgspec.MsgspecError as error:
            raise HostTaken(
                f"somebody answers for host {self._config.host!r} who is no agent of this version: {error}",
                host=self._config.host,
            ) from error

    async def _follow(self) -> tuple[HostView, Follower]:
        """This host's part of the log: from the site's newest snapshot when there is one, then live."""
        objects = JetStreamObjects(self._connection, subjects.SNAPSHOTS_BUCKET)
        site = await snapshot.load(objects, self._log, self._retention)
        host = self._config.host
        view = HostView(host) if site is None else HostView.from_site(site, host)
        until = 0
        for pattern in subjects.followed_by_agent(host):
            last = await self._log.last(pattern)
            until = max(until, 0 if last is None else last.seq)

        def on_stored(stored: Stored) -> None:
            view.apply(decode(stored))
            self._on_change(view)

        follower = await self._log.follow(on_stored, after=view.seq, subjects=subjects.followed_by_agent(host))
        try:
            await catch_up(follower, until)
        except BaseException:
            await follower.stop()
            raise
        return view, follower

    async def _join(self, surveyor: Surveyor) -> None:
        """Say who speaks for the host now, and with what."""
        await surveyor.announce()
        room = self.room
        joined = Joined(
            host=room.host,
            boot_id=room.boot_id,
            instance_id=self.instance_id,
            version=gpukeeper.__version__,
            pid=os.getpid(),
            devices=tuple(device.id for device in surveyor.devices),
            runtimes=tuple(self._providers),
        )
        if self._host_subject is None:
            self._host_subject = OwnSubject(self._recorder, subjects.host(room.host), room.host, room.view.host_seq)
        self._joined_seq = await self._host_subject.append(joined)

    async def _offer_slots(self, surveyor: Surveyor) -> None:
        room = self.room
        room.open_slots(device for device in surveyor.devices if device.unschedulable is None)
        await surveyor.beat()
        _log.info(
            "agent_started",
            host=room.host,
            instance=self.instance_id,
            devices=[device.id for device in surveyor.devices],
            runtimes=list(self._providers),
        )

    async def _end_predecessors_claims(self) -> None:
        """Claims of an earlier instance are nobody's: end them by name, with the last that was heard of each."""
        room = self.room
        stored = await self._beats.last(subjects.beat(room.host))
        beat = None if stored is None else decode(stored).data
        # A copy: while one is ended, the follower may bring a device that is new.
        for device_id, claims in tuple(room.view.claims.items()):
            for claim in tuple(claims.values()):
                if claim.instance_id == self.instance_id:
                    continue
                known = beat if isinstance(beat, Heartbeat) else None
                lapsed = ClaimLapsed(
                    host=room.host,
                    device=device_id,
                    epoch=claim.epoch,
                    job=claim.job,
                    reason=Reason.CLAIM_LAPSED,
                    detail=_why_taken_over(claim.boot_id, room.boot_id),
                    last_beat=_beat_of(known, claim.epoch),
                    last_beat_at=None if known is None else known.sent_at,
                )
                await room.device_subject(device_id).append(lapsed, job=claim.job, epoch=claim.epoch)
                _log.warning("predecessors_claim_ended", device=device_id, job=claim.job, epoch=claim.epoch)

    async def _serve(self) -> Services:
        async def ping(_: bytes) -> bytes:
            return msgspec.json.encode(
                Presence(
                    host=self._config.host,
                    instance_id=self.instance_id,
                    pid=os.getpid(),
                    claims=len(self._attempts),
                    stopping=self._stopping,
                )
            )

        return await serve(
            self._connection,
            name="gpuq-agent",
            description=f"steward of the devices of host {self._config.host}",
            endpoints={
                "ping": (subjects.agent_ping(self._config.host), ping),
                "output": (subjects.agent_output(self._config.host), self._outputs.answer),
            },
            metadata={"host": self._config.host, "instance_id": self.instance_id},
        )

    # --- working

    async def _work(self, surveyor: Surveyor, follower: Follower, stop: asyncio.Event) -> None:
        finders = (
            asyncio.create_task(self._find_more_runtimes(surveyor), name="runtimes"),
            asyncio.create_task(self._find_more_devices(surveyor), name="devices"),
        )
        ends = {
            *finders,
            asyncio.create_task(surveyor.run(), name="surveyor"),
            asyncio.ensure_future(stop.wait()),
            asyncio.ensure_future(self._fenced.wait()),
            asyncio.ensure_future(_join(follower.broken)),
            asyncio.ensure_future(_join(self._connection.closed)),
        }
        self._on_change(self.room.view)
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
            if self._fenced.is_set():
                await self._abandon(Stop.FENCED)
                raise HostTaken(f"another agent took over host {self.room.host!r}", host=self.room.host)
            if stop.is_set():
                # Who says goodbye does not join once more.
                for finder in finders:
                    finder.cancel()
                await asyncio.wait(finders)
                await self._leave(surveyor)
        finally:
            await end_all(ends)
            await self._abandon(Stop.PREEMPT)

    async def _find_more_runtimes(self, surveyor: Surveyor) -> None:
        """Where nothing is declared, an Ollama that is started later is found later."""
        if self._config.runtimes or not self._config.find_runtimes:
            await asyncio.Event().wait()
        while not self._providers:
            await asyncio.sleep(_FIND_RUNTIMES_EVERY_S)
            for config in await find_runtimes(self._config):
                await self._adopt(config, surveyor)
        await asyncio.Event().wait()

    async def _find_more_devices(self, surveyor: Surveyor) -> None:
        """A device that comes up later is found later; one whose slice is gone is announced no more."""
        while True:
            await asyncio.sleep(_FIND_DEVICES_EVERY_S)
            async with self._joining:
                if await surveyor.devices_changed():
                    await self._join_again(surveyor)

    async def _adopt(self, config: RuntimeConfig, surveyor: Surveyor) -> None:
        async with self._joining:
            self._providers[config.name] = build(config, steward=self._steward)
            await self._join_again(surveyor)

    async def _join_again(self, surveyor: Surveyor) -> None:
        """Announce what the host is now; a route may have come for what is new before its slots were offered."""
        await self._join(surveyor)
        await self._offer_slots(surveyor)
        self._dispatch(self.room.view)

    def _on_change(self, view: HostView) -> None:
        """Something about this host was stored."""
        if self._room is None:
            return
        if self._joined_seq and view.joined_seq > self._joined_seq and view.instance_id != self.instance_id:
            self._fenced.set()
        for attempt in self._attempts.values():
            gone = any(
                epoch <= view.seq and epoch not in view.claims.get(device, {}) for device, epoch in attempt.claims
            )
            if gone and not attempt.released:
                attempt.stop(Stop.FENCED)
        if self._wishes is not None and self._joined_seq and not self._stopping:
            self._wishes.take_up()
        self._dispatch(view)

    def _on_device_lost(self, device_id: str, why: str) -> None:
        """What runs on a device that fell off the bus will not end by itself."""
        for attempt in self._attempts.values():
            if any(device == device_id for device, _ in attempt.claims):
                attempt.stop(Stop.DEVICE_LOST, why)

    def _dispatch(self, view: HostView) -> None:
        """Begin an attempt for each route that has a free slot, in the order in which they were sent."""
        if self._stopping or self._fenced.is_set() or self._room is None:
            return
        pending = {route.seq for route in view.routes.values()}
        self._claimed &= pending
        for route in tuple(view.routes.values()):
            if route.seq in self._attempts or route.seq in self._claimed or route.seq in self._left_alone:
                continue
            if not all(self.room.may_claim(device) for device in route.devices):
                # What is not folded yet will wake us when it is.
                continue
            provider = self._providers.get(route.runtime)
            slots = None if provider is None else self.room.take_slots(route.devices)
            if provider is not None and slots:
                self._begin(Attempt(self.room, route, slots[0], provider, slots[1:]))

    def _begin(self, attempt: Attempt) -> None:
        self._attempts[attempt.route.seq] = attempt
        task = asyncio.create_task(attempt.run(), name=f"attempt {attempt.route.job}")
        self._tasks[task] = attempt.route.seq
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        attempt = self._attempts.pop(self._tasks.pop(task))
        for slot in attempt.slots:
            self.room.give_slot(slot)
        if attempt.epoch:
            self._claimed.add(attempt.route.seq)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("attempt_broke", job=attempt.route.job, exc_info=error)
            if not attempt.epoch:
                self._leave_alone(attempt.route.seq)
        self._dispatch(self.room.view)

    def _leave_alone(self, route_seq: int) -> None:
        """Try a route no more for a while. The job's queue clock, which runs on, bounds how often that happens."""

        def take_up_again() -> None:
            self._left_alone.discard(route_seq)
            self._dispatch(self.room.view)

        self._left_alone.add(route_seq)
        asyncio.get_running_loop().call_later(_TAKE_UP_AGAIN_S, take_up_again)

    def _claim_beats(self) -> list[ClaimBeat]:
        return [beat for attempt in self._attempts.values() for beat in attempt.beats()]

    # --- going

    async def _leave(self, surveyor: Surveyor) -> None:
        """Take nothing more, let running jobs finish within the grace, hand back the rest, say goodbye."""
        self._stopping = surveyor.stopping = True
        for attempt in self._attempts.values():
            if attempt.phase != "running":
                attempt.stop(Stop.PREEMPT)
        await surveyor.beat()
        running = set(self._tasks)
        if running:
            _log.info("agent_finishing", running=len(running), grace_s=self._config.stop_grace_s)
            await asyncio.wait(running, timeout=self._config.stop_grace_s)
        await self._abandon(Stop.PREEMPT)
        await self._say_goodbye()
        _log.info("agent_stopped", host=self.room.host)

    async def _say_goodbye(self) -> None:
        """Tell that nobody speaks for the host, unless another agent does by now or the log is away."""
        assert self._host_subject is not None, "only who joined leaves"
        left = Left(host=self.room.host, instance_id=self.instance_id, detail="stopped on request")
        try:
            async with asyncio.timeout(GOODBYE_S):
                if await self._host_subject.append_once(left) is None:
                    _log.warning("left_untold", why="another agent has joined")
        except TimeoutError:
            _log.warning("left_untold", why=f"the log took nothing for {GOODBYE_S:g} s")

    async def _abandon(self, why: Stop) -> None:
        """Stop what is still running, in order: each attempt ends its job and gives its slot back.

        The claim of one that takes longer stays, and is ended by whoever comes next.
        """
        for attempt in self._attempts.values():
            attempt.stop(why)
        tasks = set(self._tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=ABANDON_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)


def boot_id() -> str:
    """What tells this boot of the machine from any other; the empty text where the system does not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _why_taken_over(claim_boot: str, boot: str) -> str:
    if claim_boot != boot:
        return "the host was restarted since, and a new agent speaks for it"
    return "a new agent speaks for the host; the one that held the claim is gone"


def _beat_of(beat: Heartbeat | None, epoch: int) -> ClaimBeat | None:
    if beat is None:
        return None
    return next((claim for claim in beat.claims if claim.epoch == epoch), None)


async def _join(future: asyncio.Future[None]) -> None:
    await asyncio.shield(future)
