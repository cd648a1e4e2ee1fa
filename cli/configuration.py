"""Finds and decodes ``gpuq.toml``, strictly: what is unknown or wrong is an error that names it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import platformdirs

from gpukeeper.cli.configproblems import explain, show, show_unless_secret
from gpukeeper.cli.siteconfig import SiteConfig, problems
from gpukeeper.events.errors import ConfigError

FILE_NAME = "gpuq.toml"
CONFIG_BYTES_MAX = 1_000_000
#: Environment variables that stand above the file.
NATS_ENVIRONMENT = {
    "GPUQ_NATS_URL": "url",
    "GPUQ_NATS_USER": "user",
    "GPUQ_NATS_PASSWORD_FILE": "password_file",
    "GPUQ_NATS_TOKEN_FILE": "token_file",
    "GPUQ_NATS_CREDS_FILE": "creds_file",
    "GPUQ_NATS_TLS_CA": "tls_ca",
    "GPUQ_NATS_INBOX_PREFIX": "inbox_prefix",
}
_PATH_KEYS = ("password_file", "token_file", "creds_file", "tls_ca")
_TOML_PLACE = re.compile(r"(?P<words>.*) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)")


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration and the file it came from; None where no file was found."""

    config: SiteConfig
    path: Path | None = None
    #: Where each deadline that the file gives was written, by field: shown when it expires.
    deadline_sources: dict[str, str] = {}


def find_config(
    given: Path | None, environ: Mapping[str, str], *, cwd: Path, user_folder: Path | None = None
) -> Path | None:
    """The file to read: ``given``, ``$GPUQ_CONFIG``, ``./gpuq.toml``, the user's; None where there is none.

    Raises:
        ConfigError: the file named by ``given`` or ``$GPUQ_CONFIG`` is not there.
    """
    named = [("--config", given)] if given is not None else []
    if not named and environ.get("GPUQ_CONFIG"):
        named = [("$GPUQ_CONFIG", Path(environ["GPUQ_CONFIG"]))]
    for source, path in named:
        assert path is not None
        place = (cwd / path.expanduser()).absolute()
        if not place.is_file():
            raise ConfigError(f"{place}: no such file, named by {source}", path=str(place), source=source)
        return place
    folder = user_folder or platformdirs.user_config_path("gpukeeper")
    return next((place for place in (cwd / FILE_NAME, folder / FILE_NAME) if place.is_file()), None)


def current_folder() -> Path:
    """Where relative paths of the command line start.

    Raises:
        ConfigError: somebody has removed that folder.
    """
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError("the current folder does not exist any more: change to another one") from error


def load_config(
    given: Path | None,
    environ: Mapping[str, str],
    *,
    cwd: Path,
    user_folder: Path | None = None,
    nats_url: str | None = None,
) -> Loaded:
    """Find, read and check the configuration; without a file, the defaults with the environment above them.

    ``nats_url`` (``--nats``) stands above both.

    Raises:
        ConfigError: names the file, the path, the value and what would be right.
    """
    path = find_config(given, environ, cwd=cwd, user_folder=user_folder)
    raw = {} if path is None else _parse(path)
    folder = cwd if path is None else path.parent
    if nats_url is not None:
        environ = {**environ, "GPUQ_NATS_URL": nats_url}
    config = _decode(raw, environ, source=path, folder=folder, cwd=cwd)
    deadlines: dict[str, Any] = raw.get("deadlines", {})
    return Loaded(
        config=config, path=path, deadline_sources={field: f"{path}, deadlines.{field}" for field in deadlines}
    )


def decode_config(text: str, *, name: str = FILE_NAME) -> SiteConfig:
    """Decode the text of a configuration. The environment plays no part.

    Raises:
        ConfigError: names the place and what would be right.
    """
    place = Path(name)
    return _decode(_parse_text(text, place), {}, source=place, folder=place.parent, cwd=place.parent)


def _parse(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise ConfigError(f"{path}: larger than {CONFIG_BYTES_MAX} bytes", path=str(path))
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", path=str(path)) from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8", path=str(path), line=line) from error
    return _parse_text(text, path)


def _parse_text(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _TOML_PLACE.fullmatch(str(error))
        words = found["words"] if found else str(error)
        lines = text.splitlines() or [""]
        line = int(found["line"]) if found and found["line"] else len(lines)
        wrong = lines[line - 1].strip() if line <= len(lines) else ""
        shown = show_unless_secret(wrong, wrong)
        raise ConfigError(f"{path}, line {line}: {words}: {shown}", path=str(path), line=line) from error


def _decode(
    raw: dict[str, Any], environ: Mapping[str, str], *, source: Path | None, folder: Path, cwd: Path
) -> SiteConfig:
    origin = str(source) if source is not None else "the defaults"
    merged = _with_environment(raw, environ, folder=folder, cwd=cwd)
    from_environment = [name for name in NATS_ENVIRONMENT if environ.get(name)]
    if from_environment:
        origin += f" with {', '.join(from_environment)}"
    try:
        config = msgspec.convert(merged, SiteConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {explain(error, merged, SiteConfig)}", path=origin) from error
    for problem in problems(config):
        sentence = f"{problem.path} = {show(problem.value)}: must be {problem.wanted}"
        if problem.value is None:
            sentence = f"{problem.path}: missing: must be {problem.wanted}"
        raise ConfigError(f"{origin}: {sentence}", path=origin, key=problem.path)
    return config


def _with_environment(raw: dict[str, Any], environ: Mapping[str, str], *, folder: Path, cwd: Path) -> dict[str, Any]:
    """``raw`` with the NATS settings of the environment, and with paths made absolute.

    Paths in the file are relative to its folder, those of the environment to the current one. A way to log in
    that the environment names replaces the file's, whichever it was.
    """
    section = raw.get("nats", {})
    if not isinstance(section, dict):
        return raw  # decoding says what is wrong with it
    given: dict[str, Any] = {
        key: _absolute(value, folder) if key in _PATH_KEYS else value
        for key, value in cast("dict[str, object]", section).items()
    }
    above = {key: environ[name] for name, key in NATS_ENVIRONMENT.items() if environ.get(name)}
    if above.keys() & {"user", "password_file", "token_file", "creds_file"}:
        for key in ("password_file", "token_file", "creds_file"):
            given.pop(key, None)
        given.pop("user", None)
    given |= {key: _absolute(value, cwd) if key in _PATH_KEYS else value for key, value in above.items()}
    return {**raw, "nats": given} if given else raw


def _absolute(value: object, folder: Path) -> object:
    return str(folder / Path(value).expanduser()) if isinstance(value, str) and value else value
