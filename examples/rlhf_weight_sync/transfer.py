# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""From the maps of both sides to an executor: exchanged once, planned once, executed after every step."""

import json

import torch

from deepspeed.checkpoint.affine import ParamAffineMap
from deepspeed.checkpoint.affine_transfer import plan_model
from deepspeed.checkpoint.affine_transfer_executor import AffineTransferExecutor, StagingBudget, TransferEndpoints

from check import CheckFailed
from display import StepReport
from model import DTYPES


def publish_maps(meeting, side, maps):
    """Let the other side read ``maps`` (name -> ParamAffineMap); one process of ``side`` calls this, once."""
    meeting.store.set(f'maps of {side}', json.dumps({name: map_.to_dict() for name, map_ in maps.items()}))


def fetch_maps(meeting, side):
    """The maps that ``side`` published; waits for them."""
    published = json.loads(meeting.store.get(f'maps of {side}'))
    return {name: ParamAffineMap.from_dict(plain) for name, plain in published.items()}


def build_executor(options, meeting, group, target_maps, source_maps, **own_locations):
    """The executor of one process; every process of the job calls this.

    ``own_locations`` is ``source_ranks`` of a trainer or ``target_ranks`` of a rollout worker: a process plans only
    what it takes part in.
    """
    # Each side numbers its locations from 0; the transfer group numbers the processes of both.
    endpoints = TransferEndpoints(source={trainer: trainer
                                          for trainer in range(meeting.trainers)},
                                  target=dict(enumerate(meeting.rollout_ranks)))
    return AffineTransferExecutor(plan_model(target_maps, source_maps, **own_locations),
                                  endpoints,
                                  dtype=DTYPES[options.dtype],
                                  source_dtype=torch.float32,
                                  budget=StagingBudget(options.bytes_per_peer),
                                  group=group)


def step_report(step, stats, bound_bytes, **known):
    """The StepReport of one ``execute()`` that returned ``stats``; CheckFailed when it staged over ``bound_bytes``."""
    if stats.peak_host_staging_bytes > bound_bytes:
        raise CheckFailed(f'staging took {stats.peak_host_staging_bytes} bytes, the bound is {bound_bytes}')
    return StepReport(step,
                      sent_bytes=stats.sent_bytes,
                      seconds=stats.seconds,
                      rounds=stats.rounds,
                      peak_staging_bytes=stats.peak_host_staging_bytes,
                      staging_bound_bytes=bound_bytes,
                      **known)
