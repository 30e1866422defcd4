# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""How much memory a process takes while it does something."""

import ctypes
import gc
from pathlib import Path


class MemoryGrowth:
    """Watches by how much this process's resident memory exceeds what it is now, at its highest.

    Memory that the allocator keeps for reuse is given back first: whoever uses it again shall be charged for it.
    """

    def __init__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._before_kib = _resident_kib('VmRSS')
        # Lets VmHWM, the peak of VmRSS, start anew.
        Path('/proc/self/clear_refs').write_text('5')

    def peak_mb(self) -> float:
        return (_resident_kib('VmHWM') - self._before_kib) * 1024 / 1e6


def _resident_kib(field: str) -> int:
    status = dict(line.split(':', 1) for line in Path('/proc/self/status').read_text().splitlines())
    return int(status[field].split()[0])
