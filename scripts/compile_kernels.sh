#!/usr/bin/env bash
# Build the C kernels with a compiler, for this very machine, into a temporary place, and run their tests there:
#   PYTHON=.venv/bin/python scripts/compile_kernels.sh clang
set -euo pipefail
cd "$(dirname "$0")/.."
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
compiler=$1
shift
CC=$compiler CFLAGS="-march=native" "$PYTHON" setup.py --quiet --no-user-cfg build --build-base "$place/build" --build-lib "$place/lib"
export PYTHONPATH="$place/lib" PCDEQ_KERNELS=1
"$PYTHON" -c "from pcdeq.kernels.binding import _KERNELS as k, engine; assert k.__file__.startswith('$place'), k; print(engine())"
"$PYTHON" -m pytest tests/kernels -p no:cacheprovider "$@"
