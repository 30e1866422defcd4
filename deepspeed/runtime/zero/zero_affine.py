# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where a ZeRO engine keeps each parameter's master and optimizer states, and the live tensors themselves.

``ZeroAffineEngineMixin`` is a base class of ``DeepSpeedEngine``. It adds

- ``engine.optimizer_storage_maps()``: for every parameter, which global rank holds which range of it;
- ``engine.optimizer_storage(state)``: this rank's live 1-D views of those ranges.

Every ZeRO stage cuts some flattened space into equal partitions, one per rank. Under stage 3 that space is a single
parameter, under stages 1 and 2 it is a parameter group laid out end to end, with padding at its end and, with
``parameter_alignment``, inside. One description, ``Placement``, serves both. What a rank holds of a parameter is then
a contiguous range of the flattened parameter, kept in one of the flat tensors that the optimizer steps on.

Which engines are served is said in ``zero_affine_support.py``; what DeepSpeed keeps, and where, is read in
``zero_affine_upstream.py``; both become maps in ``zero_affine_layout.py``.
"""

from typing import Dict, Sequence

import torch

from deepspeed.checkpoint.affine import ParamAffineMap, flat_range_map
from deepspeed.runtime.zero.zero_affine_layout import maps_of, read_layout, read_layout_together
from deepspeed.runtime.zero.zero_affine_support import (REFUSED_CONFIGURATIONS, REFUSED_ENGINES,
                                                        SUPPORTED_CONFIGURATIONS, RefusedConfiguration,
                                                        SupportedConfiguration, UnsupportedEngineError,
                                                        refuse_unsupported)
from deepspeed.runtime.zero.zero_affine_upstream import MASTER_STATE, OptimizerStateNotReadyError, state_tensors

__all__ = [
    'OptimizerStateNotReadyError', 'REFUSED_CONFIGURATIONS', 'REFUSED_ENGINES', 'RefusedConfiguration',
    'SUPPORTED_CONFIGURATIONS', 'SupportedConfiguration', 'UnsupportedEngineError', 'ZeroAffineEngineMixin',
    'zero_storage_affine_map'
]


def zero_storage_affine_map(numel: int, ranks: Sequence[int]) -> ParamAffineMap:
    """The map of one flattened parameter of ``numel`` elements that ZeRO-3 partitions over ``ranks``.

    Rank ``ranks[i]`` holds a 1-D shard, the elements ``[i * k, (i + 1) * k)`` that exist, where
    ``k = ceil(numel / len(ranks))``. The padding that ZeRO-3 adds to the last partitions is not part of the map, and
    a partition that holds nothing is listed as an empty shard. 5 elements on ranks 0, 1, 2, 3 (k = 2):

        rank 0: [0, 1]   rank 1: [2, 3]   rank 2: [4]   rank 3: []

    A pure function: needs no process group. Raises ValueError for a negative size and for ranks that are absent,
    negative or repeated.
    """
    if numel < 0:
        raise ValueError(f'a parameter cannot have {numel} elements')
    if not ranks or min(ranks) < 0 or len(set(ranks)) != len(ranks):
        raise ValueError(f'ranks must be distinct and not negative, at least one: got {list(ranks)}')
    partition_numel = -(-numel // len(ranks))  # -(-a // b) == ceil(a / b)
    bounds = [min(index * partition_numel, numel) for index in range(len(ranks) + 1)]
    return flat_range_map((numel, ), {
        rank: (begin, end - begin)
        for rank, begin, end in zip(ranks, bounds, bounds[1:])
    })


class ZeroAffineEngineMixin:
    """What ``DeepSpeedEngine`` says about where its optimizer's storage lives."""

    def optimizer_storage_maps(self) -> Dict[str, ParamAffineMap]:
        """Where the master and the states of each parameter that the optimizer owns live.

        The keys are names of ``engine.module.named_parameters()``, in that order: frozen parameters and those
        without elements are left out, a tied weight appears under its first name. Each map has the parameter's full
        shape as logical shape, the global ranks of the engine's world as locations, and as shard of a location the
        1-D elements that rank holds, without padding; a rank that holds nothing of a parameter is not in its map.
        The master and every per-element state of a parameter are laid out alike, so one map serves them all.

        Every rank must make the first call, which compares a digest of the layout in one collective of 16 bytes per
        rank and moves nothing else; later calls communicate nothing. Needs no optimizer step. Raises
        UnsupportedEngineError on every rank, before that collective, for what REFUSED_CONFIGURATIONS,
        REFUSED_ENGINES and SUPPORTED_CONFIGURATIONS exclude, and RuntimeError on every rank if the ranks do not
        describe the same layout. All ranks return equal maps. They are kept, and parameters that are laid out alike
        share one: do not change them.
        """
        maps = vars(self).get('_optimizer_storage_maps')
        if maps is None:
            refuse_unsupported(self)
            layout = read_layout_together(self)
            maps = self._optimizer_storage_maps = maps_of(layout.placements)
            self._optimizer_storage_layout = layout
        return dict(maps)

    def optimizer_storage(self, state: str = MASTER_STATE) -> Dict[str, torch.Tensor]:
        """This rank's live views of the master or of one state of each parameter that the optimizer owns.

        The keys are those of ``optimizer_storage_maps()``. Each value is a 1-D view of the tensor that the optimizer
        steps on, holding exactly the elements that the map gives this rank (0 elements where it gives none), in the
        dtype and on the device, accelerator or host, where the optimizer keeps them. ``'fp32'`` is the master in the
        dtype it is really kept in; other names are the inner optimizer's own per-element states, such as
        ``exp_avg``, ``momentum_buffer`` or ``sum``. Nothing is copied; what is written into a view is what the next
        step reads. Views stay live over steps, until ``destroy``, ``offload_states``, ``reload_states`` or
        ``load_checkpoint``; after the last three, ask again.

        Local to the calling rank. Raises UnsupportedEngineError as the maps do, OptimizerStateNotReadyError for a
        state that the first step will create, and ValueError, with the names of those it keeps, for a state that this
        optimizer does not keep for every parameter.
        """
        layout = vars(self).get('_optimizer_storage_layout')
        if layout is None:
            refuse_unsupported(self)
            layout = self._optimizer_storage_layout = read_layout(self)
        tensors = state_tensors(self.optimizer, state)
        return {
            name: tensors[flat].detach().narrow(0, offset, numel)
            for name, (flat, offset, numel) in layout.slices.items()
        }
