# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Upstream's planner, unmodified, and whether its plans and ours move the same elements."""

import hashlib
import os
import re
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = 'deepspeed_upstream'
MODULES = ('affine', 'affine_transfer')

# Elements whose addresses are worked out together.
_ELEMENTS_PER_BLOCK = 1 << 22


class UpstreamMissing(Exception):
    """Neither DS_UPSTREAM nor build/ has the pinned release."""


class Upstream:
    """The two modules of the pinned release, and its planner without its limits."""

    def __init__(self):
        """Raises UpstreamMissing where the release is not at hand."""
        texts = _release_texts()
        # The modules import one another relatively, so a package of another name is all it takes.
        package = ModuleType(PACKAGE)
        package.__path__ = []
        sys.modules[PACKAGE] = package
        for name, text in zip(MODULES, texts):
            module = ModuleType(f'{PACKAGE}.{name}')
            sys.modules[module.__name__] = module
            exec(compile(text, f'{PACKAGE}/{name}.py', 'exec'), module.__dict__)
            setattr(self, name, module)
        limits = self.affine_transfer.PlanBudget
        unlimited = dict.fromkeys(limits.__dataclass_fields__, 1 << 62)
        # This one is a number of passes that are made, not a limit.
        self._limits = limits(**{**unlimited, 'max_merge_passes': limits.max_merge_passes})

    def map_of(self, ours) -> Any:
        return self.affine.ParamAffineMap.from_dict(ours.to_dict())

    def plan(self, target_map, source_map) -> Any:
        return self.affine_transfer.plan_transfer(target_map, source_map, self._limits)


def _release_texts() -> List[bytes]:
    pin = Path(ROOT, 'requirements', 'upstream.txt').read_text()
    version = re.search(r'^deepspeed==([\w.]+)', pin, re.MULTILINE).group(1)
    release = Path(os.environ.get('DS_UPSTREAM') or ROOT / 'build' / f'deepspeed-{version}.tar.gz')
    files = [f'deepspeed/checkpoint/{name}.py' for name in MODULES]
    if release.is_dir():
        return [Path(release, file).read_bytes() for file in files]
    if not release.is_file() or hashlib.sha256(release.read_bytes()).hexdigest() not in pin:
        raise UpstreamMissing(f'{release.name} is not there or not the pinned release: build the fork in this '
                              f'checkout, or set DS_UPSTREAM to the sdist of deepspeed {version}')
    with tarfile.open(release) as archive:
        return [archive.extractfile(f'deepspeed-{version}/{file}').read() for file in files]


def sources_of_elements(segments: Iterable, source_map, target_map) -> Optional[np.ndarray]:
    """Which source element each target element is copied from: what a plan does, whatever segments it does it with.

    The elements of all shards of a side are numbered one after another, by rank. int64, of the number of all target
    elements; None where an element is written twice or not at all.
    """
    source_base, _ = _first_elements(source_map.shard_shapes)
    target_base, target_numel = _first_elements(target_map.shard_shapes)
    result = np.full(target_numel, -1, dtype=np.int64)
    writes = 0
    for shape, (sources, targets) in _by_shape(segments, source_base, target_base).items():
        rows = max(1, _ELEMENTS_PER_BLOCK // max(int(np.prod(shape)), 1))
        for begin in range(0, len(sources), rows):
            read, written = (_addresses(shape, ends[begin:begin + rows]) for ends in (sources, targets))
            result[written] = read
            writes += read.size
    return result if writes == target_numel and (result >= 0).all() else None


def _first_elements(shard_shapes: Mapping[int, Tuple[int, ...]]) -> Tuple[Dict[int, int], int]:
    first, total = {}, 0
    for rank in sorted(shard_shapes):
        first[rank] = total
        total += int(np.prod(shard_shapes[rank]))
    return first, total


def _by_shape(segments, source_base, target_base) -> Dict[Tuple[int, ...], Tuple[np.ndarray, np.ndarray]]:
    """For each shape, the segments of that shape: their first element and their strides on each side, as rows."""
    groups: Dict[Tuple[int, ...], Tuple[List, List]] = {}
    for segment in segments:
        sources, targets = groups.setdefault(segment.shape, ([], []))
        sources.append((source_base[segment.source_rank] + segment.source_offset, *segment.source_strides))
        targets.append((target_base[segment.target_rank] + segment.target_offset, *segment.target_strides))
    return {shape: (np.array(sources), np.array(targets)) for shape, (sources, targets) in groups.items()}


def _addresses(shape, ends: np.ndarray) -> np.ndarray:
    addresses = ends[:, 0].reshape((-1, ) + (1, ) * len(shape))
    for dim, size in enumerate(shape):
        along = np.arange(size) * ends[:, dim + 1, None]
        addresses = addresses + along.reshape((-1, ) + (1, ) * dim + (size, ) + (1, ) * (len(shape) - dim - 1))
    return addresses.reshape(-1)
