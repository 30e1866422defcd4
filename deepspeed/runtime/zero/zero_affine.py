# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Where a ZeRO engine keeps each parameter's master and optimizer states, and the live tensors themselves.

``ZeroAffineEngineMixin`` is a base class of ``DeepSpeedEngine``. It adds

- ``engine.optimizer_storage_maps()``: for every parameter, which global rank holds which range of it;
- ``engine.optimizer_storage(state)``: this rank's live 1-D views of those ranges;
- ``engine.parameter_storage_maps()`` and ``engine.parameter_storage()``: the same for the low-precision weights that
  the model computes with, frozen ones too, and for an engine without optimizer;
- ``engine.update_lp_params()``: make those weights follow masters that were written.

Every ZeRO stage cuts some flattened space into equal partitions, one per rank. Under stage 3 that space is a single
parameter, under stages 1 and 2 it is a parameter group laid out end to end, with padding at its end and, with
``parameter_alignment``, inside. One description, ``Placement``, serves both. What a rank holds of a parameter is then
a contiguous range of the flattened parameter, kept in one of the flat tensors that the optimizer steps on.

Which engines are served is said in ``zero_affine_support.py``; what DeepSpeed keeps, and where, is read in
``zero_affine_upstream*.py``; who holds experts and tensor parallel shards is derived in ``zero_affine_parallel.py``.
What comes of it for the optimizer is in ``zero_affine_layout.py``, for the weights in ``zero_affine_parameters.py``.
"""

from typing import Dict, Sequence

import torch

from deepspeed.checkpoint.affine import ParamAffineMap, flat_range_map
from deepspeed.runtime.zero.zero_affine_layout import maps_of, read_layout, read_layout_together
from deepspeed.runtime.zero.zero_affine_parameters import (ParameterNotReadyError, read_parameters,
                                                           read_parameters_together, update_parameters_together,
                                                           views_of_parameters)
from deepspeed.runtime.zero.zero_affine_support import (REFUSED_CONFIGURATIONS, REFUSED_ENGINES,
                                                        SUPPORTED_CONFIGURATIONS, SUPPORTED_WITHOUT_OPTIMIZER,
                                                        RefusedConfiguration, SupportedConfiguration,
                                                        UnsupportedEngineError, refuse_unsupported,
                                                        refuse_unsupported_parameters)
from deepspeed.runtime.zero.zero_affine_upstream import MASTER_STATE, OptimizerStateNotReadyError, state_tensors

__all__ = [
    'OptimizerStateNotReadyError', 'ParameterNotReadyError', 'REFUSED_CONFIGURATIONS', 'REFUSED_ENGINES',
    'RefusedConfiguration', 'SUPPORTED_CONFIGURATIONS', 'SUPPORTED_WITHOUT_OPTIMIZER', 'SupportedConfiguration',
    'UnsupportedEngineError', 'ZeroAffineEngineMixin', 'zero_storage_affine_map'
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
    """What ``DeepSpeedEngine`` says about where its optimizer's storage and its model's weights live."""

    def optimizer_storage_maps(self) -> Dict[str, ParamAffineMap]:
        """Where the master and the states of each parameter that the optimizer owns live.

        The keys are names of ``engine.module.named_parameters()``, in that order: frozen parameters and those
        without elements are left out, a tied weight appears under its first name. Experts of ``deepspeed.moe`` have
        the numbers that they have in the whole job, as in DeepSpeed's checkpoints: every rank returns all of them, and
        ``deepspeed_experts.5.weight`` is the same expert everywhere. AutoTP keeps the names of a model; AutoEP makes
        one parameter of all experts of a layer.

        Each map has the parameter's full shape as logical shape, all shards of AutoTP and all experts of AutoEP
        included, the global ranks of the engine's world as locations, and as shard of a location the 1-D elements
        that rank holds, without padding; a rank that holds nothing of a parameter is not in its map. What each tensor
        parallel rank keeps a copy of has several ranks as ``locations`` of a piece. The master and every per-element
        state of a parameter are laid out alike, so one map serves them all.

        Every rank must make the first call, which compares a digest of the layout in one collective of 16 bytes per
        rank and moves nothing else; later calls communicate nothing. Needs no optimizer step. Raises
        UnsupportedEngineError on every rank: before that collective for what REFUSED_CONFIGURATIONS, REFUSED_ENGINES
        and SUPPORTED_CONFIGURATIONS exclude, after it, by name, for a parameter whose shards nobody describes; and
        RuntimeError on every rank if the ranks do not describe the same layout. All ranks return equal maps. They are
        kept, and parameters that are laid out alike share one: do not change them.
        """
        maps = vars(self).get('_optimizer_storage_maps')
        if maps is None:
            refuse_unsupported(self)
            layout = read_layout_together(self)
            maps = self._optimizer_storage_maps = maps_of(layout.spreads)
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

    def parameter_storage_maps(self) -> Dict[str, ParamAffineMap]:
        """Where the low-precision weights of the model live: trained and frozen parameters, with elements or without.

        Keys, logical shapes and locations are those of ``optimizer_storage_maps()``, for all parameters of
        ``engine.module``. Under stage 3 the shard of a location is the 1-D elements of its partition, without padding,
        and a rank that holds nothing of a parameter is not in its map; it is so whether the parameter is partitioned
        or gathered just now, and whatever secondary partitions (hpZ) there are: these are copies. Under stages 1 and 2
        each rank that has the parameter holds it whole, or its shard of AutoTP and AutoEP whole, in its own shape.

        Every rank must make the first call, which compares a digest of the layout in one collective of 16 bytes per
        rank; later calls communicate nothing. The engine may lack an optimizer under stage 3 (DeepSpeed builds none
        of stage 1 or 2 without). Raises UnsupportedEngineError on every rank for what the maps of the optimizer
        refuse, and RuntimeError on every rank if the ranks do not describe the same layout or,
        under stage 3, a parameter came to the model after ``deepspeed.initialize``. All ranks return equal maps, which
        they keep.
        """
        maps = vars(self).get('_parameter_storage_maps')
        if maps is None:
            refuse_unsupported_parameters(self)
            layout = read_parameters_together(self)
            maps = self._parameter_storage_maps = maps_of(layout.spreads)
            self._parameter_storage_layout = layout
        return dict(maps)

    def parameter_storage(self) -> Dict[str, torch.Tensor]:
        """This rank's live views of the low-precision weights.

        The keys are those of ``parameter_storage_maps()``; each value has the shape of this rank's shard there, the
        parameter's own under stages 1 and 2, and is 1-D of 0 elements where the rank holds nothing. Dtype and device
        are those in which DeepSpeed keeps the weight: host memory with ``offload_param`` and while ``offload_states``
        has the weights. Nothing is copied, nothing is gathered. Where weights are fp32 a view may be the same memory
        as the master.

        A write into a view is what the next forward pass reads, except where DeepSpeed keeps a gathered copy under
        stage 3: of parameters up to ``stage3_param_persistence_threshold``, and with hpZ of all; call
        ``update_lp_params()`` after writing and it is read there too. Both that call and the next step give trained
        parameters the values of their masters: change those through ``optimizer_storage()``. Inside
        ``deepspeed.zero.GatheredParameters`` a view shows the values from before it, and what is written into the view
        of a gathered parameter is lost when the context ends with a ``modifier_rank``. Views stay live over steps,
        until ``destroy``, ``offload_states``, ``reload_states`` or ``load_checkpoint``; then ask again.

        Local to the calling rank. Raises UnsupportedEngineError as the maps do, and ParameterNotReadyError for a
        parameter that the model no longer has, or has in another shape than when it was first asked for: it was
        replaced, or its data by a placeholder.
        """
        layout = vars(self).get('_parameter_storage_layout')
        if layout is None:
            refuse_unsupported_parameters(self)
            layout = self._parameter_storage_layout = read_parameters(self)
        return views_of_parameters(self, layout)

    def update_lp_params(self) -> None:
        """Refresh the low-precision weights after masters were written through ``optimizer_storage()``.

        Afterwards every trained parameter equals ``master.to(its dtype)`` in every forward pass, training or not, and
        frozen ones the values in ``parameter_storage()``; on an engine without optimizer all do. Gathered copies
        that DeepSpeed keeps under stage 3, persistent parameters and secondary partitions (hpZ), are renewed. (Under
        stage 3 ``torch_autocast`` rounds what it gathers for a forward pass, after this call as after a step.)

        Collective, between steps: not between a forward pass and its backward pass. Raises UnsupportedEngineError as
        the maps do, though not for a single parameter, and ParameterNotReadyError on every rank, before any weight has
        changed, while any rank has the low-precision weights offloaded (``offload_states``) or is inside
        ``deepspeed.zero.GatheredParameters``, and where its model was changed after ``deepspeed.initialize`` so that
        the update would not reach it: data or a trained parameter replaced, or one added under stage 3. Raises
        RuntimeError on every rank if some ask for maps instead.
        """
        refuse_unsupported_parameters(self)
        update_parameters_together(self)
