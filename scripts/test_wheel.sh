#!/usr/bin/env bash
# Install a wheel in a fresh environment and run the tests against it, where the source tree cannot be imported:
#   scripts/test_wheel.sh dist/pcdeq-*.whl [ARGUMENTS OF PYTEST]
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(realpath "$1")
shift
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

# What tests read of the checkout, and nothing of src.
cp -r tests examples docs benchmarks scripts results .ci .github .pre-commit-config.yaml Makefile ./*.md ./*.txt ./*.cff \
    pyproject.toml setup.py "$place"

"${PYTHON:-python3}" -m venv "$place/venv"
install=("$place/venv/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt)
"${install[@]}" "$wheel"
cd "$place"
export PATH="$place/venv/bin:$PATH"
unset PYTHONPATH
# With nothing but the core: what it brings is enough for a layer, a proof and a trained network.
python - <<'CHECK'
import pcdeq, sys, torch
from pcdeq.kernels.binding import engine
assert pcdeq.__file__.startswith(sys.prefix), pcdeq.__file__
assert pcdeq.certify(pcdeq.load("pcdeq-1-l-tanh-mnist"), torch.rand(2, 1, 28, 28)).share == 1
print(f"pcdeq {pcdeq.__version__} in {pcdeq.__file__}: {engine()}")
CHECK
"${install[@]}" "$wheel[test]"
pcdeq --help >/dev/null
python -m pcdeq list >/dev/null
# The doctests are those of the installed package.
python -m pytest -p no:cacheprovider --pyargs "$@" tests pcdeq
