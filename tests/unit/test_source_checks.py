# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The checks of scripts/ that `make lint` runs over the sources."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / 'scripts'
HEADER = '# Copyright (c) DeepSpeed Team.\n# SPDX-License-Identifier: Apache-2.0\n\n# DeepSpeed Team\n'
LIBRARY_FILE = 'deepspeed/checkpoint/affine.py'
TRANSPORT_FILE = 'deepspeed/checkpoint/affine_transfer_transport.py'


def check(script, folder, name, text):
    """(exit status, output) of the check over one file."""
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    result = subprocess.run([sys.executable, SCRIPTS / script, name], cwd=folder, text=True, stdout=subprocess.PIPE)
    return result.returncode, result.stdout


@pytest.mark.parametrize('text', ['', HEADER, f'{HEADER}"""Docstring."""\n'])
def test_licence_check_accepts_the_header_and_an_empty_file(tmp_path, text):
    assert check('check_licence.py', tmp_path, LIBRARY_FILE, text) == (0, '')


@pytest.mark.parametrize('text', ['import os\n', f'import os\n{HEADER}', HEADER.replace('Apache-2.0', 'MIT')])
def test_licence_check_names_a_file_without_the_header(tmp_path, text):
    status, output = check('check_licence.py', tmp_path, LIBRARY_FILE, text)
    assert status == 1 and output.startswith(f'{LIBRARY_FILE}: ')


@pytest.mark.parametrize('text', [
    'import torch\nx = torch.cuda.Stream()\n', 'import torch.cuda\n', 'from torch import cuda\n',
    'from torch.cuda import Stream\n', 'import torch\ntorch.cuda\n'
])
@pytest.mark.parametrize('name', [LIBRARY_FILE, TRANSPORT_FILE])
def test_torch_use_check_names_torch_cuda_in_every_file(tmp_path, name, text):
    status, output = check('check_torch_use.py', tmp_path, name, text)
    assert status == 1 and output.startswith(f'{name}:{text.count(chr(10))}: uses torch.cuda: ')


USES_OF_DISTRIBUTED = [
    'import torch.distributed as dist\n', 'from torch import distributed\n', 'from torch.distributed import Work\n',
    'from torch.distributed.tensor import Shard\n', 'import torch\ngroup: torch.distributed.ProcessGroup\n'
]


@pytest.mark.parametrize('text', USES_OF_DISTRIBUTED)
def test_torch_use_check_names_torch_distributed_in_other_files(tmp_path, text):
    status, output = check('check_torch_use.py', tmp_path, LIBRARY_FILE, text)
    assert status == 1 and output.startswith(f'{LIBRARY_FILE}:{text.count(chr(10))}: uses torch.distributed: ')


@pytest.mark.parametrize('text', USES_OF_DISTRIBUTED)
@pytest.mark.parametrize('name', ['deepspeed/checkpoint/affine_dtensor.py', TRANSPORT_FILE])
def test_torch_use_check_accepts_torch_distributed_in_its_two_files(tmp_path, name, text):
    assert check('check_torch_use.py', tmp_path, name, text) == (0, '')


def test_torch_use_check_ignores_text(tmp_path):
    text = '"""As torch.cuda and torch.distributed do."""\nimport deepspeed.comm as dist  # not torch.distributed\n'
    assert check('check_torch_use.py', tmp_path, LIBRARY_FILE, text) == (0, '')
