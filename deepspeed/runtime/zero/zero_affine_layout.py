# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""From what DeepSpeed keeps to ranges of parameters: the layout of an engine's optimizer, read and agreed on."""

import hashlib
import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import deepspeed.comm as dist
from deepspeed.checkpoint.affine import ParamAffineMap, flat_range_map, nest_affine_maps, replicated_map
from deepspeed.runtime.zero.zero_affine_agreement import DIGEST_BYTES, read_together
from deepspeed.runtime.zero.zero_affine_parallel import Counterparts, counterparts_of
from deepspeed.runtime.zero.zero_affine_upstream import (StoredParameter, owned_parameters, parameters_of,
                                                         ranks_of_flats)
from deepspeed.runtime.zero.zero_affine_upstream_parallel import FlatRule, flat_rules, shape_of

__all__ = [
    'Layout', 'Placement', 'Spread', 'digest_of', 'maps_of', 'read_layout', 'read_layout_together', 'spreads_of'
]


class Placement(NamedTuple):
    """Where one parameter lies in a flattened space that is cut into partitions of ``partition_numel`` elements.

    The parameter's flattened elements occupy ``[start, start + numel)`` of that space; ``ranks[i]`` holds partition
    ``i``. For a parameter of 5 elements with ``start=2`` and ``partition_numel=4`` on two ranks, ranks[0] holds its
    elements [0, 1] from element 2 of its partition on, ranks[1] its elements [2, 3, 4] from element 0 on.
    """
    shape: Tuple[int, ...]
    ranks: Tuple[int, ...]
    partition_numel: int
    start: int

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
        if self.start == self.end:
            return {}
        first = self.start // self.partition_numel
        last = (self.end - 1) // self.partition_numel
        return {self.ranks[index]: self.held_range(index) for index in range(first, last + 1)}

    def slice_of(self, rank: int) -> Tuple[int, int]:
        """(offset in its partition, number of elements) of what ``rank`` holds."""
        index = self.ranks.index(rank)
        _, numel = self.held_range(index)
        return (max(self.start - index * self.partition_numel, 0), numel) if numel else (0, 0)

    def to_map(self) -> ParamAffineMap:
        return flat_range_map(self.shape, self.held_ranges())


# The placements of a parameter's counterparts, by its name.
Placements = Dict[str, Tuple[Placement, ...]]


class Spread(NamedTuple):
    """How a parameter is spread: one placement, or one for each of the shards that ``outer`` maps it to."""
    placements: Tuple[Placement, ...]
    outer: Optional[ParamAffineMap]


class Layout(NamedTuple):
    """How the parameter of each key is spread, and where this rank's part lies: (flat, offset, number of elements)."""
    spreads: Dict[str, Spread]
    slices: Dict[str, Tuple[int, int, int]]


class _Member(NamedTuple):
    """A parameter of the optimizer, as the whole job and as this rank know it."""
    counterparts: Counterparts
    stored: StoredParameter
    groups: Tuple[Tuple[int, ...], ...]

    @property
    def own(self) -> int:
        return self.counterparts.own if len(self.groups) > 1 else 0

    @property
    def shapes(self) -> Tuple[Tuple[int, ...], ...]:
        return self.counterparts.shapes if len(self.groups) > 1 else (self.stored.shape, )


def _owned_counterparts(engine: Any) -> List[Counterparts]:
    """Those of the parameters that the optimizer owns on this rank or, where this rank has no element, on another."""
    owned = {id(parameter) for parameter in parameters_of(engine.optimizer)}
    return counterparts_of(engine,
                           [(name, parameter) for name, parameter in engine.module.named_parameters()
                            if id(parameter) in owned or (parameter.requires_grad and 0 in shape_of(parameter))])


def read_layout(engine: Any) -> Layout:
    """The engine's layout, in the order of the keys. Communicates nothing.

    Raises UnsupportedEngineError, on every rank alike, for a parameter whose split nobody describes, and RuntimeError
    for one that the module does not name, that does not fit its partitions, or that lies elsewhere than the rule has
    it by which the places of other shards are derived.
    """
    counterparts = _owned_counterparts(engine)
    stored_by_id = owned_parameters(engine)
    ranks_by_flat = ranks_of_flats(engine.optimizer)
    members = []
    for beside in counterparts:
        stored = stored_by_id.get(id(beside.parameter))
        if stored is not None:
            members.append(_Member(beside, stored, beside.data_parallel_groups(ranks_by_flat[stored.flat])))
    placements_by_name = _placements(members, flat_rules(engine.optimizer))
    for member in members:
        _check_own(member, placements_by_name[member.counterparts.name][member.own])
    spreads = spreads_of([member.counterparts for member in members], placements_by_name)
    slices = _slices(members, placements_by_name)
    return Layout(spreads, {key: slices[key] for key in spreads})


def _placements(members: Sequence[_Member], rules: Sequence[FlatRule]) -> Placements:
    # Parameters that start at one base share a space: all of a group under stages 1 and 2, one alone under stage 3.
    spaces: Dict[Tuple[int, int], List[_Member]] = {}
    for member in members:
        spaces.setdefault((member.stored.flat, member.stored.base), []).append(member)
    placements = {}
    for (flat, _), space in spaces.items():
        if all(len(set(member.shapes)) == 1 for member in space):
            for member in space:
                _, _, partition_numel, start, _, _ = member.stored
                placements[member.counterparts.name] = tuple(
                    Placement(shape, ranks, partition_numel, start)
                    for shape, ranks in zip(member.shapes, member.groups))
        else:
            placements.update(_placements_by_rule(sorted(space, key=lambda member: member.stored.start), rules[flat]))
    return placements


def _placements_by_rule(space: Sequence[_Member], rule: FlatRule) -> Placements:
    """Where shards differ in size, and what follows them starts elsewhere on other tensor parallel ranks."""
    placements: Placements = {member.counterparts.name: () for member in space}
    for i, ranks in enumerate(space[0].groups):
        starts, partition_numel = rule.lay_out([math.prod(member.shapes[i]) for member in space], len(ranks))
        for member, start in zip(space, starts):
            placements[member.counterparts.name] += (Placement(member.shapes[i], ranks, partition_numel, start), )
    return placements


def _check_own(member: _Member, placement: Placement) -> None:
    name, stored = member.counterparts.name, member.stored
    if (placement.shape, placement.partition_numel, placement.start) != (stored.shape, stored.partition_numel,
                                                                         stored.start):
        raise RuntimeError(f'parameter {name} of shape {stored.shape} starts at {stored.start} of partitions of '
                           f'{stored.partition_numel} elements; expected shape {placement.shape} at {placement.start} '
                           f'of {placement.partition_numel}')
    if placement.start < 0 or placement.end > placement.partition_numel * len(placement.ranks):
        raise RuntimeError(f'parameter {name} of shape {placement.shape} starts at {placement.start}, outside '
                           f'{len(placement.ranks)} partitions of {placement.partition_numel} elements')


def spreads_of(parameters: Sequence[Counterparts], placements_by_name: Placements) -> Dict[str, Spread]:
    """How the parameter of each key is spread, in the order of the keys."""
    found = []
    for name, _, place, _, keys, _, outer in parameters:
        placements = placements_by_name[name]
        if len(set(keys)) > 1:
            found += [(place, i, key, Spread((placement, ), None))
                      for i, (key, placement) in enumerate(zip(keys, placements))]
            continue
        if outer is None and len(placements) > 1:
            outer = replicated_map(placements[0].shape, len(placements))
        found.append((place, 0, keys[0], Spread(placements, outer if len(placements) > 1 else None)))
    return {key: spread for _, _, key, spread in sorted(found, key=lambda entry: entry[:2])}


def _slices(members: Sequence[_Member], placements_by_name: Placements) -> Dict[str, Tuple[int, int, int]]:
    rank = dist.get_rank()
    slices = {}
    for member in members:
        flat, base = member.stored.flat, member.stored.base
        # An empty slice of the same flat has the dtype and device of the others.
        slices.update(dict.fromkeys(member.counterparts.keys, (flat, base, 0)))
        offset, numel = placements_by_name[member.counterparts.name][member.own].slice_of(rank)
        slices[member.counterparts.keys[member.counterparts.own]] = (flat, base + offset, numel)
    return slices


def read_layout_together(engine: Any) -> Layout:
    """``read_layout`` on every rank, once all ranks are known to have read the same. One collective.

    Each rank reads where its own elements are and derives where the others' are, so that equal digests prove both.
    """

    def read():
        layout = read_layout(engine)
        return layout, digest_of(layout.spreads)

    return read_together(read, 'optimizer')


def digest_of(spreads: Dict[str, Spread]) -> bytes:
    # The ranks are many and the groups few: each is hashed once, and referred to by its number. So are outer maps.
    number_by_ranks: Dict[Tuple[int, ...], int] = {}
    number_by_outer: Dict[Optional[ParamAffineMap], int] = {None: 0}
    described = [(key, number_by_outer.setdefault(outer, len(number_by_outer)),
                  [placement._replace(ranks=number_by_ranks.setdefault(placement.ranks, len(number_by_ranks)))
                   for placement in placements])
                 for key, (placements, outer) in spreads.items()]  # yapf: disable
    outer_maps = [outer and outer.to_dict() for outer in number_by_outer]
    words = repr((list(number_by_ranks), outer_maps, described))
    return hashlib.blake2b(words.encode(), digest_size=DIGEST_BYTES).digest()


def maps_of(spreads: Dict[str, Spread]) -> Dict[str, ParamAffineMap]:
    # Under stage 3 all parameters of one shape are laid out alike, so a deep model needs few different maps.
    map_by_spread = {spread: _map_of(spread) for spread in set(spreads.values())}
    return {key: map_by_spread[spread] for key, spread in spreads.items()}


def _map_of(spread: Spread) -> ParamAffineMap:
    inner = [placement.to_map() for placement in spread.placements]
    return inner[0] if spread.outer is None else nest_affine_maps(spread.outer, dict(enumerate(inner)))
