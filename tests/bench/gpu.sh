#!/bin/bash
# Check and time training and serving on one NVIDIA GPU, and print a table: tests/bench/gpu.sh > table.txt
# It takes Python 3.11 or newer and the network, and sets up a .venv of its own (VENV=.venv-gpu) with the CUDA builds.
#     MODEL=DIR tests/bench/gpu.sh      # a real dense model (recipes/get_model.py fetches one); default: random weights
#     DEVICE=cpu tests/bench/gpu.sh     # the same on a CPU, small and with the torch engine, in .venv: does it still work?
# JSON=FILE keeps the figures. Exit 4 where a check does not hold.
set -eu -o pipefail
cd "$(dirname "$0")/../.."
export DEVICE=${DEVICE:-cuda}
if [ "$DEVICE" = cpu ]; then
    export ACCELERATE_USE_CPU=true
    python=.venv/bin/python
else
    venv=${VENV:-.venv-gpu}
    python=$venv/bin/python
    if ! "$python" -c 'import vllm, legorl' 2>/dev/null; then
        python3 -m venv "$venv" >&2
        "$venv/bin/pip" install -q -e '.[cuda]' >&2
    fi
    "$python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "gpu.sh: torch sees no GPU here")'
fi
exec "$python" tests/bench/gpu.py
