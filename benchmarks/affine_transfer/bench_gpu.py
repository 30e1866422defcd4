# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""``execute`` within one process that has an accelerator, beside bare copies of as many bytes.

    python benchmarks/affine_transfer/bench_gpu.py [--scale S] [--json PATH]

Prints a table and, with ``--json``, writes the same rows. Exits 1 if wrong values arrive anywhere, 2 without an
accelerator. README.md beside this file says what the columns mean.
"""

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.affine_transfer import plan_model
from deepspeed.checkpoint.affine_transfer_executor import AffineTransferExecutor, TransferEndpoints

from layouts import zero_maps
from models import llama_of, parameter_shapes
from report import Row, machine, print_table, quartiles, write_json
from transfer_jobs import TRAINERS, WeightSync

# By parameter and location.
Shards = Dict[str, Dict[int, torch.Tensor]]

GIB = 2**30
# What the memory of sources and targets is: host memory of either kind, or the accelerator's.
MEMORIES = ('pinned', 'pageable', 'device')


class Masters:
    """ZeRO-3 fp32 masters to the same layout: every segment is one run of elements at both ends."""
    name = 'in place'
    dtype = torch.float32

    def __init__(self, shapes):
        self.job = WeightSync(shapes)
        self.sources = self._shards(self.job.master)
        self.expected = self._shards(self.target)

    def _shards(self, shard: Callable[[str, int], torch.Tensor]) -> Shards:
        return {name: {location: shard(name, location) for location in range(TRAINERS)} for name in self.job.shapes}

    def target_maps(self):
        return zero_maps(self.job.shapes, TRAINERS)

    def target(self, name, location):
        return self.job.master(name, location)


class Rollout(Masters):
    """ZeRO-3 fp32 masters to bf16 tensor parallel shards: converted, and in part strided."""
    name = 'to tensor parallel'
    dtype = torch.bfloat16

    def target_maps(self):
        return self.job.target_maps()

    def target(self, name, location):
        full = self.job.values(name, 0, math.prod(self.job.shapes[name]))
        return self.job.target_region(name, location).of(full).to(self.dtype)


class Transfer:
    """A layout's buffers in one kind of memory per side, both trainers' and both targets' in this process."""

    def __init__(self, layout: Masters, source_memory: str, target_memory: str, device: torch.device):
        self._sources = all_placed(layout.sources, source_memory, device)
        self._targets = all_placed(layout.expected, target_memory, device)
        self._expected = layout.expected
        self.moved_bytes = sum(shard.nbytes for shards in self._expected.values() for shard in shards.values())
        here = dict.fromkeys(range(TRAINERS), 0)
        plans = plan_model(layout.target_maps(), zero_maps(layout.job.shapes, TRAINERS))
        self._executor = AffineTransferExecutor(plans,
                                                TransferEndpoints(source=here, target=here),
                                                source_dtype=torch.float32,
                                                dtype=layout.dtype)

    def run(self) -> None:
        self._executor.execute(self._sources, self._targets)

    def spoil_targets(self) -> None:
        for shards in self._targets.values():
            for shard in shards.values():
                shard.fill_(float('nan'))

    def is_right(self) -> bool:
        return all(
            torch.equal(shard.cpu(), self._expected[name][location]) for name, shards in self._targets.items()
            for location, shard in shards.items())


def placed(tensor: torch.Tensor, memory: str, device: torch.device) -> torch.Tensor:
    """A copy of a host tensor in a kind of memory."""
    if memory == 'device':
        return tensor.to(device, copy=True)
    return get_accelerator().pin_memory(tensor.clone()) if memory == 'pinned' else tensor.clone()


def all_placed(shards_by_name: Shards, memory: str, device: torch.device) -> Shards:
    return {
        name: {
            location: placed(shard, memory, device)
            for location, shard in shards.items()
        }
        for name, shards in shards_by_name.items()
    }


def bare_copy(moved_bytes: int, source_memory: str, target_memory: str, device: torch.device) -> Callable[[], object]:
    """One copy of as many bytes, from one piece of memory into another; host memory is always pinned."""
    source, target = (placed(torch.zeros(moved_bytes, dtype=torch.uint8), 'device' if memory == 'device' else 'pinned',
                             device) for memory in (source_memory, target_memory))
    return lambda: target.copy_(source, non_blocking=True)


def seconds_of(function: Callable[[], object]) -> float:
    get_accelerator().synchronize()
    begin = time.perf_counter()
    function()
    get_accelerator().synchronize()
    return time.perf_counter() - begin


def measure(layout: Masters, source_memory: str, target_memory: str, device: torch.device, repeats: int) -> Row:
    transfer = Transfer(layout, source_memory, target_memory, device)
    bare = bare_copy(transfer.moved_bytes, source_memory, target_memory, device)
    # The first call of either makes what the later ones find ready.
    transfer.spoil_targets()
    transfer.run(), bare()
    right = transfer.is_right()
    ours_s, bare_s = [], []
    for _ in range(repeats):
        transfer.spoil_targets()
        ours_s.append(seconds_of(transfer.run))
        bare_s.append(seconds_of(bare))
        right = transfer.is_right() and right
    return {
        'layout': layout.name,
        'source': source_memory,
        'target': target_memory,
        'GiB': transfer.moved_bytes / GIB,
        'ours_ms': 1000 * statistics.median(ours_s),
        'bare_ms': 1000 * statistics.median(bare_s),
        'ours_GiB_per_s': transfer.moved_bytes / GIB / statistics.median(ours_s),
        'bare_GiB_per_s': transfer.moved_bytes / GIB / statistics.median(bare_s),
        'to_bare': statistics.median(theirs / own for own, theirs in zip(ours_s, bare_s)),
        'correct': right,
        'runs': repeats,
        'ours_quartiles_ms': quartiles([1000 * seconds for seconds in ours_s]),
        'bare_quartiles_ms': quartiles([1000 * seconds for seconds in bare_s])
    }


def measure_all(shapes: Mapping[str, tuple], device: torch.device, repeats: int) -> List[Row]:
    """A row per layout and pair of memories, except where both are host memory."""
    return [
        measure(layout, source, target, device, repeats) for layout in (Masters(shapes), Rollout(shapes))
        for source in MEMORIES for target in MEMORIES if 'device' in (source, target)
    ]


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--scale', type=float, default=1.0, help='of the model: 1 has 1 GB of fp32 masters (default)')
    parser.add_argument('--repeats', type=int, default=7, help='of every measurement, the median counts (default: 7)')
    parser.add_argument('--json', type=Path, help='write the rows there')
    options = parser.parse_args(arguments)
    accelerator = get_accelerator()
    if accelerator.device_name() == 'cpu' or not accelerator.is_available():
        print('there is no accelerator here, so nothing was measured', file=sys.stderr)
        return 2
    device = torch.device(accelerator.current_device_name())
    facts: Dict[str, str] = {**machine(), 'device': torch.get_device_module(device).get_device_name(device)}
    print(', '.join(f'{name}: {value}' for name, value in facts.items()))
    rows = measure_all(parameter_shapes(llama_of(options.scale)), device, options.repeats)
    print_table('gpu: later calls of execute beside one bare copy through pinned memory', rows)
    if options.json:
        write_json(options.json, {'gpu': rows}, {'scale': options.scale, 'repeats': options.repeats, **facts})
    return 0 if all(row['correct'] for row in rows) else 1


if __name__ == '__main__':
    sys.exit(main())
