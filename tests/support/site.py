"""A site of real processes: scheduler, agents and fake runtimes over a NATS server, or all of it under `gpuq up`.

A test submits as any producer does, with a raw publish, and then follows the log.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec
import nats.errors
import nats.js.errors

from gpukeeper.cli.credentials import load_credentials
from gpukeeper.events.codec import decode
from gpukeeper.events.connection import Connection, NatsSettings, connect
from gpukeeper.events.fact import Fact
from gpukeeper.events.host import Joined
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.job import Rejected, Resubmitted, Succeeded
from gpukeeper.events.log import Stored
from gpukeeper.events.readings import Heartbeat
from gpukeeper.events.runtime import HealthChanged
from gpukeeper.events.site import LeaderElected
from gpukeeper.events.streams import SiteStreams, ensure_site
from gpukeeper.events.subjects import BEATS_STREAM
from gpukeeper.projections import snapshot
from support.fake_http import FakeServer
from support.nats import free_ports
from support.parts import Part, children
from support.rawnats import publish_raw
from support.wait import until_answered
from support.watch import WITHIN_S, Watch

HOST = "box"
DEVICE = "gpu0"
LEASE_TTL_S = 2.0


#: The fake of each provider.
_MODULES = {
    "comfyui": "support.comfyui_fake",
    "huggingface": "support.huggingface_fake",
    "llamacpp": "support.llamacpp_fake",
    "ollama": "support.ollama",
    "vllm": "support.vllm_fake",
}


class Fake:
    """A fake runtime in a process of its own, and what it is told and asked."""

    def __init__(self, name: str, provider: str, folder: Path, *, settings: Mapping[str, object] | None = None) -> None:
        self.name = name
        self.provider = provider
        #: What its entry in the registry says besides name, provider and URL.
        self.settings = dict(settings or {})
        self._port_file = folder / f"{name}.port"
        self.part = Part(name, self._argv(0), folder)
        self._client: aiohttp.ClientSession | None = None
        self.url = ""

    async def start(self) -> None:
        """Start it, on the port it had before where it had one."""
        if self._client is None:
            self._client = aiohttp.ClientSession(trust_env=False, timeout=aiohttp.ClientTimeout(total=60))
        self.part.start()
        port = await until_answered(self._port, f"{self.name} listens")
        self.url = f"http://127.0.0.1:{port}"
        self.part.argv = self._argv(port)

    async def kill(self) -> None:
        """End it as a crash does: connections to it are refused."""
        await self.part.kill()
        self._port_file.unlink()

    def _argv(self, port: int) -> tuple[str, ...]:
        options = ("--port-file", str(self._port_file), "--port", str(port), "--count-prompts")
        return (sys.executable, "-P", "-m", _MODULES[self.provider], *options)

    async def _port(self) -> int | None:
        assert self.part.running, self.part.log
        return int(self._port_file.read_text()) if self._port_file.exists() else None

    async def set(self, **attributes: object) -> None:
        """Set attributes of the fake, such as ``hold``, ``pace_s`` or ``echo``."""
        await self._post("/_fake/set", attributes)

    async def fault(self, path: str, kind: str | None, **settings: object) -> None:
        """Let requests to ``path`` go wrong; None takes it away."""
        await self._post("/_fake/faults", {"path": path, **({} if kind is None else {"kind": kind}), **settings})

    async def until_asked(self, prompt: str, times: int = 1) -> None:
        """Wait until the fake was sent this prompt."""
        await self._post("/_fake/until", {"prompt": prompt, "times": times})

    async def counters(self) -> dict[str, Any]:
        assert self._client is not None, "start() first"
        async with self._client.get(f"{self.url}/_fake/counters") as answer:
            answer.raise_for_status()
            return await answer.json()

    async def prompts(self) -> dict[str, int]:
        """How often each prompt was sent as work."""
        return (await self.counters())["prompts"]

    async def _post(self, path: str, body: object) -> None:
        assert self._client is not None, "start() first"
        async with self._client.post(self.url + path, json=body) as answer:
            answer.raise_for_status()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


class Served(msgspec.Struct, frozen=True):
    """A runtime that the test serves in its own process, so that it can let a device follow what the runtime does."""

    name: str
    provider: str
    server: FakeServer
    #: What its entry in the registry says besides name, provider and URL.
    settings: dict[str, object] = {}


class Sent(msgspec.Struct, frozen=True):
    """A submission: its acknowledgement, or None where none came."""

    prompt: str
    seq: int | None


class Site:
    """The processes of one site, and a watch on its log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.parts: list[Part] = []
        self.fakes: list[Fake] = []
        self.served: list[Served] = []
        #: Entries of the registry that nothing of this test serves.
        self.extra_runtimes: list[dict[str, object]] = []
        self._settings: NatsSettings | None = None
        self._connection: Connection | None = None
        self._watch: Watch | None = None
        self._up_port: int | None = None
        self.devices: list[dict[str, object]] = [
            {"id": DEVICE, "source": "static", "kind": "gpu", "total_mb": 24_000, "slots": 1}
        ]
        #: What the configurations say, by section; a test changes it before it starts the parts.
        self.sections: dict[str, dict[str, object]] = {
            "scheduler": {"claim_ttl_s": 6, "lease_ttl_s": LEASE_TTL_S},
            "agent": {"heartbeat_s": 1, "stop_grace_s": 5, "find_devices": False, "find_runtimes": False},
        }

    @property
    def connection(self) -> Connection:
        assert self._connection is not None
        return self._connection

    @property
    def watch(self) -> Watch:
        assert self._watch is not None
        return self._watch

    async def open(self, settings: NatsSettings, *, replicas: int = 1) -> None:
        """Connect to a server that somebody else runs, set the streams up, and follow the log."""
        self._settings = settings
        self.folder.joinpath("password").write_text(settings.password or "")
        self._connection = await connect(settings, name="tests")
        await ensure_site(self.connection, SiteStreams(lease_ttl_s=LEASE_TTL_S, replicas=replicas))
        self._watch = Watch(self.connection)
        await self.watch.start()

    async def close(self) -> None:
        for part in self.parts:
            part.clear()
        for fake in self.fakes:
            await fake.close()
        if self._watch is not None:
            await self._watch.stop()
        if self._connection is not None:
            await self._connection.close()

    # --- runtimes

    async def llama(self, name: str = "llama", **attributes: object) -> Fake:
        """A fake llama.cpp server with the model ``fake``."""
        return await self._fake(Fake(name, "llamacpp", self.folder), attributes)

    async def ollama(self, name: str = "ollama", **attributes: object) -> Fake:
        """A fake Ollama with the models ``m:8b`` and ``qwen3:latest``."""
        return await self._fake(Fake(name, "ollama", self.folder), attributes)

    async def runtime(self, provider: str, settings: Mapping[str, object] | None = None, **attributes: object) -> Fake:
        """The fake of any provider, named as it is; ``settings`` go into its entry of the registry."""
        return await self._fake(Fake(provider, provider, self.folder, settings=settings), attributes)

    async def _fake(self, fake: Fake, attributes: dict[str, object]) -> Fake:
        self.parts.append(fake.part)
        self.fakes.append(fake)
        await fake.start()
        if attributes:
            await fake.set(**attributes)
        return fake

    # --- parts

    def _part(self, name: str, argv: Sequence[str], env: dict[str, str] | None = None) -> Part:
        part = Part(name, argv, self.folder, env=env)
        self.parts.append(part)
        return part

    def scheduler(self, name: str = "scheduler", *, through: int | None = None) -> Part:
        """Start a scheduler; it reaches the server ``through`` this port where one is given."""
        return self._worker(name, "scheduler", HOST, through)

    def agent(
        self, name: str = "agent", *, host: str = HOST, through: int | None = None, meminfo: Path | None = None
    ) -> Part:
        """Start the agent of a host; it reaches the server ``through`` this port where one is given.

        With ``meminfo`` that file is its host's ``/proc/meminfo``.
        """
        return self._worker(name, "agent", host, through, meminfo)

    def _worker(self, name: str, kind: str, host: str, through: int | None = None, meminfo: Path | None = None) -> Part:
        config = self.folder / f"{name}.toml"
        config.write_text(self.config(host, through=through))
        module = ("gpukeeper.cli.workers", kind) if meminfo is None else ("support.other_memory", str(meminfo))
        argv = (sys.executable, "-P", "-m", *module)
        part = self._part(name, argv, {"GPUQ_CONFIG": str(config), "GPUQ_DATA": str(self.data)})
        part.start()
        return part

    def up(self) -> Part:
        """Start `gpuq up`; the log is followed once :meth:`follow_up` was awaited."""
        config = self.folder / "gpuq.toml"
        config.write_text(self.config(HOST))
        argv = (sys.executable, "-P", "-m", "gpukeeper.cli.main", "up")
        part = self._part("up", (*argv, "--config", str(config), "--data", str(self.data)))
        part.start()
        return part

    async def follow_up(self) -> None:
        """Connect to the server that `gpuq up` started, and follow its log."""
        self._connection = await until_answered(self._connect_up, "the server of `gpuq up` serves")
        self._watch = Watch(self.connection)
        await self.watch.start()

    async def _connect_up(self) -> Connection | None:
        if not (self.data / "site.json").exists() or load_credentials(self.data).url is None:
            return None
        found = load_credentials(self.data)
        assert found.url is not None
        settings = NatsSettings(servers=(found.url,), user=found.user, password=found.password)
        connection = await connect(settings, name="tests")
        try:
            await ensure_site(connection, SiteStreams(lease_ttl_s=LEASE_TTL_S))
        except BaseException:
            await connection.close()
            raise
        return connection

    def child_of_up(self, up: Part, name: str) -> int:
        """The process of ``scheduler``, ``agent`` or ``nats`` under `gpuq up`."""
        wanted = "nats-server" if name == "nats" else f"gpukeeper.cli.workers {name}"
        found = [pid for pid, command in children(up.pid).items() if wanted in command]
        assert len(found) == 1, children(up.pid)
        return found[0]

    def config(self, host: str, *, through: int | None = None) -> str:
        sections = {"host": {"name": host}, **self.sections}
        if self._settings is not None:
            sections["nats"] = {
                "url": ",".join(self._settings.servers) if through is None else f"nats://127.0.0.1:{through}",
                "user": self._settings.user,
                "password_file": str(self.folder / "password"),
            }
        else:
            # One port for the whole test, as with a site that has been up before.
            self._up_port = self._up_port or free_ports(1)[0]
            sections["server"] = {"port": self._up_port}
        runtimes = [
            {
                "name": fake.name,
                "provider": fake.provider,
                "url": fake.url,
                "allow_unknown_need": False,
                **fake.settings,
            }
            for fake in self.fakes
        ]
        runtimes += [
            {"name": one.name, "provider": one.provider, "url": one.server.url, **one.settings} for one in self.served
        ]
        runtimes += self.extra_runtimes
        parts = [f"[{name}]\n{_lines(values)}" for name, values in sections.items()]
        parts += [f"[[devices]]\n{_lines(values)}" for values in self.devices]
        parts += [f"[[runtimes]]\n{_lines(values)}" for values in runtimes]
        return "\n".join(parts)

    async def ready(self, *hosts: str) -> None:
        """Wait until a scheduler leads and the agents of ``hosts`` have joined with runtimes that answer."""
        watch = self.watch
        await watch.until(lambda: watch.all(LeaderElected), "a scheduler leads")
        for host in hosts or (HOST,):
            await watch.until(lambda host=host: self._offers(host), f"the agent of {host} joined")

    def _offers(self, host: str) -> bool:
        joined = any(fact.host == host for fact in self.watch.all(Joined))
        healthy = {fact.runtime for fact in self.watch.all(HealthChanged) if fact.host == host and fact.healthy}
        return joined and healthy >= {one.name for one in (*self.fakes, *self.served)}

    async def said(self, part: Part, words: str) -> None:
        """Wait until a part has logged ``words``."""

        async def look() -> bool:
            return words in part.log

        await until_answered(look, f"{part.name} says {words!r}")

    def ending(self, part: Part) -> asyncio.Task[int]:
        """Ask a part to end, and wait beside what the test does next."""
        return asyncio.create_task(part.stop())

    # --- producers and operators

    async def heartbeat(self, wanted: Callable[[Heartbeat], bool], *, times: int = 1, after: int = 0) -> Heartbeat:
        """Wait for the ``times``-th heartbeat ``after`` that sequence that is as ``wanted``."""
        left = times
        found: asyncio.Future[Heartbeat] = asyncio.get_running_loop().create_future()

        def on_stored(stored: Stored) -> None:
            nonlocal left
            beat = decode(stored).data
            if isinstance(beat, Heartbeat) and wanted(beat):
                left -= 1
                if left == 0 and not found.done():
                    found.set_result(beat)

        log = JetStreamLog(self.connection, stream=BEATS_STREAM)
        follower = await log.follow(on_stored, after=after)
        try:
            async with asyncio.timeout(WITHIN_S):
                return await found
        finally:
            await follower.stop()

    async def new_heartbeat(self, wanted: Callable[[Heartbeat], bool], *, times: int = 1) -> Heartbeat:
        """The same, of heartbeats that are still to come."""
        after = await JetStreamLog(self.connection, stream=BEATS_STREAM).last_seq()
        return await self.heartbeat(wanted, times=times, after=after)

    async def publish(self, subject: str, body: bytes, *, msg_id: str | None = None) -> int | None:
        """One raw publish; the sequence it was acknowledged with, None where nobody acknowledged it."""
        headers = None if msg_id is None else {"Nats-Msg-Id": msg_id}
        try:
            ack = await self.connection.js.publish(subject, body, headers=headers)
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError):
            return None
        return ack.seq

    async def send(self, job: object, *, producer: str = "tests") -> int:
        """Submit, and require the acknowledgement. Returns the sequence of the submission."""
        body = job if isinstance(job, bytes) else json.dumps(job).encode()
        seq = await self.publish(f"gpuq.submit.{producer}", body)
        assert seq is not None
        return seq

    async def submit(self, job: object) -> str:
        """Submit, and wait for the acceptance. Returns the job's id."""
        answer = await self.watch.answer(await self.send(job))
        assert not isinstance(answer, Rejected), answer
        return answer.job

    async def run(self, job: object) -> Fact:
        """Submit, and wait for the end."""
        return await self.watch.end(await self.submit(job))

    async def publish_raw(self, subject: bytes, body: bytes, *, headers: bytes | None = None) -> None:
        """Publish what no client library would, over the server that :meth:`open` was given."""
        assert self._settings is not None
        await publish_raw(self._settings, subject, body, headers=headers)

    async def send_many(self, count: int, *, model: str = "fake", first: int = 0) -> list[Sent]:
        """Submit ``count`` jobs one after another, each with a prompt of its own, whatever becomes of the log."""
        sent: list[Sent] = []
        for number in range(first, first + count):
            prompt = f"prompt {number:04d}"
            body = json.dumps({"model": model, "prompt": prompt}).encode()
            sent.append(Sent(prompt, await self.publish("gpuq.submit.tests", body, msg_id=f"tests-{number}")))
        return sent

    async def send_patiently(self, prompt: str, *, model: str = "fake") -> Sent:
        """Submit one job, again and again until it is acknowledged: the message id makes it one."""
        body = json.dumps({"model": model, "prompt": prompt}).encode()
        subject, msg_id = "gpuq.submit.tests", f"tests-{prompt}"
        seq = await until_answered(lambda: self.publish(subject, body, msg_id=msg_id), "the log takes a submission")
        return Sent(prompt, seq)

    async def command(
        self, kind: str, job: str, *, actor: str = "alice", reason: str = "enough", command_id: str | None = None
    ) -> int:
        """Send an operator's command about a job as a CloudEvent. Returns its sequence."""
        command_id = command_id or f"cmd-{kind}-{job[:40]}"
        return await self.operate(kind, {"job": job, "reason": reason}, actor=actor, command_id=command_id)

    async def operate(
        self, kind: str, data: Mapping[str, object], *, actor: str = "alice", command_id: str | None = None
    ) -> int:
        """Send an operator's command as a CloudEvent. Returns its sequence."""
        body = {
            "specversion": "1.0",
            "id": command_id or f"cmd-{kind}-{uuid4().hex}",
            "source": "/tests",
            "type": f"gpuq.operator.{kind}.v1",
            "subject": "tests",
            "time": "2025-10-19T14:00:00Z",
            "data": data,
        }
        seq = await self.publish(f"gpuq.cmd.{actor}", json.dumps(body).encode())
        assert seq is not None
        return seq

    # --- what must hold after anything

    async def all_ended(self, sent: Sequence[Sent], *, within_s: float = 90.0) -> None:
        """Wait until every acknowledged submission is answered and its job has ended."""
        watch = self.watch
        acknowledged = [one.seq for one in sent if one.seq is not None]

        def look() -> bool:
            if watch.ended() < len(acknowledged) - watch.count[Resubmitted.TYPE]:
                return False
            answers = [watch.answers.get(seq) for seq in acknowledged]
            return all(answer is not None and watch.ends(answer.job) for answer in answers)

        await watch.until(look, f"all {len(acknowledged)} acknowledged submissions ended", within_s=within_s)

    async def check(self, sent: Sequence[Sent] = (), *, handed_back: Sequence[str] = ()) -> None:
        """What no crash may change; see the messages. The prompts of jobs that were ``handed_back`` may run again."""
        watch = self.watch
        await watch.caught_up()
        doubly = {seq: count for seq, count in watch.answered.items() if count > 1}
        assert not doubly, f"submissions with more than one answer: {doubly}"
        for job in watch.site.jobs:
            assert len(watch.ends(job)) <= 1, f"{job} has more than one end: {watch.history(job)}"
            assert not watch.after_end(job), f"{job} went on after its end: {watch.history(job)}"
        prompts: Counter[str] = Counter()
        for fake in self.fakes:
            prompts.update(await fake.prompts())
        for one in self.served:
            prompts.update(one.server.prompts)
        twice = {prompt: count for prompt, count in prompts.items() if count > 1 and prompt not in handed_back}
        assert not twice, f"executed more than once: {twice}"
        for one in sent:
            if one.seq is None:
                continue
            answer = watch.answers.get(one.seq)
            assert answer is not None, f"submission {one.seq} was acknowledged and never answered"
            ends = watch.ends(answer.job)
            assert len(ends) == 1, f"{answer.job} has {len(ends)} ends: {watch.history(answer.job)}"
            assert not isinstance(ends[0], Succeeded) or prompts[one.prompt], f"{answer.job} succeeded and never ran"
        folded, fresh = snapshot.digest(watch.site), snapshot.digest(await watch.refold())
        assert folded == fresh, "the folded state is not what the log says from sequence 1"

    def logs(self, chars: int = 6000) -> str:
        """The last output of every process, for a test that fails."""
        texts = [f"--- {part.name}\n{part.log[-chars:]}" for part in self.parts]
        texts += [f"--- {path.name}\n{path.read_text(errors='replace')[-chars:]}" for path in self.data.glob("logs/*")]
        return "\n".join(texts)


def _lines(values: Mapping[str, object]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


@asynccontextmanager
async def site_in(folder: Path, settings: NatsSettings | None = None, *, replicas: int = 1) -> AsyncGenerator[Site]:
    """A site over ``settings`` (or, without them, for :meth:`Site.up`); its processes end with the block.

    What a failed test leaves is told with the output of every process.
    """
    site = Site(folder)
    try:
        if settings is not None:
            await site.open(settings, replicas=replicas)
        yield site
    except BaseException:
        print(site.logs())
        raise
    finally:
        await site.close()
