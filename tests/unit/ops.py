# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""DeepSpeed's own CPU optimizers for the tests: compiled once, in the background, and loaded by every rank.

Compiling takes a minute for each. It begins in a process of low priority as soon as pytest has collected a test with
the mark ``compiled_ops``; such tests wait for it. Ranks load what was built with ``use_compiled_ops``: DeepSpeed's own
way takes seconds per process and a lock that a killed rank would leave behind.
"""

import fcntl
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

# DeepSpeed's class that builds it, by the name under which torch keeps the library.
BUILDER_BY_NAME = {'cpu_adam': 'CPUAdamBuilder', 'cpu_lion': 'CPULionBuilder', 'fused_adam': 'FusedAdamBuilder'}

_TESTS = Path(__file__).resolve().parents[1]
_build = _output = None


def _folder():
    default = _TESTS.parent / 'build' / 'torch_extensions'
    return Path(os.environ.setdefault('TORCH_EXTENSIONS_DIR', str(default))).absolute()


def has_compiler():
    return shutil.which(os.environ.get('CXX', 'c++')) is not None


def start_building():
    global _build, _output
    if _build is None:
        _output = tempfile.TemporaryFile()
        _build = subprocess.Popen([sys.executable, '-m', 'unit.ops'],
                                  cwd=_TESTS,
                                  env={
                                      **os.environ, 'TORCH_EXTENSIONS_DIR': str(_folder()),
                                      'DS_ACCELERATOR': 'cpu'
                                  },
                                  stdin=subprocess.DEVNULL,
                                  stdout=_output,
                                  stderr=subprocess.STDOUT,
                                  start_new_session=True)


def output_of_failed_build():
    """Wait for the build; what it and the compiler printed if it failed, in full for the first caller, else None."""
    start_building()
    if _build.wait() == 0:
        return None
    if _output.closed:
        return 'see the first of these errors'
    with _output:
        _output.seek(0)
        return _output.read().decode(errors='replace')


def stop_building():
    if _build is not None and _build.poll() is None:
        # Ninja takes its compilers down with it, each of which it has put into a group of its own.
        os.killpg(_build.pid, signal.SIGTERM)
        _build.wait()


def build():
    """Compile what is missing or out of date."""
    import cpuinfo
    from deepspeed.accelerator import get_accelerator
    os.nice(10)
    cpuinfo.get_cpu_info = functools.lru_cache(cpuinfo.get_cpu_info)
    _folder().mkdir(parents=True, exist_ok=True)
    # The system gives this lock back when its holder dies, unlike torch's own, for which torch then waits forever.
    with open(_folder() / 'tests.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, builder in BUILDER_BY_NAME.items():
            (_folder() / name / 'lock').unlink(missing_ok=True)
            get_accelerator().create_op_builder(builder).load()


def use_compiled_ops():
    """Give this process the libraries that ``build`` made, before any optimizer asks DeepSpeed for them."""
    import cpuinfo
    from deepspeed.ops.op_builder.builder import OpBuilder
    for name in BUILDER_BY_NAME:
        spec = importlib.util.spec_from_file_location(name, _folder() / name / f'{name}.so')
        OpBuilder._loaded_ops[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(OpBuilder._loaded_ops[name])
    # Each optimizer asks for the processor's vendor, which takes over a second, to warn of one of them.
    cpuinfo.get_cpu_info = dict


if __name__ == '__main__':
    build()
