# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""What importing the library does, and does not do, to a process."""

import subprocess
import sys

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.zero_affine import ZeroAffineEngineMixin

MODULES = ('deepspeed.checkpoint.affine, deepspeed.checkpoint.affine_dtensor, deepspeed.checkpoint.affine_transfer, '
           'deepspeed.checkpoint.affine_transfer_executor, deepspeed.runtime.zero.zero_affine')


def test_importing_needs_no_process_group_and_leaves_cuda_alone():
    check = 'import torch; assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()'
    subprocess.run([sys.executable, '-c', f'import {MODULES}; {check}'], check=True, timeout=120)


def test_the_engine_has_the_mixin():
    assert issubclass(DeepSpeedEngine, ZeroAffineEngineMixin)
