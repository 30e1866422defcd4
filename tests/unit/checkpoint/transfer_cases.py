# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Random layouts, guarded buffers and an oracle for the executor's tests.

The oracle shares no code with planner and executor: a full parameter's values are spread over a shard by NumPy, piece
by piece as a map's definition says, and every element of every target is compared, with guard bands around buffers.
"""

import numpy
import torch

from deepspeed.checkpoint.affine import contiguous_split_map, flat_range_map, replicated_map
from deepspeed.checkpoint.affine_transfer import TransferPlan, TransferSegment

LAYOUTS = ('plain', 'flat', 'window', 'transposed')
GUARD = 5
UNWRITTEN = {torch.float32: float('nan'), torch.bfloat16: float('nan'), torch.float64: float('nan'), torch.int32: -7}


def oracle_shard(map_, location, full):
    """The shard of ``location`` as a NumPy array, by the definition of a map: each piece is two strided views."""
    shard = numpy.full(map_.shard_shapes[location], numpy.nan, dtype=full.dtype)
    for piece in map_.pieces_by_rank[location]:
        for index in numpy.ndindex(*piece.shape):
            source = piece.source_offset + sum(i * s for i, s in zip(index, piece.source_strides))
            dest = piece.dest_offset + sum(i * s for i, s in zip(index, piece.dest_strides))
            shard.reshape(-1)[dest] = full.reshape(-1)[source]
    return shard


class GuardedBuffer:
    """A tensor of one shard amid elements that nobody may touch."""

    def __init__(self, shape, dtype, layout, values=None):
        shape = tuple(shape)
        before, after = (1, 2) if layout == 'window' and shape else (0, 0)
        wide = shape[:-1] + (shape[-1] + before + after, ) if shape else shape
        if layout == 'transposed':
            wide = tuple(reversed(wide))
        numel = int(numpy.prod(wide))
        self.base = torch.full((numel + 2 * GUARD, ), UNWRITTEN[dtype], dtype=dtype)
        self.mine = torch.zeros(numel + 2 * GUARD, dtype=torch.bool)
        self.tensor, mine = (self._view(base, numel, wide, layout, before, after) for base in (self.base, self.mine))
        mine.fill_(True)
        if values is not None:
            self.tensor.copy_(values.view(self.tensor.shape))

    @staticmethod
    def _view(base, numel, wide, layout, before, after):
        view = base[GUARD:GUARD + numel].view(wide)
        if layout == 'transposed':
            return view.permute(tuple(reversed(range(len(wide)))))
        if layout == 'flat':
            return view.view(-1)
        return view[..., before:view.shape[-1] - after] if before else view

    def check(self, expected):
        """Compare every element with ``expected`` (NaN equals NaN), and every guard element with its first value."""
        torch.testing.assert_close(self.tensor.reshape(expected.shape), expected, rtol=0, atol=0, equal_nan=True)
        guards = self.base[~self.mine]
        torch.testing.assert_close(guards, torch.full_like(guards, UNWRITTEN[guards.dtype]), equal_nan=True)


def random_shape(rng, max_numel=400):
    shape = tuple(int(size) for size in rng.integers(0 if rng.random() < 0.1 else 1, 9, size=rng.integers(0, 5)))
    return shape if numpy.prod(shape) <= max_numel else shape[:2]


def random_map(rng, shape, locations):
    """A map over all of ``locations``: split along a dimension or as a flat range, unevenly, or replicated."""
    kind = rng.choice(['split', 'flat', 'replicated'], p=[0.5, 0.4, 0.1])
    if kind == 'split' and shape:
        dim = int(rng.integers(len(shape)))
        return contiguous_split_map(shape, _random_parts(rng, shape[dim], locations), dim)
    if kind == 'replicated':
        return replicated_map(shape, locations)
    sizes = _random_parts(rng, int(numpy.prod(shape)), locations)
    starts = numpy.cumsum([0] + sizes)
    return flat_range_map(shape, {place: (int(starts[place]), size) for place, size in enumerate(sizes)})


def _random_parts(rng, total, parts):
    cuts = sorted(int(cut) for cut in rng.integers(0, total + 1, size=parts - 1))
    return [end - begin for begin, end in zip([0] + cuts, cuts + [total])]


def line_plan(*segments, source_numels=None, target_numels=None):
    """A plan of contiguous runs: each segment is (source location, offset, target location, offset, numel)."""
    made = tuple(
        TransferSegment(source, source_offset, (1, ), target, target_offset, (1, ), (numel, ))
        for source, source_offset, target, target_offset, numel in segments)
    return TransferPlan(made, (sum(segment.numel for segment in made), ),
                        sum(segment.numel for segment in made),
                        None,
                        source_shard_shapes={
                            place: (numel, )
                            for place, numel in (source_numels or {}).items()
                        },
                        target_shard_shapes={
                            place: (numel, )
                            for place, numel in (target_numels or {}).items()
                        })
