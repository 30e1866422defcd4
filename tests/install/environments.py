# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Copies of the checkout to build from and new virtual environments to install into."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD_INPUTS = ('setup.py', 'setup.cfg', 'pyproject.toml', 'MANIFEST.in', 'LICENSE', 'README.md', 'requirements',
                'deepspeed')
COMMAND_TIMEOUT_S = 300


def copy_checkout(folder):
    """A checkout in the new ``folder`` with all that a build reads and nothing that one has left."""
    folder.mkdir()
    for name in BUILD_INPUTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns('__pycache__'))
        else:
            shutil.copy2(source, folder / name)
    return folder


def run(*command, cwd, check=True, **variables):
    """Run a command without what the caller's environment says about Python and upstream; stdout holds stderr too."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(('PYTHON', 'DS_UPSTREAM'))}
    environment.update({'DS_ACCELERATOR': 'cpu', **variables})
    result = subprocess.run([str(part) for part in command],
                            cwd=cwd,
                            env=environment,
                            text=True,
                            timeout=COMMAND_TIMEOUT_S,
                            stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)
    if check and result.returncode != 0:
        raise AssertionError(f'{command} exited {result.returncode}:\n{result.stdout}')
    return result


class Environment:
    """A new virtual environment that has all that the running one has, pip included, except deepspeed.

    The rest is linked, not installed: torch alone would take 20 s. deepspeed comes only from what a test installs.
    """

    def __init__(self, folder):
        self.folder = folder
        run(sys.executable, '-m', 'venv', '--without-pip', folder, cwd=folder.parent)
        self.site_packages = next(folder.glob('lib/python*/site-packages'))
        linked = folder / 'linked'
        linked.mkdir()
        for entry in Path(sysconfig.get_path('purelib')).iterdir():
            if not entry.name.startswith(('deepspeed', '__editable__', '__pycache__')):
                (linked / entry.name).symlink_to(entry)
        (self.site_packages / 'linked.pth').write_text(f'{linked}\n')

    def script(self, name):
        return self.folder / 'bin' / name

    def python(self, *arguments, **options):
        return run(self.script('python'), *arguments, **{'cwd': self.folder, **options})

    def pip(self, *arguments, **options):
        return self.python('-m', 'pip', *arguments, **options)

    def package(self):
        """Folder that ``import deepspeed`` takes the package from."""
        find = 'import importlib.util as u; print(*u.find_spec("deepspeed").submodule_search_locations, sep="\\n")'
        (folder, ) = self.python('-c', find).stdout.splitlines()
        return Path(folder)


def files_below(folder):
    """Relative name -> bytes of each file, compiled ones left out."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob('*') if path.is_file() and path.suffix != '.pyc'
    }
