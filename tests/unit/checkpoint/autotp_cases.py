# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""AutoTP layers as each rank of a tensor-parallel group builds them, with no group: what they keep and publish.

Every element of a parameter is its flat index, so the shard that a layer cuts tells which elements the rank holds.
"""

import functools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Dict, NamedTuple, Optional, Tuple
from unittest import mock

import torch
from torch import nn

import deepspeed.comm as dist
from deepspeed.checkpoint.affine import ParamAffineMap
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject.layers import (GateUpPack_LinearLayer, HiddenParallelEmbedding, LinearAllreduce,
                                            LinearAllreduceWithReplicatedInput, LinearLayer, LmHeadLinearAllreduce,
                                            SubParamLinearAllreduce, SubParamLinearLayer, VocabParallelEmbedding,
                                            VocabParallelLinear, Yuan_LinearAllreduce, Yuan_LinearLayer,
                                            fused_LinearLayer)
from deepspeed.module_inject.tp_shard import AutoTPMeta
from unit.checkpoint.affine_cases import labels


class Group(NamedTuple):
    """Stands for a tensor-parallel process group, as seen by one of its ranks."""
    size: int
    rank: int


@contextmanager
def stand_in_groups():
    """Within it, a Group answers for its rank and size; no collective is replaced, and none must be called."""
    with mock.patch.multiple(dist,
                             get_rank=lambda group=None: group.rank,
                             get_world_size=lambda group=None: group.size):
        yield


def label(module):
    """The module, each of its parameters holding flat indices."""
    for param in module.parameters():
        param.data = torch.from_numpy(labels(tuple(param.shape))).float()
    return module


def linear(out_features, in_features, bias=True):
    return label(nn.Linear(in_features, out_features, bias=bias))


def embedding(rows, columns):
    return label(nn.Embedding(rows, columns))


def block(class_name):
    """An attention block of the given class: AutoTP tells the layout of a fused weight by the name of its class."""
    module = type(class_name, (nn.Module, ), {})()
    module.attn = nn.Module()
    return module


@dataclass(frozen=True)
class LayerCase:
    """``wrap(module(), group)`` is the layer that a rank builds; ``degrees`` are the group sizes that it takes."""
    module: Callable[[], nn.Module]
    wrap: Callable[[nn.Module, Optional[Group]], nn.Module]
    degrees: Tuple[int, ...] = (1, 2, 3, 4)


def layer_case(layer_class,
               module,
               degrees=(1, 2, 3, 4),
               heads=None,
               grain=1,
               hidden=None,
               query_heads=None,
               **kwargs):
    meta = AutoTPMeta(num_kv_heads=heads, num_attention_heads=query_heads, n_embd=hidden, tp_grain_size=grain)
    return LayerCase(module, lambda built, group: layer_class(built, mp_group=group, tp_meta=meta, **kwargs), degrees)


def fused_case(class_name, rows, columns, bias=True, **kwargs):
    module = block(class_name)
    return layer_case(fused_LinearLayer, lambda: linear(rows, columns, bias), fused_module=module, **kwargs)


def tied_vocab_embedding(module, group):
    head = nn.Linear(*reversed(module.weight.shape), bias=False)
    head.weight = module.weight
    head = VocabParallelLinear(head, mp_group=group, tp_meta=AutoTPMeta())
    return VocabParallelEmbedding(module, mp_group=group, tied_vocab_parallel_linear=head)


def tied_hidden_embedding(module, group):
    head = nn.Linear(*reversed(module.weight.shape), bias=False)
    head.weight = module.weight
    head = LinearAllreduceWithReplicatedInput(head, mp_group=group, tp_meta=AutoTPMeta())
    return HiddenParallelEmbedding(module, mp_group=group, tied_row_parallel_linear=head)


# The sizes make most splits uneven; with two heads, ranks 2 and 3 hold nothing.
LAYER_CASES: Dict[str, LayerCase] = {
    'column':
    layer_case(LinearLayer, lambda: linear(24, 5)),
    'column, near even':
    layer_case(LinearLayer, lambda: linear(11, 3)),
    'column, 5 heads':
    layer_case(LinearLayer, lambda: linear(20, 3), heads=5),
    'column, 2 heads':
    layer_case(LinearLayer, lambda: linear(8, 3), heads=2),
    'column, 5 heads that an mlp ignores':
    layer_case(LinearLayer, lambda: linear(20, 3), heads=5, name='mlp.up'),
    'column, grain 4 and a tail':
    layer_case(LinearLayer, lambda: linear(22, 3), grain=4),
    'column, no bias':
    layer_case(LinearLayer, lambda: linear(9, 4, bias=False)),
    'row':
    layer_case(LinearAllreduce, lambda: linear(5, 24)),
    'row, 5 heads':
    layer_case(LinearAllreduce, lambda: linear(3, 20), heads=5),
    'row, 2 heads':
    layer_case(LinearAllreduce, lambda: linear(3, 8), heads=2),
    'row, grain 4 and a tail':
    layer_case(LinearAllreduce, lambda: linear(3, 22), grain=4),
    'row, whole input':
    layer_case(LinearAllreduceWithReplicatedInput, lambda: linear(4, 10)),
    'row, output head':
    layer_case(LmHeadLinearAllreduce, lambda: linear(7, 10, bias=False), heads=5),
    'vocabulary head':
    layer_case(VocabParallelLinear, lambda: linear(13, 4, bias=False)),
    'vocabulary embedding':
    layer_case(VocabParallelEmbedding, lambda: embedding(13, 4)),
    'vocabulary embedding, tied':
    LayerCase(lambda: embedding(13, 4), tied_vocab_embedding),
    'hidden embedding':
    layer_case(HiddenParallelEmbedding, lambda: embedding(6, 10)),
    'hidden embedding, tied':
    LayerCase(lambda: embedding(6, 10), tied_hidden_embedding),
    'fused bloom':
    fused_case('BloomBlock', 60, 4, heads=5),
    'fused falcon':
    fused_case('FalconDecoderLayer', 36, 4, heads=3),
    'fused of an unknown class':
    fused_case('NewBlock', 33, 4),
    'fused glm':
    fused_case('GLMBlock', 60, 4, heads=5),
    'fused mpt':
    fused_case('MptBlock', 36, 4, bias=False, heads=3),
    'fused baichuan':
    fused_case('BaichuanLayer', 48, 4, heads=4),
    'fused chatglm2':
    fused_case('GLMBlock', 24, 4, heads=2, hidden=16),
    'fused qwen':
    fused_case('QWenBlock', 60, 4, heads=5),
    'fused phi3':
    fused_case('Phi3DecoderLayer', 40, 20, heads=5, query_heads=10),
    'fused bigcode':
    fused_case('GPTBigCodeBlock', 28, 4, heads=5, hidden=20),
    # AutoTP cuts a CodeGen weight only for 2 ranks or more, by its matrix form: a bias has none.
    'fused codegen':
    fused_case('CodeGenBlock', 144, 2, bias=False, heads=48, degrees=(2, 3, 4)),
    'gate and up':
    layer_case(GateUpPack_LinearLayer, lambda: linear(22, 3)),
    'gate and up, grain 4':
    layer_case(GateUpPack_LinearLayer, lambda: linear(44, 3), grain=4),
    'yuan column':
    layer_case(Yuan_LinearLayer, lambda: linear(48, 3), heads=24),
    # Upstream cannot build the row layer with a bias.
    'yuan row':
    layer_case(Yuan_LinearAllreduce, lambda: linear(3, 48, bias=False), heads=24),
    'sub-parameters by count':
    layer_case(SubParamLinearLayer, lambda: linear(30, 4), shape=(3, -1)),
    'sub-parameters by size':
    layer_case(SubParamLinearLayer, lambda: linear(40, 3), heads=5, shape=((20, 10, 10), -1)),
    'sub-parameters, fewer heads than ranks':
    layer_case(SubParamLinearLayer, lambda: linear(16, 3), heads=2, shape=((8, 4, 4), -1)),
    'sub-parameters in a 3-d view':
    layer_case(SubParamLinearLayer, lambda: linear(50, 3), shape=(5, (6, 4), 3), partition_dim=1),
    'one sub-parameter in a 3-d view':
    layer_case(SubParamLinearLayer, lambda: linear(35, 3), shape=(5, -1, 3), partition_dim=1),
    'sub-parameters of the input, whole bias':
    layer_case(SubParamLinearLayer, lambda: linear(4, 15), shape=(-1, (10, 5)), partition_dim=1),
    'row sub-parameters':
    layer_case(SubParamLinearAllreduce, lambda: linear(4, 21), shape=(-1, (9, 6, 6)), partition_dim=1),
}


def published_map(param):
    """The map that an AutoTP layer attached to the parameter, or None."""
    entry = getattr(param, DS_AUTOTP_UC_META)['conversion'].get('affine_map')
    return entry and ParamAffineMap.from_dict(entry)


@dataclass(frozen=True)
class Published:
    """One parameter: the labelled original, and by rank the map published for it and the shard that the layer kept."""
    full: torch.Tensor
    maps: Dict[int, ParamAffineMap]
    shards: Dict[int, torch.Tensor]


@functools.lru_cache(maxsize=None)
def published(case_name: str, degree: int) -> Dict[str, Published]:
    """Parameter name -> what the layer does with it in a group of ``degree`` ranks."""
    case = LAYER_CASES[case_name]
    originals = dict(case.module().named_parameters())
    result = {name: Published(param.data, {}, {}) for name, param in originals.items()}
    with stand_in_groups():
        for rank in range(degree):
            layer = case.wrap(case.module(), Group(degree, rank))
            for name, entry in result.items():
                param = getattr(layer, name)
                entry.maps[rank], entry.shards[rank] = published_map(param), param.data.cpu()
    return result
