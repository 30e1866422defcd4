# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The rollout side: the same model under PyTorch's tensor parallelism, whose local shards the transfer writes."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from deepspeed.checkpoint.affine import replicated_map
from deepspeed.checkpoint.affine_dtensor import dtensor_map

from check import Reference, verify_step
from display import Progress
from model import DTYPES, build_empty_model, materialize, prompts, read_text
from transfer import build_executor, fetch_maps, publish_maps, step_report
from worlds import Meeting

NEW_TOKENS = 8

# What --corrupt spoils: a parameter that tensor parallelism cuts along its columns, past the first row.
CORRUPTED_PARAMETER = 'model.layers.0.mlp.down_proj.weight'
CORRUPTED_INDEX = (3, 5)


def run_rollout(report, options, worker, folder):
    """Be rollout worker ``worker``: take the weights, generate with them, check both, ``options.steps`` times."""
    torch.set_num_threads(1)
    meeting = Meeting(folder, options.trainers, options.tp)
    meeting.start_world('rollout workers', worker, options.tp)
    group = meeting.join_transfer_group(options.trainers + worker)
    model = build_rollout_model(options)
    report(Progress('start', options.processes))

    target_maps = {name: target_map(parameter, options.tp) for name, parameter in model.named_parameters()}
    if worker == 0:
        publish_maps(meeting, 'rollout workers', target_maps)
    source_maps = fetch_maps(meeting, 'trainers')
    executor = build_executor(options, meeting, group, target_maps, source_maps, target_ranks={worker})
    report(Progress('plan', options.processes))

    shards = {name: local_shard(parameter) for name, parameter in model.named_parameters()}
    targets = {name: {worker: shard} for name, shard in shards.items()}
    # A whole model, on one worker and for the check alone: it generates the same tokens without tensor parallelism.
    reference = Reference(build_empty_model(options, torch.float32)) if worker == 0 else None
    tokens = prompts(read_text())
    for step in range(1, options.steps + 1):
        # Else the time of the transfer would count waiting for the training.
        group.barrier().wait()
        stats = executor.execute({}, targets)
        report(Progress(f'step {step}: transfer', options.processes))
        if worker == options.corrupt and step == options.steps:
            shards[CORRUPTED_PARAMETER][CORRUPTED_INDEX] += 1
        generated = generate(model, tokens,
                             lambda: report(Progress(f'step {step}: generate', NEW_TOKENS * options.tp)))
        verified = verify_step(model, generated, reference, group, worker,
                               lambda: report(Progress(f'step {step}: check',
                                                       len(targets) * options.tp)))
        report(step_report(step, stats, options.bytes_per_peer * options.trainers, verified_elements=verified))


def build_rollout_model(options):
    """This worker's part of the model under tensor parallelism over the rollout world; all rollout workers call it.

    No worker ever has storage for more than its own shards. The norms stay plain tensors, equal on all workers.
    """
    model = build_empty_model(options, DTYPES[options.dtype])
    mesh = init_device_mesh('cpu', (options.tp, ))
    # Attention reads the number of its heads off its inputs' width, so that the workers' own heads need no other care.
    # Embedding and head both cut the vocabulary, so that one shard can serve both when they are tied.
    model = parallelize_module(
        model, mesh, {
            'model.embed_tokens': RowwiseParallel(input_layouts=Replicate()),
            'model.layers.*.self_attn.q_proj': ColwiseParallel(),
            'model.layers.*.self_attn.k_proj': ColwiseParallel(),
            'model.layers.*.self_attn.v_proj': ColwiseParallel(),
            'model.layers.*.self_attn.o_proj': RowwiseParallel(),
            'model.layers.*.mlp.gate_proj': ColwiseParallel(),
            'model.layers.*.mlp.up_proj': ColwiseParallel(),
            'model.layers.*.mlp.down_proj': RowwiseParallel(),
            'lm_head': ColwiseParallel(output_layouts=Replicate()),
        })
    materialize(model)
    return model


def target_map(parameter, tp):
    """Where the rollout workers hold ``parameter``; locations are their ranks in the rollout world."""
    if isinstance(parameter, DTensor):
        return dtensor_map(parameter.shape, parameter.device_mesh, parameter.placements)
    return replicated_map(parameter.shape, tp)


def local_shard(parameter):
    """This worker's storage of ``parameter``: writing into it changes the model."""
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


@torch.no_grad()
def generate(model, tokens, on_token):
    """``tokens`` (prompts, length) followed by NEW_TOKENS greedy ones; all rollout workers call this.

    The model keeps its weights as they came. It computes in fp32, on copies of this worker's own shards that live
    until the return, so that its tokens can be compared with those of one process.
    """
    weights = {name: parameter.float() for name, parameter in model.named_parameters()}
    for _ in range(NEW_TOKENS):
        logits = torch.func.functional_call(model, weights, (tokens, ), {'use_cache': False}).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        on_token()
    return tokens
