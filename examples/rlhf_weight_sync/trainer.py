# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The trainer side: a DeepSpeed ZeRO engine whose fp32 masters are what the rollout workers get."""

import logging
import warnings

import torch

import deepspeed

from check import send_full_parameters
from display import Note, Progress
from model import DTYPES, MICRO_BATCH, build_model, read_text, training_batches
from options import MODEL_SIZES
from transfer import build_executor, fetch_maps, publish_maps, step_report
from worlds import Meeting

LEARNING_RATE = 1e-3


def run_trainer(report, options, trainer, folder):
    """Be trainer ``trainer``: train, hand over the weights, and let them be checked, ``options.steps`` times."""
    torch.set_num_threads(1)
    silence_deepspeed()
    meeting = Meeting(folder, options.trainers, options.tp)
    meeting.start_world('trainers', trainer, options.trainers)
    group = meeting.join_transfer_group(trainer)
    engine = build_engine(options)
    report(Progress('start', options.processes))

    source_maps = engine.optimizer_storage_maps()
    if trainer == 0:
        publish_maps(meeting, 'trainers', source_maps)
        report(Note(describe(options, source_maps)))
    target_maps = fetch_maps(meeting, 'rollout workers')
    executor = build_executor(options, meeting, group, target_maps, source_maps, source_ranks={trainer})
    report(Progress('plan', options.processes))

    batches = training_batches(read_text(), options, trainer)
    for step in range(1, options.steps + 1):
        loss = train_step(engine, batches, options, lambda total: report(Progress(f'step {step}: train', total)))
        # Live views of what the optimizer has just stepped on: nothing is copied or gathered here.
        sources = {name: {trainer: view} for name, view in engine.optimizer_storage().items()}
        # Else the time of the transfer would count waiting for the slowest trainer.
        group.barrier().wait()
        stats = executor.execute(sources, {})
        report(Progress(f'step {step}: transfer', options.processes))
        send_full_parameters(engine, trainer, group, meeting.rollout_ranks, DTYPES[options.dtype])
        report(step_report(step, stats, options.bytes_per_peer * options.tp, loss=loss))


def build_engine(options):
    """The DeepSpeed engine of this trainer; all trainers call it."""
    # Else DeepSpeed would compile shared-memory collectives for inference here. Gloo needs no compiler.
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    deepspeed.init_distributed('gloo')
    model = build_model(options)
    zero = {'stage': options.stage}
    if options.offload == 'cpu':
        zero['offload_optimizer'] = {'device': 'cpu'}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=LEARNING_RATE),
        config={
            'train_micro_batch_size_per_gpu': MICRO_BATCH,
            'gradient_accumulation_steps': MODEL_SIZES[options.model_size].micro_batches,
            'bf16': {
                'enabled': options.dtype == 'bf16'
            },
            'zero_optimization': zero,
            # Torch's own Adam then steps on the offloaded masters, so that no C++ extension is compiled.
            'zero_force_ds_cpu_optimizer': False,
        })
    return engine


def silence_deepspeed():
    """Leave only errors: ZeRO's hints about performance, and PyTorch's about names that DeepSpeed still uses, go."""
    logging.getLogger('DeepSpeed').setLevel(logging.ERROR)
    warnings.filterwarnings('ignore', category=FutureWarning, module='torch.distributed')


def describe(options, source_maps):
    elements = sum(map_.numel for map_ in source_maps.values())
    return (
        f'Llama with {elements / 1e6:.3g} M parameters in {len(source_maps)} tensors: {options.trainers} trainers '
        f'(ZeRO-{options.stage}, optimizer offload: {options.offload}, fp32 masters) -> {options.tp} rollout workers '
        f'(tensor parallel, {options.dtype})')


def train_step(engine, batches, options, on_micro_batch):
    """Take one optimizer step; this trainer's mean loss over the step's micro-batches, before it."""
    micro_batches = MODEL_SIZES[options.model_size].micro_batches
    total = 0.0
    for _ in range(micro_batches):
        tokens = next(batches)
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        total += loss.item()
        on_micro_batch(micro_batches * options.trainers)
    return total / micro_batches
