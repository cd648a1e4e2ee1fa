"""What a registry may say about containers."""

from __future__ import annotations

import re

import pytest

from gpukeeper.agents.config import KATAGO_COMMAND
from gpukeeper.cli.configuration import decode_config
from gpukeeper.events.errors import ConfigError

KATAGO = '[[runtimes]]\nname = "go"\nprovider = "katago"\ncontainer = "kg"\n'
PLAIN = '[[runtimes]]\nname = "n"\nprovider = "container"\ncontainer = "nb"\n'


def test_what_is_reached_through_a_container_needs_no_url() -> None:
    config = decode_config(KATAGO + PLAIN + 'url = "http://127.0.0.1:1/api"\nrelease = "stop"')

    go, notebook = config.runtimes
    assert (go.url, go.container, go.command) == ("", "kg", KATAGO_COMMAND)
    assert (notebook.release, notebook.container) == ("stop", "nb")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (KATAGO.replace('container = "kg"', ""), r"runtimes\[0\].container: missing: must be the name of a container"),
        (PLAIN.replace('container = "nb"', ""), r"runtimes\[0\].container: missing"),
        (PLAIN + 'url = "nowhere"', r'runtimes\[0\].url = "nowhere": must be a URL'),
        (PLAIN + 'release = "pause"', r'runtimes\[0\].release = "pause": .*a paused container keeps all its memory'),
        (PLAIN + 'release = "sleep1"', r'runtimes\[0\].release = "sleep1": must be one of auto, none, stop'),
        (KATAGO + 'release = "stop"', r'runtimes\[0\].release = "stop": must be one of auto, none'),
        (KATAGO + PLAIN.replace("nb", "kg"), r'runtimes\[1\].container = "kg": must be a value that no other entry'),
        (PLAIN + 'command = ["x"]', r"runtimes\[0\].command = .*only katago"),
        (KATAGO + "command = []", r"runtimes\[0\].command"),
        (PLAIN.replace('"nb"', '"../etc"'), r'runtimes\[0\].container = "../etc"'),
        (PLAIN.replace('"nb"', '"nb/json?x="'), r"runtimes\[0\].container"),
        (PLAIN.replace('"nb"', '""'), r"runtimes\[0\].container"),
    ],
)
def test_an_entry_that_cannot_be_meant_is_refused_with_its_place(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_config(text)

    assert re.search(words, str(caught.value)), str(caught.value)


def test_many_runtimes_may_name_no_container() -> None:
    ollama = '[[runtimes]]\nname = "{}"\nprovider = "ollama"\nurl = "http://127.0.0.1:{}"\n'

    assert len(decode_config(ollama.format("a", 1) + ollama.format("b", 2)).runtimes) == 2
