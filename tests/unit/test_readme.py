# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The README's snippets run as they stand, and do what it says; its tables are those of the code."""

import re
import subprocess
import sys
from pathlib import Path

import deepspeed
import torch

from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from unit.ranks import run_ranks

README = Path(__file__).resolve().parents[2] / 'README.md'


class Regression(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))

    def forward(self, batch):
        return self.layers(batch.to(self.layers[0].weight.dtype)).square().mean()


def run_snippets(rank, transfer, in_place):
    torch.manual_seed(0)
    model = Regression()
    names = {
        'model': model,
        'optimizer': torch.optim.Adam(model.parameters()),
        'batches': torch.randn(3, 4, 7),
        'config': {
            'train_micro_batch_size_per_gpu': 4,
            'bf16': {
                'enabled': True
            },
            'zero_force_ds_cpu_optimizer': False,
            'zero_optimization': {
                'stage': 3,
                'offload_optimizer': {
                    'device': 'cpu'
                }
            }
        }
    }
    exec(transfer, names)
    for name, parameter in names['engine'].module.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        rows = (master.chunk(2) + (master[:0], ))[rank]
        assert torch.equal(names['shards'][name][rank], rows.to(torch.bfloat16)), name
    parameter = model.layers[0].weight
    moment = safe_get_full_optimizer_state(parameter, 'exp_avg').clone()
    names |= {'name': 'layers.0.weight', 'new_value': torch.arange(35.0).reshape(5, 7)}
    exec(in_place, names)
    with deepspeed.zero.GatheredParameters([parameter]):
        weight = parameter.detach().float()
    return (len(names['shards']), torch.equal(names['full'], moment),
            torch.equal(safe_get_full_fp32_param(parameter),
                        names['new_value']), torch.equal(weight, names['new_value']))


def test_the_readmes_snippets_bring_every_master_to_its_row_shards_and_change_state_in_place():
    snippets = re.findall(r'```python\n(.*?)```', README.read_text('utf-8'), re.DOTALL)
    assert run_ranks(run_snippets, 2, *snippets) == [(4, True, True, True)] * 2


def test_the_readmes_tables_of_engines_are_those_that_the_code_and_the_tests_use(tmp_path):
    for path in ('README.md', 'scripts/readme_tables.py'):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text((README.parent / path).read_text('utf-8'), 'utf-8')
    subprocess.run([sys.executable, tmp_path / 'scripts/readme_tables.py'], check=True, timeout=90)
    assert (tmp_path / 'README.md').read_text('utf-8') == README.read_text('utf-8')
