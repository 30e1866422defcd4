# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Composes the fork: the pinned release of DeepSpeed, our modules laid over it, our mixin in its engine.

A build trusts nothing that an earlier one left behind except the archive of the release, whose sha256 is checked every
time; all else is made anew. The rest of the metadata is in setup.cfg, the pin in requirements/upstream.txt.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PIN = Path('requirements/upstream.txt')
UPSTREAM_VERSION = re.search(r'^deepspeed==([\w.]+)', PIN.read_text(), re.MULTILINE).group(1)
UPSTREAM_SHA256 = re.findall(r'--hash=sha256:([0-9a-f]{64})', PIN.read_text())
VERSION = f'{UPSTREAM_VERSION}+affine.0.1.0'

UPSTREAM_SCRIPTS = Path('build/upstream-scripts')
SCRIPTS = 'deepspeed deepspeed.pt ds ds_bench ds_io ds_nvme_tune ds_report ds_ssh dsr'.split()

ENGINE_CLASS = re.compile(r'^class DeepSpeedEngine\(Module\):$', re.MULTILINE)
ENGINE_CLASS_WITH_MIXIN = '''from deepspeed.runtime.zero.zero_affine import ZeroAffineEngineMixin


class DeepSpeedEngine(ZeroAffineEngineMixin, Module):'''

# Of the file that upstream's setup.py writes: '0.0' tells its readers to ask the running torch, and no op is listed
# because all of them are compiled on first use.
VERSION_MODULE = f'''version = '{VERSION}'
git_hash = 'unknown'
git_branch = 'unknown'
installed_ops = {{}}
accelerator_name = ''
torch_info = dict.fromkeys(('version', 'cuda_version', 'nccl_version', 'hip_version'), '0.0')
'''


def fail(message):
    """Ends the build with one line. Not an Exception: setuptools ignores those of build_py in an editable install."""
    raise SystemExit(f'error: {message}')


def is_pinned(archive):
    return archive.is_file() and hashlib.sha256(archive.read_bytes()).hexdigest() in UPSTREAM_SHA256


def download():
    """Path of the release's sdist, taken from the package index once and kept in build/."""
    archive = Path('build', f'deepspeed-{UPSTREAM_VERSION}.tar.gz')
    if not is_pinned(archive):
        # pip compares the sha256 before it runs anything of the sdist; it asks upstream's setup.py for metadata, for
        # which the setuptools of this very build will do.
        options = ['--no-deps', '--no-binary=deepspeed', '--no-build-isolation', '--require-hashes']
        command = [sys.executable, '-m', 'pip', 'download', *options, f'--requirement={PIN}', '--dest=build']
        pip = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if 'DO NOT MATCH THE HASHES' in pip.stdout:
            fail(f'the sha256 of the deepspeed {UPSTREAM_VERSION} that the package index serves is not in {PIN}: use '
                 'an index that mirrors PyPI, or set DS_UPSTREAM to the sdist from PyPI or to an unpacked tree')
        if pip.returncode != 0:
            print(pip.stdout)
            fail(f'cannot take deepspeed=={UPSTREAM_VERSION} from the package index: make one reachable '
                 '(PIP_INDEX_URL), or set DS_UPSTREAM to an sdist or an unpacked tree of that release')
    return archive


def upstream_folders(scratch):
    """The folders of the pinned release's package and of its scripts; ``scratch`` is where an archive is unpacked."""
    release = Path(os.environ.get('DS_UPSTREAM') or download())
    if release.is_dir():
        version = Path(release, 'version.txt').read_text().strip()
        if version != UPSTREAM_VERSION:
            fail(f'DS_UPSTREAM={release} is DeepSpeed {version}: set it to a tree of {UPSTREAM_VERSION}')
        return release / 'deepspeed', release / 'bin'
    if not is_pinned(release):
        fail(f'DS_UPSTREAM={release} is not a file whose sha256 is in {PIN}: set it to the sdist of '
             f'{UPSTREAM_VERSION} from PyPI or to an unpacked tree')
    if release.suffix == '.whl':
        shutil.unpack_archive(release, scratch, 'zip')
        return Path(scratch, 'deepspeed'), Path(scratch, f'deepspeed-{UPSTREAM_VERSION}.data', 'scripts')
    shutil.unpack_archive(release, scratch)
    sdist = Path(scratch, f'deepspeed-{UPSTREAM_VERSION}')
    return sdist / 'deepspeed', sdist / 'bin'


class ComposeFork(build_py):
    """Builds the package from upstream's files and ours; in an editable install, links stand for ours."""

    def run(self):
        if os.environ.get('DS_BUILD_OPS', '0') not in ('', '0'):
            fail('DS_BUILD_OPS is set, but the fork compiles every op on first use: unset it')
        try:
            self.copy_upstream()
        except Exception as error:
            fail(f'cannot compose the fork: {type(error).__name__}: {error}')
        super().run()

    def copy_upstream(self):
        composed = Path(self.build_lib, 'deepspeed')
        for stale in (composed, UPSTREAM_SCRIPTS, self.get_finalized_command('bdist').bdist_base):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory() as scratch:
            package, scripts = upstream_folders(scratch)
            for source, target in ((package, composed), (scripts, UPSTREAM_SCRIPTS)):
                shutil.copytree(source, target, ignore=shutil.ignore_patterns('__pycache__'))
        composed.joinpath('git_version_info_installed.py').write_text(VERSION_MODULE)
        engine = composed / 'runtime' / 'engine.py'
        text, count = ENGINE_CLASS.subn(ENGINE_CLASS_WITH_MIXIN, engine.read_text('utf-8'))
        if count != 1:
            fail(f'upstream\'s runtime/engine.py has {count} lines "class DeepSpeedEngine(Module):", the fork needs '
                 'exactly one: unset DS_UPSTREAM, or set it to an unmodified tree')
        engine.write_text(text, 'utf-8')

    def get_outputs(self, include_bytecode=True):
        """Ours and upstream's; what is not ours is copied into the link tree of an editable install."""
        upstream = (str(path) for path in Path(self.build_lib, 'deepspeed').rglob('*') if path.is_file())
        return sorted({*super().get_outputs(include_bytecode), *upstream})


setup(version=VERSION, scripts=[str(UPSTREAM_SCRIPTS / name) for name in SCRIPTS], cmdclass={'build_py': ComposeFork})
