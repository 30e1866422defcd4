# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Names each use of torch.cuda, and of torch.distributed outside its two files, in the given library files.

Exits 1 if there is one. The library goes through get_accelerator() and deepspeed.comm, which work on every device and
under a test's own accelerator. Names in strings and comments are not uses.
"""

import ast
import sys
from pathlib import Path

DISTRIBUTED_FILES = {
    'deepspeed/checkpoint/affine_dtensor.py',
    'deepspeed/checkpoint/affine_transfer_transport.py',
}


def dotted_names(node):
    """What ``node`` itself imports or spells with dots, e.g. ['torch.distributed']."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f'{node.module}.{alias.name}' for alias in node.names]
    return [ast.unparse(node)] if isinstance(node, ast.Attribute) else []


def uses(path):
    """(line, module) of each forbidden use in the file."""
    forbidden = ['torch.cuda'] if path.as_posix() in DISTRIBUTED_FILES else ['torch.cuda', 'torch.distributed']
    found = set()
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
        for name in dotted_names(node):
            found.update((node.lineno, module) for module in forbidden if f'{name}.'.startswith(f'{module}.'))
    return sorted(found)


def main(paths):
    bad = [(path, line, module) for path in paths for line, module in uses(Path(path))]
    for path, line, module in bad:
        print(f'{path}:{line}: uses {module}: library code goes through get_accelerator() and deepspeed.comm')
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
