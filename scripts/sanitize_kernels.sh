#!/usr/bin/env bash
# Build the C kernels with AddressSanitizer and UBSan into a temporary place, and run their tests there: a number read or
# written outside of its memory, or undefined arithmetic, ends the process. Twice: as it is, and with the narrow vectors of
# other processors, which one that has wide ones would never take.
set -euo pipefail
cd "$(dirname "$0")/.."
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
flags="-g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
for width in "" -DPCDEQ_NARROW; do
    lib="$place/lib$width"
    CC=gcc CFLAGS="$flags $width" LDFLAGS="$flags" "$PYTHON" setup.py --quiet --no-user-cfg build --build-base "$place/build$width" --build-lib "$lib"
    ls "$lib"/pcdeq/_kernels*.so > /dev/null # the build is optional: without a compiler there would be nothing to test
    # The interpreter is not built so: the runtime must be there before it. torch and Python keep memory to the end.
    (
        export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
        export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH="$lib" PCDEQ_KERNELS=1
        "$PYTHON" -c "from pcdeq.kernels.binding import _KERNELS as k; assert k.__file__.startswith('$lib'), k"
        "$PYTHON" -m pytest tests/kernels -p no:cacheprovider --capture=sys "$@" # a sanitizer's report goes past Python
    )
done
