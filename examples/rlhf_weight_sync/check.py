# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The proof that the rollout workers hold the trainers' weights. Nothing here knows of maps, plans or the executor.

Trainer 0 sends every parameter in full, one at a time, as DeepSpeed's own accessor gathers it; each rollout worker
cuts its shard out of it as PyTorch would have, and compares all of it with the shard that the transfer wrote.
"""

import torch
import torch.distributed as torch_dist
from torch.distributed.tensor import DTensor, distribute_tensor

from deepspeed.utils import safe_get_full_fp32_param

from model import PROMPT_TOKENS, materialize

# Two logits closer than this may trade places: tensor parallelism adds up in another order than one process does.
LOGIT_TOLERANCE = 1e-3

_BITS_BY_ITEMSIZE = {2: torch.int16, 4: torch.int32}


class CheckFailed(RuntimeError):
    """A rollout worker holds or generates something that the trainers' weights do not give."""


def send_full_parameters(engine, trainer, group, rollout_ranks, dtype):
    """Gather every parameter and send it from trainer 0 to ``rollout_ranks`` of ``group``; all trainers call this."""
    for _, parameter in sorted(engine.module.named_parameters()):
        full = safe_get_full_fp32_param(parameter).to(dtype)
        if trainer == 0:
            for rank in rollout_ranks:
                group.send([full], rank, 0).wait()


def verify_step(model, generated, reference, group, worker, on_parameter):
    """The number of elements compared, and equal, in all shards of this worker; all rollout workers call this.

    ``generated`` are the tokens that ``model`` made, prompts included. The worker that has a ``reference`` checks that
    those are right, the others that theirs are the same. Raises CheckFailed.
    """
    verified = 0
    for name, parameter in sorted(model.named_parameters()):
        full = torch.empty(parameter.shape, dtype=parameter.dtype)
        group.recv([full], 0, 0).wait()
        verified += verify_shard(name, parameter, full, worker)
        if reference:
            reference.load(name, full)
        on_parameter()
    if reference:
        reference.verify_tokens(generated, PROMPT_TOKENS)
    expected = generated.clone()
    torch_dist.broadcast(expected, 0)
    if not torch.equal(generated, expected):
        raise CheckFailed(f'rollout worker {worker} generated other tokens than worker 0')
    return verified


def verify_shard(name, parameter, full, worker):
    """The number of elements compared: all that this worker holds of ``parameter``, bit by bit.

    Raises CheckFailed with the parameter, the worker and the first index within its shard that differs.
    """
    actual, expected = parameter.detach(), full
    if isinstance(parameter, DTensor):
        actual = actual.to_local()
        # Without a source rank nothing is communicated: PyTorch cuts the local shard out of the caller's tensor.
        expected = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
    bits = _BITS_BY_ITEMSIZE[actual.element_size()]
    differs = actual.view(bits) != expected.view(bits)
    if differs.any():
        index = tuple(differs.nonzero()[0].tolist())
        raise CheckFailed(
            f'parameter {name} on rollout worker {worker}: {int(differs.sum())} of {actual.numel()} elements '
            f'differ, first at index {index} of its shard: {actual[index].item()} instead of '
            f'{expected[index].item()}')
    return actual.numel()


class Reference:
    """The whole model in fp32 in one process, to generate what tensor parallelism should have generated."""

    def __init__(self, empty_model):
        materialize(empty_model)
        self.model = empty_model
        self.parameters = dict(empty_model.named_parameters())

    def load(self, name, full):
        with torch.no_grad():
            self.parameters[name].copy_(full)

    def verify_tokens(self, tokens, prompt_tokens):
        """Raise CheckFailed unless each token after the first ``prompt_tokens`` is the greedy choice here as well."""
        with torch.no_grad():
            logits = self.model(tokens, use_cache=False).logits[:, prompt_tokens - 1:-1]
        chosen = logits.gather(-1, tokens[:, prompt_tokens:, None])[..., 0]
        # Not `shortfall > tolerance`: NaN must fail.
        wrong = ~(logits.amax(-1) - chosen <= LOGIT_TOLERANCE)
        if wrong.any():
            prompt, position = wrong.nonzero()[0].tolist()
            raise CheckFailed(
                f'rollout worker 0 generated token {int(tokens[prompt, prompt_tokens + position])} for prompt '
                f'{prompt} at position {position}, one process with the same weights generates '
                f'{int(logits[prompt, position].argmax())}')
