"""Whether a run or a load that was told to stop has ended, judged by what the runtime shows afterwards. Pure."""

from __future__ import annotations

from gpukeeper.agents.runtimes.port import Signs

#: A model counts as gone when this many looks in a row do not list it: busy ones were seen to be left out of two.
GONE_LOOKS = 4

#: What a runtime shows of a model that it has not brought in yet: no request for it has ever ended.
NOT_LOADED = Signs(last_end="")


class StopProof:
    """Takes in look after look, and says when they prove that the request has ended. First match wins:

    1. The runtime says that it works for nobody.
    2. It holds the model no more, in several looks in a row, and does not say that it is busy.
    3. The mark of the last request's end is another one than while the request was under way, in two looks in a row.
       A mark that moves with every look says nothing: Ollama makes one up for a model that no request has left yet.

    Everything else is unknown, and proves nothing.

    Args:
        during: what the runtime showed while the request was under way; None where nobody looked.
    """

    def __init__(self, during: Signs | None) -> None:
        self._before = None if during is None else during.last_end
        self._newest: str | None = None
        self._gone_looks = 0

    def shown_by(self, signs: Signs) -> bool:
        """Whether the request is proven to have ended, now that ``signs`` were seen after the stop."""
        if signs.activity == "idle":
            return True
        gone = signs.resident is False and signs.activity != "busy"
        self._gone_looks = self._gone_looks + 1 if gone else 0
        if self._gone_looks >= GONE_LOOKS:
            return True
        before, self._newest = self._newest, signs.last_end
        if self._before is None or signs.last_end is None:
            return False
        return signs.last_end == before and signs.last_end != self._before
