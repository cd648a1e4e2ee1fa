"""The text of the server's configuration. Pure."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gpukeeper.cli.credentials import Credentials

LISTEN_HOST = "127.0.0.1"


class ServerPaths(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server keeps things, all below ``<data folder>/nats``."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "nats.conf"

    @property
    def pid(self) -> Path:
        return self.folder / "nats.pid"

    @property
    def ports(self) -> Path:
        """A folder: the server writes the ports it really has into ``nats-server_<pid>.ports`` here."""
        return self.folder / "ports"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def ports_file(self, pid: int) -> Path:
        return self.ports / f"nats-server_{pid}.ports"


def server_config(
    paths: ServerPaths, credentials: Credentials, *, port: int, max_payload_mb: int, sync_interval: str
) -> str:
    """The configuration of a server for one machine. ``port`` -1 lets the server choose.

    - It listens on the loopback address only, and has no monitoring port.
    - ``sync_interval: always``: an acknowledged write is on disk.
    - ``site`` may do everything. ``producer`` may publish submissions, and hears only the replies to itself:
      it can neither write other facts nor read or change a stream.
    - There is no log file: the server's output goes to its parent, which bounds it.
    """
    producer = credentials.producer
    return f"""\
# Written by `gpuq up` at each start: changes here are lost. Holds passwords.
server_name: {_quoted(f"gpukeeper-{credentials.site}")}
listen: "{LISTEN_HOST}:{port}"
pid_file: {_quoted(str(paths.pid))}
ports_file_dir: {_quoted(str(paths.ports))}
max_payload: {max_payload_mb}MB
jetstream {{
  store_dir: {_quoted(str(paths.store))}
  sync_interval: {_quoted(sync_interval)}
}}
authorization {{
  users: [
    {{ user: {_quoted(credentials.user)}, password: {_quoted(credentials.password)} }}
    {{
      user: {_quoted(producer.user)}, password: {_quoted(producer.password)}
      permissions {{
        publish: {{ allow: ["gpuq.submit.*"] }}
        subscribe: {{ allow: [{_quoted(producer.inbox_prefix + ".>")}] }}
      }}
    }}
  ]
}}
"""


def _quoted(text: str) -> str:
    """A string of the server's configuration language."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
