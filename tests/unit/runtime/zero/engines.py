# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Small real engines for the tests of ZeRO storage, and oracles that read tensors without the code under test."""

import functools
import gc
import itertools
import math

import numpy
import torch
from unit.ranks import RankFailure, run_ranks

DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}
# Dozens of engines each; the world of 3 takes 20 s on 2 idle cores.
OBSERVATION_TIMEOUT_S = 300


class TinyModel(torch.nn.Module):
    """A few hundred parameters: prime sizes, one element, fewer elements than ranks, tied, frozen.

    Nothing of no dimension: DeepSpeed cannot broadcast such a parameter.
    """

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(13, 5)
        self.frozen = torch.nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.up = torch.nn.Linear(5, 11)
        self.down = torch.nn.Linear(11, 5)
        self.mix = torch.nn.Parameter(torch.randn(2, 3, 5))
        self.pair = torch.nn.Parameter(torch.randn(2))
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.head = torch.nn.Linear(5, 13, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        hidden = self.tokens(tokens)
        hidden = hidden + self.frozen(hidden) * self.scale + self.mix.sum((0, 1)) * self.pair[0] + self.pair[1]
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        logits = self.head(hidden)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class TrainedModel(TinyModel):
    """Nothing is frozen: DeepSpeed cannot offload the low-precision weights of stage 3 otherwise."""

    def __init__(self):
        super().__init__()
        self.frozen.requires_grad_(True)


class EvenModel(torch.nn.Module):
    """Every parameter has a multiple of 12 elements: DeepSpeed's ``safe_set_full_*`` cannot write uneven ones."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(6, 12)
        self.up = torch.nn.Linear(12, 12)
        self.head = torch.nn.Linear(12, 12)

    def forward(self, tokens):
        logits = self.head(torch.tanh(self.up(self.tokens(tokens))))
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def observed(observe, world_size):
    """What each rank's ``observe(rank)`` returned; the ranks run once for all tests that ask, also when they fail."""
    results, failure = _run_once(observe, world_size)
    if failure is not None:
        # Its traceback would grow with every test that raises it, and the time to print it with that.
        raise failure.with_traceback(None)
    return results


@functools.lru_cache(maxsize=None)
def _run_once(observe, world_size):
    try:
        return run_ranks(observe, world_size, timeout=OBSERVATION_TIMEOUT_S), None
    except RankFailure as failure:
        return None, failure


def start_deepspeed():
    """Make this process a DeepSpeed rank of the gloo world that it is in already."""
    import deepspeed
    deepspeed.init_distributed(dist_backend='gloo')
    # Building a stage 3 engine collects garbage; looking through all imported modules each time took most of the time.
    gc.freeze()


def partitioned(model_class, config):
    """A model built under ``deepspeed.zero.Init``."""
    import deepspeed
    with deepspeed.zero.Init(config_dict_or_path=config):
        return model_class()


def three_groups(name):
    """The parameter group of a parameter of ``TinyModel``; the groups are in another order than the parameters."""
    return 0 if name.endswith('bias') or name in ('pair', 'scale') else 1 if name in ('mix', 'up.weight') else 2


def reversed_adam(groups, **options):
    return torch.optim.Adam([{'params': group['params'][::-1]} for group in groups], **options)


def config_of(stage, offload_optimizer='none', dtype='fp32', grad_accum_dtype=None, **zero_options):
    """A DeepSpeed configuration; ``offload_optimizer`` is a device or the whole section, ``zero_options`` are further
    keys of ``zero_optimization``.
    """
    config = {
        'train_micro_batch_size_per_gpu': 2,
        'zero_allow_untested_optimizer': True,
        'zero_force_ds_cpu_optimizer': False,
        'zero_optimization': {
            'stage': stage,
            **zero_options
        },
    }
    if isinstance(offload_optimizer, dict):
        config['zero_optimization']['offload_optimizer'] = offload_optimizer
    elif offload_optimizer != 'none':
        config['zero_optimization']['offload_optimizer'] = {'device': offload_optimizer, 'pin_memory': False}
    if dtype == 'bf16':
        config['bf16'] = {'enabled': True}
    if dtype == 'fp16':
        config['fp16'] = {'enabled': True, 'loss_scale': 8}
    if grad_accum_dtype is not None:
        config['data_types'] = {'grad_accum_dtype': grad_accum_dtype}
    return config


def build_engine(config, model_class=TinyModel, optimizer=torch.optim.Adam, group_of=None, seed=7, **options):
    """A real engine around ``model_class()``, built alike on every rank.

    ``group_of`` puts a parameter name into a parameter group by its result; ``options`` go to the optimizer, which
    None leaves out.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    # Training in fp16 on a CPU is slow, which is why DeepSpeed refuses it, and correct.
    get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(seed)
    model = model_class()
    groups = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(group_of(name) if group_of else 0, []).append(parameter)
    client_optimizer = None
    if optimizer is not None:
        options.setdefault('lr', 0.05)
        client_optimizer = optimizer([{'params': groups[key]} for key in sorted(groups)], **options)
    engine, *_ = deepspeed.initialize(model=model, optimizer=client_optimizer, config=config, dist_init_required=False)
    return engine


def train(engine, steps, first=0):
    """Take ``steps`` optimizer steps; the data depends on the rank and the number of the step alone."""
    import deepspeed.comm as dist
    vocabulary = engine.module.tokens.num_embeddings
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        tokens = torch.randint(vocabulary, (2, 6), generator=generator)
        engine.backward(engine(tokens))
        engine.step()


def losses_of(model, vocabulary):
    """The loss of fixed tokens, while training, evaluating and without gradients."""
    tokens = torch.randint(vocabulary, (2, 6), generator=torch.Generator().manual_seed(5))
    losses = []
    for is_training, has_gradients in itertools.product((True, False), repeat=2):
        model.train(is_training)
        with torch.set_grad_enabled(has_gradients):
            losses.append(model(tokens).item())
    model.train()
    return losses


def own_flats(engine):
    """The flat masters that the engine's optimizer steps on, read from the optimizer itself."""
    for attribute in ('single_partition_of_fp32_groups', 'fp32_partitioned_groups_flat', 'fp32_groups_flat_partition'):
        if hasattr(engine.optimizer, attribute):
            return list(getattr(engine.optimizer, attribute))
    raise AssertionError(f'{type(engine.optimizer).__name__} has none of the known lists of masters')


def own_states(engine, state):
    """The flat tensors that hold ``state``, in the order of ``own_flats``."""
    return [engine.optimizer.optimizer.state[flat][state] for flat in own_flats(engine)]


def label_flats(flats, rank):
    """Number the elements of all groups' whole buffers through; a rank's flat tensor is its part of a group's."""
    first = 0
    for flat in flats:
        partition = flat.numel()
        flat.data.copy_(torch.arange(first + rank * partition, first + (rank + 1) * partition))
        first += partition * torch.distributed.get_world_size()


def full_reference(engine, state):
    """{name: full tensor} by DeepSpeed's own accessors.

    They are right under stage 3, and under stages 1 and 2 for one parameter group in its given order.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    return {
        name: (safe_get_full_fp32_param(parameter) if state == 'fp32' else safe_get_full_optimizer_state(
            parameter, state)).detach().cpu().clone()
        for name, parameter in engine.module.named_parameters() if parameter.requires_grad
    }


def gathered(engine):
    """{name: full array} by DeepSpeed's own gathering, which does nothing under stages 1 and 2."""
    import deepspeed
    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return arrays_of(named)


def arrays_of(views):
    """{name: numpy array of its own}, which travels between processes without shared memory."""
    return {name: view.detach().float().cpu().numpy().copy() for name, view in views.items()}


def element_order(plain_map, rank):
    """Which element of the flattened parameter each element of ``rank``'s shard is.

    ``plain_map`` is a map's ``to_dict()``; it is read element by element, by no code of the maps.
    """
    shard = plain_map['ranks'].get(rank)
    if shard is None:
        return []
    order = {}
    for piece in shard['pieces']:
        (source, source_strides), (dest, dest_strides) = piece['source'], piece['dest']
        for index in itertools.product(*map(range, piece['shape'])):
            position = dest + sum(i * stride for i, stride in zip(index, dest_strides))
            assert position not in order, f'element {position} of the shard is described twice'
            order[position] = source + sum(i * stride for i, stride in zip(index, source_strides))
    assert sorted(order) == list(range(math.prod(shard['shard_shape']))), 'the pieces do not cover the shard'
    return [order[position] for position in sorted(order)]


def assemble(plain_maps, arrays_by_rank):
    """{name: full array} from each rank's 1-D arrays; NaN where no rank holds the element, error where two do."""
    full = {}
    for name, plain_map in plain_maps.items():
        flat = numpy.full(math.prod(plain_map['logical_shape']), numpy.nan, dtype=numpy.float32)
        for rank, arrays in enumerate(arrays_by_rank):
            order = element_order(plain_map, rank)
            assert len(order) == len(arrays[name]), f'{name}: rank {rank} has {len(arrays[name])} of {len(order)}'
            assert numpy.isnan(flat[order]).all(), f'{name}: rank {rank} holds elements that a lower rank holds too'
            flat[order] = arrays[name]
        full[name] = flat.reshape(plain_map['logical_shape'])
    return full


def write_full(engine, state, full):
    """Write the full tensors into this rank's views of ``state``, by the maps."""
    rank = torch.distributed.get_rank()
    maps = engine.optimizer_storage_maps()
    for name, view in engine.optimizer_storage(state).items():
        view.copy_(full[name].flatten()[element_order(maps[name].to_dict(), rank)])


def plain_maps(maps):
    """{name: map in its plain form}"""
    return {name: parameter_map.to_dict() for name, parameter_map in maps.items()}


def collectives_so_far():
    """How many collectives this process has begun, over all its groups, by the count that each group keeps."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def collectives_of(*calls):
    """How many collectives this process begins in each of the calls, made one after another."""
    counts = [collectives_so_far()]
    for call in calls:
        call()
        counts.append(collectives_so_far())
    return [after - before for before, after in zip(counts, counts[1:])]


def operators_of(call):
    """The names of the tensor operators that ``call`` runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        names = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.add(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    with Recorder() as recorder:
        call()
    return recorder.names
