"""The text of the server's configuration. Pure."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gpukeeper.cli.credentials import Credentials
from gpukeeper.events.subjects import ASK_JOB, SUBMIT_PREFIX

LISTEN_HOST = "127.0.0.1"
SITE_ACCOUNT = "SITE"
PRODUCER_ACCOUNT = "PRODUCERS"
SUBMISSIONS = SUBMIT_PREFIX + "*"


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
    - ``site`` may do everything. ``producer`` may publish submissions and ask a scheduler about jobs, and hears only
      the replies to itself: it can neither write other facts nor read or change a stream.
    - The producer has an account of its own, as permissions are not enough: the server acknowledges a stored
      message to whatever reply subject it carries, with rights of its own, so a submission with the reply
      subject ``gpuq.ev.job.x`` would put that answer into the log (measured). The same goes for a scheduler that
      answers a question. Between accounts, an answer can only go back to where the request came from.
    - The server forgets a request between accounts that is not answered within 2 minutes, its default. No question
      waits half as long.
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
accounts {{
  {SITE_ACCOUNT} {{
    jetstream: enabled
    users: [ {{ user: {_quoted(credentials.user)}, password: {_quoted(credentials.password)} }} ]
    exports: [
      {{ service: {_quoted(SUBMISSIONS)}, accounts: [{PRODUCER_ACCOUNT}] }}
      {{ service: {_quoted(ASK_JOB)}, accounts: [{PRODUCER_ACCOUNT}] }}
    ]
  }}
  {PRODUCER_ACCOUNT} {{
    users: [ {{
      user: {_quoted(producer.user)}, password: {_quoted(producer.password)}
      permissions {{
        publish: {{ allow: [{_quoted(SUBMISSIONS)}, {_quoted(ASK_JOB)}] }}
        subscribe: {{ allow: [{_quoted(producer.inbox_prefix + ".>")}] }}
      }}
    }} ]
    imports: [
      {{ service: {{ account: {SITE_ACCOUNT}, subject: {_quoted(SUBMISSIONS)} }} }}
      {{ service: {{ account: {SITE_ACCOUNT}, subject: {_quoted(ASK_JOB)} }} }}
    ]
  }}
}}
"""


def _quoted(text: str) -> str:
    """A string of the server's configuration language."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
