# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""From what DeepSpeed keeps to ranges of parameters: the layout of an engine's optimizer, read and agreed on."""

import hashlib
import math
from typing import Any, Dict, NamedTuple, Sequence, Tuple

import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.affine import ParamAffineMap, flat_range_map
from deepspeed.runtime.zero.zero_affine_upstream import ranks_of_flats, stored_parameters

__all__ = ['Layout', 'Placement', 'maps_of', 'read_layout', 'read_layout_together']


class Placement(NamedTuple):
    """Where one parameter lies in a flattened space that is cut into partitions of ``partition_numel`` elements.

    The parameter's flattened elements occupy ``[start, start + numel)`` of that space; ``ranks[i]`` holds partition
    ``i``, whose first element is element ``base`` of its flat tensor number ``flat``. For a parameter of 5 elements
    with ``start=2`` and ``partition_numel=4`` on two ranks, ranks[0] holds its elements [0, 1] from element 2 on,
    ranks[1] its elements [2, 3, 4] from element 0 on.
    """
    name: str
    shape: Tuple[int, ...]
    ranks: Tuple[int, ...]
    partition_numel: int
    start: int
    flat: int
    base: int

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape)

    def held_range(self, index: int) -> Tuple[int, int]:
        """(first element, number of elements) that partition ``index`` holds of the flattened parameter."""
        begin = max(self.start, index * self.partition_numel)
        end = min(self.end, (index + 1) * self.partition_numel)
        return (begin - self.start, end - begin) if begin < end else (0, 0)

    def held_ranges(self) -> Dict[int, Tuple[int, int]]:
        """``held_range`` by global rank, for the ranks that hold something."""
        first = self.start // self.partition_numel
        last = (self.end - 1) // self.partition_numel
        return {self.ranks[index]: self.held_range(index) for index in range(first, last + 1)}

    def slice_of(self, rank: int) -> Tuple[int, int, int]:
        """(flat, offset in it, number of elements) of what ``rank`` holds."""
        index = self.ranks.index(rank)
        offset = self.base + max(self.start - index * self.partition_numel, 0)
        _, numel = self.held_range(index)
        return (self.flat, offset, numel) if numel else (self.flat, 0, 0)


class Layout(NamedTuple):
    """The placements of all parameters, and where this rank's part of each lies: name -> (flat, offset, numel)."""
    placements: Tuple[Placement, ...]
    slices: Dict[str, Tuple[int, int, int]]


def read_layout(engine: Any) -> Layout:
    """The engine's layout in the order of ``named_parameters()``. Communicates nothing.

    Raises RuntimeError for a parameter that the module does not name or that does not fit its partitions.
    """
    stored_by_id = {id(stored.parameter): stored for stored in stored_parameters(engine.optimizer)}
    ranks_by_flat = ranks_of_flats(engine.optimizer)
    placements = []
    for name, parameter in engine.module.named_parameters():
        stored = stored_by_id.pop(id(parameter), None)
        if stored is None:
            continue
        placement = Placement(name, stored.shape, ranks_by_flat[stored.flat], *stored[2:])
        if placement.start < 0 or placement.end > placement.partition_numel * len(placement.ranks):
            raise RuntimeError(f'parameter {name} of shape {placement.shape} starts at {placement.start}, outside '
                               f'{len(placement.ranks)} partitions of {placement.partition_numel} elements')
        placements.append(placement)
    if stored_by_id:
        shapes = [stored.shape for stored in stored_by_id.values()]
        raise RuntimeError(f'the optimizer owns parameters that engine.module does not name, of shapes {shapes}')
    rank = dist.get_rank()
    return Layout(tuple(placements), {placement.name: placement.slice_of(rank) for placement in placements})


def read_layout_together(engine: Any) -> Layout:
    """``read_layout`` on every rank, once all ranks are known to have read the same. One collective.

    A rank that fails takes part in the collective nevertheless, or the others would wait for it.
    """
    failure = layout = None
    digest = bytes(16)
    try:
        layout = read_layout(engine)
        digest = _digest(layout.placements)
    except Exception as error:
        failure = error
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=get_accelerator().current_device_name())
    digests = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, mine)
    if failure is not None:
        raise failure
    digests = [bytes(other.tolist()) for other in digests]
    failed = [rank for rank, other in enumerate(digests) if other == bytes(16)]
    if failed:
        raise RuntimeError(f'optimizer storage maps: ranks {failed} could not read their layout, see their errors')
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise RuntimeError(f'optimizer storage maps: ranks {different} lay out the optimizer differently from rank 0; '
                           'was the model or the order of the parameter groups built differently there?')
    return layout


def _digest(placements: Sequence[Placement]) -> bytes:
    # The ranks are many and the groups few: each is hashed once, and referred to by its number.
    number_by_ranks: Dict[Tuple[int, ...], int] = {}
    numbers = [number_by_ranks.setdefault(placement.ranks, len(number_by_ranks)) for placement in placements]
    described = [placement._replace(ranks=number) for placement, number in zip(placements, numbers)]
    return hashlib.blake2b(repr((list(number_by_ranks), described)).encode(), digest_size=16).digest()


def maps_of(placements: Sequence[Placement]) -> Dict[str, ParamAffineMap]:
    # Under stage 3 all parameters of one shape are laid out alike, so a deep model needs few different maps.
    map_by_layout: Dict[Any, ParamAffineMap] = {}
    maps = {}
    for placement in placements:
        layout = (placement.shape, placement.ranks, placement.partition_numel, placement.start)
        if layout not in map_by_layout:
            map_by_layout[layout] = flat_range_map(placement.shape, placement.held_ranges())
        maps[placement.name] = map_by_layout[layout]
    return maps
