"""An agent on a host with other memory than this one: ``python -m support.other_memory MEMINFO``.

Everything is as in the real program, but for the file that it takes for ``/proc/meminfo``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpukeeper.agents.devices.inventory import Inventory
from gpukeeper.cli.workers import run_worker

if __name__ == "__main__":
    defaults = Inventory.__init__.__kwdefaults__
    assert defaults is not None
    assert "meminfo" in defaults
    defaults["meminfo"] = Path(sys.argv[1])
    sys.exit(run_worker("agent"))
