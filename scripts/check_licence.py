# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Names each of the given Python files that does not begin with the licence header, and exits 1 if there is one.

An empty file (a package's __init__.py) needs none.
"""

import sys
from pathlib import Path

HEADER = """# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""


def main(paths):
    bad = [path for path in paths if not (Path(path).read_text('utf-8') or HEADER).startswith(HEADER)]
    for path in bad:
        print(f'{path}: does not begin with the licence header that scripts/check_licence.py begins with')
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
