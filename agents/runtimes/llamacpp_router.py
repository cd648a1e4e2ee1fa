"""A llama.cpp server that was started without a model: a router, which loads and unloads models by their names.

Each model runs in a process of its own. The router answers a load at once and goes on loading; what its list says of a
model is the only sign of how that went. It makes room by count (``--models-max``), and takes the model that was used
least recently, whether that is in use or not.
"""

from __future__ import annotations

import asyncio
from urllib.parse import quote

from gpukeeper.agents.runtimes import llamacpp_wire as wire
from gpukeeper.agents.runtimes.attempts import attempt
from gpukeeper.agents.runtimes.http import RuntimeHttp
from gpukeeper.agents.runtimes.port import RuntimeFailure, Signs
from gpukeeper.events.modelnames import canonical, same_model
from gpukeeper.events.readings import Activity, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason

#: How long to wait between two looks at a model on its way: shorter at first, for small ones.
POLL_FIRST_S = 0.05
POLL_LIMIT_S = 1.0

#: What the router says where the wish has come true already.
_ALREADY_RUNNING = "already running"
_NOT_RUNNING = "not running"


class Router:
    """The models of one router."""

    def __init__(self, name: str, http: RuntimeHttp, look_timeout_s: float) -> None:
        self._name = name
        self._http = http
        self._look_timeout_s = look_timeout_s
        #: The id that the router knows a model by, by each of the model's names.
        self._ids: dict[str, str] = {}

    # --- what it has

    def take(self, models: wire.Models) -> None:
        """Remember the names of its models."""
        aliases = {canonical(alias): served.id for served in models.data for alias in served.aliases or ()}
        self._ids = {**aliases, **{canonical(served.id): served.id for served in models.data}}

    def id_of(self, model: str) -> str:
        """What the router calls ``model``; the name itself where it is not known."""
        return self._ids.get(canonical(model), model)

    def find(self, reading: RuntimeReading, model: str) -> ResidentModel | None:
        """The row of ``model``. One that is still loading takes no work: to load it is to wait for it."""
        known = self.id_of(model)
        return next((row for row in reading.resident or () if same_model(row.model, known) and not row.loading), None)

    async def activity(self, models: wire.Models) -> Activity:
        """Busy where a slot of any model works, or one is loading; unknown where one does not tell. Never raises."""
        states = {served.id: wire.state(served) for served in models.data}
        if "loading" in states.values():
            return "busy"
        asked = [self._slots(name) for name, state in states.items() if state == "loaded"]
        words = await asyncio.gather(*asked)
        if "busy" in words:
            return "busy"
        return "unknown" if "unknown" in words else "idle"

    async def signs(self, model: str) -> Signs:
        """What it shows of its work on one model."""
        models = await attempt(self._models(), "/v1/models", self._look_timeout_s)
        if isinstance(models, RuntimeFailure):
            return Signs()
        state = next((wire.state(served) for served in models.data if served.id == self.id_of(model)), "unloaded")
        if state == "loaded":
            return Signs(activity=await self._slots(self.id_of(model)), resident=True)
        return Signs(activity="busy" if state == "loading" else "idle", resident=False)

    async def _slots(self, name: str) -> Activity:
        # Asked without that, the router would load the model to ask it.
        path = f"/slots?model={quote(name, safe='')}&autoload=false"
        return wire.activity(await attempt(self._http.get(path, wire.slots_decoder), path, self._look_timeout_s))

    # --- what it does

    async def load(self, model: str) -> None:
        """Have it load ``model``, and wait until it has. The load goes on when the caller stops waiting.

        Raises:
            RuntimeFailure: it lists no such model, or could not load it.
        """
        state = wire.state(await self._served(model))
        if state == "loaded":
            return
        name = self.id_of(model)
        if state == "sleeping":
            # Its memory is given up, though its process is there: only one that is unloaded can be loaded.
            await self.release(model)
            await self._while_state(name, ("sleeping",))
        if state != "loading":
            try:
                await self._http.post("/models/load", {"model": name}, wire.accepted_decoder)
            except RuntimeFailure as failure:
                if failure.status is None:
                    raise
                if _ALREADY_RUNNING not in failure.detail:
                    raise RuntimeFailure(Reason.LOAD_FAILED, failure.detail, status=failure.status) from failure
        served = await self._while_state(name, ("loading",))
        if wire.state(served) != "loaded":
            raise RuntimeFailure(Reason.LOAD_FAILED, f"{self._name} did not load {model}: {wire.state_words(served)}")

    async def release(self, model: str) -> None:
        """Have it unload ``model``. What is not loaded is no error.

        Raises:
            RuntimeFailure: it refused, or could not be asked.
        """
        try:
            await self._http.post("/models/unload", {"model": self.id_of(model)}, wire.accepted_decoder)
        except RuntimeFailure as failure:
            if failure.status is None:
                raise
            if _NOT_RUNNING not in failure.detail:
                raise RuntimeFailure(Reason.RELEASE_FAILED, failure.detail, status=failure.status) from failure

    async def _while_state(self, name: str, states: tuple[str, ...]) -> wire.Served:
        """Wait for as long as the model is in one of ``states``; the caller bounds that."""
        pause_s = POLL_FIRST_S
        while wire.state(served := await self._served(name)) in states:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_LIMIT_S)
        return served

    async def _served(self, model: str) -> wire.Served:
        models = await self._models()
        for served in models.data:
            if served.id == self.id_of(model):
                return served
        has = ", ".join(served.id for served in models.data[:10]) or "no model"
        raise RuntimeFailure(Reason.LOAD_FAILED, f"{self._name} lists {has}, and cannot load {model}")

    async def _models(self) -> wire.Models:
        models = await self._http.get("/v1/models", wire.models_decoder)
        self.take(models)
        return models
