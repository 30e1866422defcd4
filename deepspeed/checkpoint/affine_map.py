# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The value that says which shard holds which elements of a parameter: ``ParamAffineMap`` and its pieces.

Offsets and strides are in elements. See ``affine.py`` for the builders.
"""

import math
from dataclasses import dataclass
from typing import Any, Dict, FrozenSet, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch

from .affine_pieces import (RankIdError, ShardSizeError, UnreadablePieceError, check_coverage, check_ranks,
                            check_shards, element_offsets, holders_by_offset, piece_columns, piece_table,
                            uncovered_offsets)

__all__ = ['AFFINE_MAP_FORMAT_VERSION', 'SCALE_POWER_BY_STATE', 'AffinePiece', 'ParamAffineMap']

# Version of the dictionary form below; a reader refuses a newer one.
AFFINE_MAP_FORMAT_VERSION = 1

# Power of a piece's scale that applies to each state. Where a shard holds s * w, its gradient is 1/s of that of w,
# so Adam's first moment scales by 1/s and its second by 1/s^2.
SCALE_POWER_BY_STATE = {'fp32': 1, 'exp_avg': -1, 'exp_avg_sq': -2}

Shape = Tuple[int, ...]


@dataclass(frozen=True)
class AffinePiece:
    """A box of elements, where it sits in the full row-major tensor and where in the shard that holds it.

    ``shape`` is common to both sides. Offsets and strides are in elements and are the arguments of
    ``torch.as_strided``: ``source_*`` address the full tensor, ``dest_*`` the shard. ``locations`` are all ranks that
    hold exactly these elements. The shard holds ``full * scale``; a scale of 0, or one that is not finite, raises
    ValueError.
    """
    shape: Shape
    source_offset: int
    source_strides: Shape
    dest_offset: int
    dest_strides: Shape
    locations: FrozenSet[int]
    scale: float = 1.0

    def __post_init__(self):
        for name in ('shape', 'source_strides', 'dest_strides'):
            object.__setattr__(self, name, tuple(map(int, getattr(self, name))))
        for name in ('source_offset', 'dest_offset'):
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, 'locations', frozenset(map(int, self.locations)))
        object.__setattr__(self, 'scale', float(self.scale))
        if self.scale == 0.0 or not math.isfinite(self.scale):
            raise ValueError(f'a piece of scale {self.scale} cannot be scaled back')

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def source_view(self, full_param: torch.Tensor) -> torch.Tensor:
        """The view of the (contiguous) full parameter that this piece stands for."""
        return _strided_view(full_param, self.shape, self.source_strides, self.source_offset)

    def dest_view(self, shard: torch.Tensor) -> torch.Tensor:
        """The view of the (contiguous) shard that this piece stands for."""
        return _strided_view(shard, self.shape, self.dest_strides, self.dest_offset)

    def source_offsets(self) -> Iterator[int]:
        """Flat offset in the full tensor of every element, in row-major order of the piece."""
        return iter(element_offsets(self.shape, self.source_offset, self.source_strides).tolist())


def _strided_view(tensor: torch.Tensor, shape: Shape, strides: Shape, offset: int) -> torch.Tensor:
    # as_strided counts from the start of the storage, a map from the tensor's first element: views share storages.
    return torch.as_strided(tensor, shape, strides, tensor.storage_offset() + offset)


class ParamAffineMap:
    """How one parameter is spread over locations ("ranks"): the pieces that each one's shard is made of.

    ``logical_shape`` is the full parameter's shape, ``shard_shapes`` gives the shape of each rank's shard and
    ``pieces_by_rank`` the list of its AffinePieces. ``rule`` names the layout's rule where more than one is in use
    under one name, so that two ends that mean different ones are not planned together. Maps compare by value.
    """

    def __init__(self,
                 logical_shape: Sequence[int],
                 shard_shapes: Mapping[int, Sequence[int]],
                 pieces_by_rank: Mapping[int, Sequence[AffinePiece]],
                 rule: Optional[str] = None):
        self.logical_shape = tuple(map(int, logical_shape))
        self.shard_shapes = {int(rank): tuple(map(int, shape)) for rank, shape in shard_shapes.items()}
        self.pieces_by_rank = {int(rank): list(pieces) for rank, pieces in pieces_by_rank.items()}
        for rank in self.shard_shapes:
            self.pieces_by_rank.setdefault(rank, [])
        self.rule = rule

    @property
    def numel(self) -> int:
        return math.prod(self.logical_shape)

    def uncovered_offsets(self) -> List[int]:
        """Flat offsets, ascending, of the elements that no rank holds; [] where the parameter can be rebuilt."""
        return uncovered_offsets(self.logical_shape, self.pieces_by_rank)

    def holders(self) -> Dict[int, set]:
        """For the flat offset of every held element, the set of ranks holding it. One entry per element."""
        return holders_by_offset(self.logical_shape, self.pieces_by_rank)

    def validate(self) -> None:
        """Check that each rank's pieces fill its shard exactly.

        Raises ShardSizeError, OutOfBoundsError, OverlapError or RankIdError (all ValueError). Cost follows the number
        of pieces.
        """
        check_shards(self.shard_shapes, self.pieces_by_rank, piece_columns(self.pieces_by_rank))

    def validate_coverage(self) -> None:
        """``validate``, and: every element is held, and each piece's ``locations`` are exactly its holders.

        Raises CoverageError or HolderError (ValueError, and AssertionError as well) besides. Cost follows the number
        of pieces; pieces that are not boxes of the full tensor are walked element by element up to a size of
        2**24 elements and refused with UnreadablePieceError above it.
        """
        columns = piece_columns(self.pieces_by_rank)
        check_shards(self.shard_shapes, self.pieces_by_rank, columns)
        check_coverage(self.logical_shape, self.pieces_by_rank, columns)

    def rebuild(self, shards: Mapping[int, torch.Tensor], scale_power: int = 1) -> torch.Tensor:
        """The full parameter, put together from ``shards`` (rank -> tensor with its shard's number of elements).

        A shard holds ``full * scale ** scale_power``: 1 for a parameter, SCALE_POWER_BY_STATE for optimizer states.
        Raises ValueError for a wrong shard size or replicas that differ, NotImplementedError for an optimizer state
        under a scale, because lr and eps would have to be rescaled with it.
        """
        self.validate()
        self._refuse_scaled_state(scale_power)
        flat_shards = self._flat_shards(shards)
        any_shard = next(iter(shards.values()))
        full = torch.empty(self.numel, dtype=any_shard.dtype, device=any_shard.device)
        # Most maps hold each element once; only where some do not has what was written to be remembered.
        written = torch.zeros(self.numel, dtype=torch.bool, device=full.device) if self._has_replicas() else None
        for rank, pieces in self.pieces_by_rank.items():
            for piece in pieces:
                if piece.numel:
                    value = piece.dest_view(flat_shards[rank]).to(full.device)
                    value = value if piece.scale == 1.0 else value / piece.scale**scale_power
                    if written is not None:
                        _check_agreement(rank, piece, value, full, written)
                    piece.source_view(full).copy_(value)
        return full.view(self.logical_shape)

    def _flat_shards(self, shards):
        for rank, pieces in self.pieces_by_rank.items():
            if pieces and rank not in shards:
                raise RankIdError(f'rank {rank}: no shard was given; shards came for {sorted(shards)}')
        for rank, shard in shards.items():
            if rank not in self.shard_shapes:
                raise RankIdError(f'rank {rank}: the map knows no such rank, only {sorted(self.shard_shapes)}')
            if shard.numel() != math.prod(self.shard_shapes[rank]):
                raise ShardSizeError(f'rank {rank}: got a shard of {shard.numel()} elements, expected shape '
                                     f'{self.shard_shapes[rank]}')
        if not shards:
            raise RankIdError('no shard was given, so the dtype and device of the parameter are not known')
        return {rank: shard.reshape(-1) for rank, shard in shards.items()}

    def _has_replicas(self) -> bool:
        """Whether some element is held more than once, or that cannot be told from boxes."""
        try:
            boxes = piece_table(piece_columns(self.pieces_by_rank), self.logical_shape).boxes
        except UnreadablePieceError:
            return True
        return boxes.first_overlap() is not None

    def _refuse_scaled_state(self, scale_power):
        if scale_power == 1:
            return
        for rank, pieces in self.pieces_by_rank.items():
            for piece in pieces:
                if piece.scale != 1.0:
                    raise NotImplementedError(f'rank {rank}: {piece} is scaled. An optimizer state cannot pass a '
                                              'scale unless the learning rate and eps are rescaled with it, which a '
                                              'map of geometry does not do.')

    def extract(self, full_param: torch.Tensor, rank: int, scale_power: int = 1) -> torch.Tensor:
        """The shard of ``rank`` as a new tensor, cut from the full parameter."""
        self._refuse_scaled_state(scale_power)
        if rank not in self.shard_shapes:
            raise RankIdError(f'rank {rank}: the map knows no such rank, only {sorted(self.shard_shapes)}')
        if full_param.numel() != self.numel:
            raise ShardSizeError(f'got a full parameter of {full_param.numel()} elements, expected shape '
                                 f'{self.logical_shape}')
        flat = full_param.reshape(-1)
        shard = torch.empty(math.prod(self.shard_shapes[rank]), dtype=full_param.dtype, device=full_param.device)
        for piece in self.pieces_by_rank[rank]:
            if piece.numel:
                held = piece.dest_view(shard).copy_(piece.source_view(flat))
                if piece.scale != 1.0:
                    held *= piece.scale**scale_power  # in place, so that integers are refused and not cut
        return shard.view(self.shard_shapes[rank])

    def to_dict(self) -> Dict[str, Any]:
        """Plain scalars, lists and dicts, of AFFINE_MAP_FORMAT_VERSION. JSON turns the rank keys into strings.

        Raises RankIdError where a rank has pieces but no shard shape.
        """
        check_ranks(self.shard_shapes, self.pieces_by_rank)
        entry: Dict[str, Any] = {
            'logical_shape': list(self.logical_shape),
            'ranks': {
                rank: {
                    'shard_shape': list(self.shard_shapes[rank]),
                    'pieces': [_piece_to_dict(piece) for piece in self.pieces_by_rank[rank]]
                }
                for rank in sorted(self.shard_shapes)
            }
        }
        return entry if self.rule is None else {**entry, 'rule': self.rule}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> 'ParamAffineMap':
        """The map that ``to_dict`` wrote, also after a trip through JSON."""
        ranks = {int(rank): value for rank, value in entry['ranks'].items()}
        return cls(entry['logical_shape'], {
            rank: value['shard_shape']
            for rank, value in ranks.items()
        }, {
            rank: [_piece_from_dict(piece) for piece in value['pieces']]
            for rank, value in ranks.items()
        },
                   rule=entry.get('rule'))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ParamAffineMap):
            return NotImplemented
        return (self.logical_shape == other.logical_shape and self.shard_shapes == other.shard_shapes
                and self.pieces_by_rank == other.pieces_by_rank and self.rule == other.rule)

    def __hash__(self) -> int:
        # Cheap rather than exact: a model's maps are hashed for every parameter, and few of one shape differ.
        return hash((self.logical_shape, len(self.shard_shapes)))

    def __repr__(self) -> str:
        counts = {rank: len(pieces) for rank, pieces in sorted(self.pieces_by_rank.items())}
        return f'ParamAffineMap(logical_shape={self.logical_shape}, pieces_per_rank={counts})'


def _check_agreement(rank, piece, value, full, written) -> None:
    """What was written of this piece before must be the same, bit for bit or NaN; marks the piece as written."""
    target, seen = piece.source_view(full), piece.source_view(written)
    if seen.all() and torch.equal(target, value):
        return
    differs = seen & (target != value) & ~((target != target) & (value != value))
    if differs.any():
        where = tuple(differs.nonzero()[0].tolist())
        raise ValueError(f'rank {rank}: its replica of {piece} differs from that of another holder, first at index '
                         f'{where} of the piece')
    seen.fill_(True)


def _piece_to_dict(piece: AffinePiece) -> Dict[str, Any]:
    entry = {
        'shape': list(piece.shape),
        'source': [piece.source_offset, list(piece.source_strides)],
        'dest': [piece.dest_offset, list(piece.dest_strides)],
        'locations': sorted(piece.locations)
    }
    return entry if piece.scale == 1.0 else {**entry, 'scale': piece.scale}


def _piece_from_dict(entry: Mapping[str, Any]) -> AffinePiece:
    return AffinePiece(entry['shape'], *entry['source'], *entry['dest'], entry['locations'], entry.get('scale', 1.0))
