# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Engines of more than data parallelism: experts, tensor parallel shards and sequence parallel groups."""

import torch
from unit.runtime.zero.engines import config_of


def forget_groups():
    """Let the next engine make its own process groups: DeepSpeed keeps those of the last one for the process."""
    from deepspeed.utils import groups
    groups._release_process_group_references()


def adam_of_experts(parameter_groups, **options):
    """Adam over the groups, with the experts in groups of their own, as DeepSpeed wants it."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    named = [{**group, 'name': f'dense {index}'} for index, group in enumerate(parameter_groups)]
    return torch.optim.Adam(split_params_into_different_moe_groups_for_optimizer(named), **options)


class Expert(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.w1 = torch.nn.Linear(6, 5, bias=False)
        self.w2 = torch.nn.Linear(5, 6, bias=False)
        self.w3 = torch.nn.Linear(6, 5, bias=False)


class ModelForAutoEP(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(13, 6)
        self.moe = torch.nn.Module()
        self.moe.gate = torch.nn.Linear(6, 4, bias=False)
        self.moe.experts = torch.nn.ModuleList(Expert() for _ in range(4))
        self.head = torch.nn.Linear(6, 13)

    def forward(self, tokens):
        hidden = self.tokens(tokens)
        logits = self.head(hidden + self.moe(hidden))
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


AUTOEP = dict(enabled=True,
              moe_layer_pattern='moe',
              router_pattern='gate',
              expert_pattern='experts',
              expert_w1='w1',
              expert_w2='w2',
              expert_w3='w3',
              top_k=2,
              use_grouped_mm=False)
AUTOEP_CONFIGS = {
    'AutoEP over 2, stage 1': config_of(1) | {'expert_parallel': AUTOEP | {'autoep_size': 2}},
    'AutoEP over 2, stage 2': config_of(2, 'cpu', dtype='bf16') | {'expert_parallel': AUTOEP | {'autoep_size': 2}},
    'AutoEP over 2, stage 3': config_of(3) | {'expert_parallel': AUTOEP | {'autoep_size': 2}},
    'AutoEP over 4, stage 3': config_of(3, dtype='bf16') | {'expert_parallel': AUTOEP | {'autoep_size': 4}},
    'AutoEP over 2, BF16_Optimizer':
    config_of(1, dtype='bf16', grad_accum_dtype='fp32') | {'expert_parallel': AUTOEP | {'autoep_size': 2}},
}  # yapf: disable


def engine_of_autoep(config):
    """The engine, and what its parameters are made of: the experts' weights are stacked by AutoEP."""
    import deepspeed
    torch.manual_seed(7)
    model = ModelForAutoEP()
    dtype = torch.bfloat16 if 'bf16' in config else torch.float32
    weights = {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}
    for layer in ('w1', 'w2', 'w3'):
        weights[f'moe.experts.{layer}'] = torch.stack(
            [weights.pop(f'moe.experts.{expert}.{layer}.weight') for expert in range(4)])
    weights['moe.router.gate.weight'] = weights.pop('moe.gate.weight')

    stage = config['zero_optimization']['stage']

    # Called once AutoEP has replaced the experts. Stage 3 puts them into sub-groups of their own by itself.
    def optimizer_of(parameters):
        groups = [{'params': list(parameters)}]
        return torch.optim.Adam(groups, lr=0.05) if stage == 3 else adam_of_experts(groups, lr=0.05)

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of, config=config, dist_init_required=False)
    return engine, weights
