"""What a Hugging Face style server (``/generate``) sends and takes, as records. Pure: no connection, no clock."""

from __future__ import annotations

from typing import Any

import msgspec

from gpukeeper.agents.runtimes.http import decode, error_words
from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Work


class Info(msgspec.Struct):
    model_id: str
    #: ``cuda``, ``cpu``, ..., where it says so.
    model_device_type: str | None = None
    #: Whether it holds its model now, where it says so.
    loaded: bool | None = None


class Details(msgspec.Struct):
    finish_reason: str | None = None
    generated_tokens: int | None = None
    #: The prompt, token by token; only their number matters here.
    prefill: list[msgspec.Raw] | None = None
    input_length: int | None = None


class Generated(msgspec.Struct):
    generated_text: str
    details: Details | None = None


class _Piece(msgspec.Struct):
    text: str = ""
    special: bool = False


class Streamed(msgspec.Struct):
    """One record of a stream. The last one has ``generated_text``."""

    token: _Piece | None = None
    generated_text: str | None = None
    details: Details | None = None
    error: Any = None


info_decoder = msgspec.json.Decoder(Info)
generated_decoder = msgspec.json.Decoder(Generated)
#: Some servers wrap the answer of ``/generate`` in a list of one.
either_decoder: msgspec.json.Decoder[Generated | list[Generated]] = msgspec.json.Decoder(Generated | list[Generated])
_streamed_decoder = msgspec.json.Decoder(Streamed)

#: In the words of OpenAI's ``finish_reason``.
_FINISH = {"eos_token": "stop", "stop_sequence": "stop"}


def generated(answer: Generated | list[Generated], path: str) -> Generated:
    """The one text of an answer.

    Raises:
        RuntimeFailure: it has none, or several.
    """
    if isinstance(answer, Generated):
        return answer
    if len(answer) != 1:
        raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, f"{path}: {len(answer)} texts for one prompt")
    return answer[0]


def streamed(data: bytes, path: str) -> Streamed:
    """One record of a stream; raises RuntimeFailure where it is an error, or none of this protocol."""
    record = decode(data, _streamed_decoder, path)
    if record.error is not None:
        raise RuntimeFailure(Reason.RUNTIME_ERROR, f"{path}: {error_words(record.error)}")
    if record.token is None and record.generated_text is None:
        raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, f"{path}: a record without a token and without an end")
    return record


def result(text: str, details: Details | None, model: str) -> JobResult:
    """The whole answer; figures that were not given stay unknown."""
    said = details or Details()
    finish = said.finish_reason
    prompt_tokens = said.input_length
    if prompt_tokens is None and said.prefill:
        prompt_tokens = len(said.prefill)
    return JobResult(
        text=text,
        finish_reason=None if finish is None else _FINISH.get(finish, finish),
        prompt_tokens=prompt_tokens,
        completion_tokens=said.generated_tokens,
        model=model,
    )


def parameters(work: Work) -> dict[str, Any]:
    """``options`` as they are, then the neutral settings that were given.

    A temperature of 0 is said as "do not sample", as such servers take positive ones only.
    """
    named: dict[str, Any] = {
        "max_new_tokens": work.max_tokens,
        "temperature": work.temperature or None,
        "do_sample": None if work.temperature is None else work.temperature > 0,
        "top_p": work.top_p,
        "top_k": work.top_k,
        "seed": work.seed,
        "stop": work.stop,
    }
    given = {key: value for key, value in named.items() if value is not None}
    return {"details": True, **(work.options or {}), **given}
