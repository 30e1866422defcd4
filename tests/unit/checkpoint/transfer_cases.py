# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Random layouts, guarded buffers and an oracle for the executor's tests.

The oracle shares no code with planner and executor: a full parameter's values are spread over a shard by NumPy, piece
by piece as a map's definition says, and every element of every target is compared, with guard bands around buffers.
"""

import numpy
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.affine import contiguous_split_map, flat_range_map, replicated_map
from deepspeed.checkpoint.affine_transfer import TransferPlan, TransferSegment, plan_model
from deepspeed.checkpoint.affine_transfer_executor import AffineTransferExecutor, StagingBudget, TransferEndpoints

# The kinds of memory that a buffer may lie in.
KINDS = ('pageable', 'pinned', 'device')
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
    """A tensor of one shard amid elements that nobody may touch, all of them where ``move`` puts them."""

    def __init__(self, shape, dtype, layout, values=None, move=lambda base: base):
        shape = tuple(shape)
        before, after = (1, 2) if layout == 'window' and shape else (0, 0)
        wide = shape[:-1] + (shape[-1] + before + after, ) if shape else shape
        if layout == 'transposed':
            wide = tuple(reversed(wide))
        numel = int(numpy.prod(wide))

        def view(base):
            inner = base[GUARD:GUARD + numel].view(wide)
            if layout == 'transposed':
                return inner.permute(tuple(reversed(range(len(wide)))))
            if layout == 'flat':
                return inner.view(-1)
            return inner[..., before:inner.shape[-1] - after] if before else inner

        base = torch.full((numel + 2 * GUARD, ), UNWRITTEN[dtype], dtype=dtype)
        if values is not None:
            view(base).copy_(values.view(view(base).shape))
        self._view = view
        self.base = move(base)
        self.tensor = view(self.base)

    def check(self, expected):
        """Compare every element with ``expected`` (NaN equals NaN), and every guard element with its first value."""
        base = self.base.cpu()
        torch.testing.assert_close(self._view(base).reshape(expected.shape), expected, rtol=0, atol=0, equal_nan=True)
        is_mine = torch.zeros(base.shape, dtype=torch.bool)
        self._view(is_mine).fill_(True)
        guards = base[~is_mine]
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


class RandomTransfer:
    """A few parameters between random layouts over ``size`` ranks; equal for equal seeds."""

    def __init__(self, seed, size):
        self._rng = rng = numpy.random.default_rng(seed)
        self.source_dtype, self.dtype = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16),
                                         (torch.bfloat16, torch.float32), (torch.int32, torch.int32)][rng.integers(4)]
        self.budget = StagingBudget(int(rng.choice([4, 7, 36, 200, 1 << 20])), int(rng.choice([1, 2, 16])))
        self.alone_bytes = {ends: int(rng.choice([1, 24, 1 << 19])) for ends in (1, 2)}
        counts = [int(count) for count in rng.integers(1, 5, size=2)]
        self.ranks = [{place: int(rng.integers(size)) for place in range(count)} for count in counts]
        self.maps, self._fulls = ({}, {}), {}
        for name in ('embed', 'w', 'up', 'bias')[:rng.integers(1, 5)]:
            shape = random_shape(rng)
            for side, count in zip(self.maps, counts):
                side[name] = random_map(rng, shape, count)
            self._fulls[name] = torch.as_tensor(rng.integers(0, 200, size=shape))
        self._is_cut = rng.random() < 0.5
        self._layouts = [{
            (name, place): str(rng.choice(LAYOUTS))
            for name in self._fulls
            for place in range(count)
        } for count in counts]

    def executor(self, rank, group):
        """The executor of ``rank``, with a plan of the whole transfer or of this rank's part."""
        mine = [[place for place, owner in side.items() if owner == rank] for side in self.ranks]
        cut = dict(source_ranks=mine[0], target_ranks=mine[1]) if self._is_cut or rank % 2 else {}
        return AffineTransferExecutor(plan_model(self.maps[1], self.maps[0], **cut),
                                      TransferEndpoints(*self.ranks),
                                      dtype=self.dtype,
                                      source_dtype=self.source_dtype,
                                      budget=self.budget,
                                      group=group)

    def buffers(self, rank, step=0, move=lambda base, side: base):
        """The sources of ``rank`` with the values of this step, and its targets: {(name, location): GuardedBuffer}.

        ``move`` gets a buffer's elements and 'source' or 'target', and returns where they are to lie.
        """
        sources = self._guarded(0, rank, self.source_dtype, lambda base: move(base, 'source'), step)
        return sources, self._guarded(1, rank, self.dtype, lambda base: move(base, 'target'))

    def _guarded(self, side, rank, dtype, move, step=None):
        return {
            (name, place):
            GuardedBuffer(map_.shard_shapes[place], dtype, self._layouts[side][name, place],
                          None if step is None else self._shard(0, name, place, step, dtype), move)
            for name, map_ in self.maps[side].items()
            for place, owner in self.ranks[side].items() if owner == rank and numpy.prod(map_.shard_shapes[place])
        }

    def _shard(self, side, name, place, step, dtype):
        """What a shard of either side holds after the values of a step have arrived there."""
        full = (self._fulls[name] + step) / (1 if self.source_dtype == torch.int32 else 7)
        values = full.to(self.source_dtype).to(dtype).double().numpy()
        return torch.from_numpy(oracle_shard(self.maps[side][name], place, values)).to(dtype)

    def check(self, targets, step=0):
        for (name, place), guarded in targets.items():
            guarded.check(self._shard(1, name, place, step, self.dtype))


def tensors_of(guarded):
    """{(name, location): GuardedBuffer} as the executor takes them."""
    tensors = {}
    for (name, place), buffer in guarded.items():
        tensors.setdefault(name, {})[place] = buffer.tensor
    return tensors


def put(base, kind):
    """The elements of a host tensor in memory of this kind."""
    if kind == 'device':
        return base.to(get_accelerator().current_device_name())
    return get_accelerator().pin_memory(base) if kind == 'pinned' else base


class Placed:
    """The buffers of one rank, of kinds that ``kind_of`` chooses per side, in use before and after an execute."""

    def __init__(self, transfer, rank, kind_of):
        self.transfer, self.rank = transfer, rank
        self.sources, self.targets = transfer.buffers(rank, move=lambda base, side: put(base, kind_of(side)))
        self.in_use = None
        self.other_stream = get_accelerator().Stream()

    def write_sources_late(self, step):
        """Let the current stream bring this step's values into device sources, and read device targets.

        What that takes is kept, so that no memory becomes free meanwhile.
        """
        fresh, _ = self.transfer.buffers(self.rank, step, lambda base, side: put(base, 'pinned'))
        for key, guarded in self.sources.items():
            guarded.base.copy_(fresh[key].base, non_blocking=not guarded.base.is_cpu)
        read = [
            torch.empty_like(guarded.base).copy_(guarded.base) for guarded in self.targets.values()
            if not guarded.base.is_cpu
        ]
        self.in_use = (fresh, read)

    def use_at_once(self):
        """Overwrite sources and read targets, those on the device through a stream that nothing else was asked of."""
        with get_accelerator().stream(self.other_stream):
            for guarded in self.sources.values():
                guarded.base.fill_(3)
            for guarded in self.targets.values():
                torch.empty_like(guarded.base).copy_(guarded.base)
        self.other_stream.synchronize()
