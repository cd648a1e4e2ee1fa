"""Who leads: a key whose bucket forgets it after the lease's time.

A lease is a hint for who works. It may be wrong for a moment; expected sequences on the log keep that harmless.
"""

from __future__ import annotations

import nats.errors
import nats.js.errors
from nats.js.kv import KeyValue

from gpukeeper.events.connection import Connection
from gpukeeper.events.subjects import LEASE_BUCKET

_KEY = "scheduler"


class Lease:
    """The scheduler's lease on one site.

    Args:
        connection: the site's NATS.
        instance_id: who holds it, for people to see.
        ttl_s: how long it lasts as configured; the bucket's own time is what counts where that is shorter.
    """

    def __init__(self, connection: Connection, instance_id: str, *, ttl_s: float) -> None:
        self._connection = connection
        self._instance_id = instance_id
        self._bucket: KeyValue | None = None
        self.ttl_s = ttl_s
        #: Revision of our own entry while we hold it.
        self.revision = 0

    @property
    def held(self) -> bool:
        return self.revision > 0

    async def keep(self) -> bool:
        """Take the lease when it is free, renew it when it is ours. Returns whether we hold it.

        A bucket that does not answer leaves us without the lease: we stop deciding, which is always safe.
        """
        try:
            if self._bucket is None:
                bucket = await self._connection.js.key_value(LEASE_BUCKET)
                made_with_s = (await bucket.status()).ttl
                if made_with_s:
                    # It was made with the configuration of its day: renewing at the pace of another would lose it.
                    self.ttl_s = min(self.ttl_s, made_with_s)
                self._bucket = bucket
            value = self._instance_id.encode()
            if self.held:
                self.revision = await self._bucket.update(_KEY, value, last=self.revision)
            else:
                self.revision = await self._bucket.create(_KEY, value)
        except (nats.js.errors.KeyWrongLastSequenceError, nats.js.errors.BadRequestError):
            self.revision = 0
        except (TimeoutError, nats.errors.Error, OSError):
            self.revision = 0
        return self.held

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
