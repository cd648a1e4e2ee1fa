"""Who leads: a key whose bucket forgets it after the lease's time.

A lease is a hint for who works. It may be wrong for a moment; expected sequences on the log keep that harmless.
"""

from __future__ import annotations

import nats.errors
import nats.js.errors
import structlog
from nats.js.kv import KeyValue

from gpukeeper.events.connection import Connection
from gpukeeper.events.streams import lease_ttl_s, set_lease_ttl
from gpukeeper.events.subjects import LEASE_BUCKET

_log = structlog.get_logger("gpukeeper.scheduler")

_KEY = "scheduler"


class Lease:
    """The scheduler's lease on one site.

    Args:
        wanted_ttl_s: how long the bucket should remember it. The scheduler that was started last has its way.
    """

    def __init__(self, connection: Connection, instance_id: str, *, wanted_ttl_s: float) -> None:
        self._connection = connection
        self._instance_id = instance_id
        self._bucket: KeyValue | None = None
        self._wanted_ttl_s = wanted_ttl_s
        #: How long the bucket remembers it really, as of the last time we took it.
        self.ttl_s = wanted_ttl_s
        #: Revision of our own entry while we hold it.
        self.revision = 0

    @property
    def held(self) -> bool:
        return self.revision > 0

    async def keep(self) -> bool:
        """Take the lease when it is free, renew it when it is ours. Returns whether we hold it.

        A bucket that does not answer leaves us without the lease: we stop deciding, which is always safe.

        Raises:
            IncompatibleStream: the bucket never forgets.
        """
        try:
            if self._bucket is None:
                self._bucket = await self._open()
            value = self._instance_id.encode()
            if self.held:
                self.revision = await self._bucket.update(_KEY, value, last=self.revision)
            else:
                # Another scheduler may have been started with another time since.
                self.ttl_s = await lease_ttl_s(self._connection)
                self.revision = await self._bucket.create(_KEY, value)
        except (nats.js.errors.KeyWrongLastSequenceError, nats.js.errors.BadRequestError):
            self.revision = 0
        except (TimeoutError, nats.errors.Error, OSError):
            self.revision = 0
        return self.held

    async def _open(self) -> KeyValue:
        bucket = await self._connection.js.key_value(LEASE_BUCKET)
        found_s = await lease_ttl_s(self._connection)
        if found_s != self._wanted_ttl_s:
            try:
                await set_lease_ttl(self._connection, self._wanted_ttl_s)
            except nats.js.errors.APIError as error:
                _log.warning("lease_ttl_kept", ttl_s=found_s, wanted_s=self._wanted_ttl_s, error=str(error))
            else:
                _log.info("lease_ttl_changed", before_s=found_s, ttl_s=self._wanted_ttl_s)
        return bucket

    async def give_up(self) -> None:
        """Let another scheduler take over at once."""
        if not self.held or self._bucket is None:
            return
        revision, self.revision = self.revision, 0
        try:
            await self._bucket.delete(_KEY, last=revision)
        except (TimeoutError, nats.errors.Error, OSError):
            # It expires by itself.
            return
