#!/usr/bin/env bash
# The executor on one GPU: its tests, and its speed beside bare copies. At most 6 minutes. Run from anywhere:
#
#     benchmarks/affine_transfer/gpu_check.sh WHEELS [RESULTS]
#
# WHEELS is a folder with PyPI's sdist of the pinned DeepSpeed release and the wheels of what the fork and its tests need
# and PYTHON (python3 by default), which must have torch for CUDA, lacks. Nothing is downloaded, nothing installed
# into PYTHON. RESULTS is where gpu.json goes (beside this script by default, in results/).
set -euo pipefail

wheels=$(realpath "${1:?usage: gpu_check.sh WHEELS [RESULTS]}")
results=$(realpath -m "${2:-$(dirname "$0")/results}")
python=${PYTHON:-python3}
cd "$(dirname "$0")/../.."

# SECONDS COMMAND ...: the command, ended when it takes longer. The steps below sum up to less than 6 minutes.
within() {
    local status=0
    timeout --kill-after=1 "$@" || status=$?
    # 137: it had to be killed.
    if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
        echo "gpu_check.sh: ended after $1 s: ${*:2}" >&2
    fi
    return "$status"
}

within 40 "$python" - <<'END'
import sys
try:
    import torch
except ImportError as error:
    sys.exit(f'gpu_check.sh: {sys.executable} has no torch: {error}')
if not torch.cuda.is_available():
    sys.exit('gpu_check.sh: no CUDA device is to be seen here, so nothing was run')
END

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
site=$scratch/site
install=("$python" -m pip install --quiet --upgrade --no-index --no-deps --no-build-isolation --target "$site")
compgen -G "$wheels/*.whl" > /dev/null && within 20 "${install[@]}" "$wheels"/*.whl
# Building writes into the tree it builds.
mkdir "$scratch/fork"
cp -r deepspeed requirements setup.py setup.cfg pyproject.toml README.md LICENSE MANIFEST.in "$scratch/fork"
sdist=$(ls "$wheels"/deepspeed-*.tar.gz)
DS_UPSTREAM=$sdist PYTHONPATH=$site within 40 "${install[@]}" "$scratch/fork"

export PYTHONPATH=$site DS_ACCELERATOR=cuda PYTHONDONTWRITEBYTECODE=1
status=0
within 130 "$python" -m pytest -q -p no:cacheprovider tests/unit/checkpoint/test_affine_transfer_executor_gpu.py ||
    status=$?
within 120 "$python" benchmarks/affine_transfer/bench_gpu.py --json "$results/gpu.json" || status=$?
exit "$status"
