#!/bin/sh
# tools/gpu_day.sh PART [options of benchmarks.gpu_day]: one part, 1 to 4, of the first day on a GPU.
# PYTHON is that machine's own, with torch; wheels of what it lacks lie in build/gpu_day/wheels (tools/gpu_wheels.sh).
# Results stay in build/gpu_day; where OUT names a folder, they are copied there at the end, whatever happened.
set -eu
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-/opt/venv/bin/python}"
part="$1"
shift
results=build/gpu_day
mkdir -p "$results"
if [ ! -e "$results/extra/.installed" ] && ls "$results"/wheels/*.whl >/dev/null 2>&1; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$results/extra" "$results"/wheels/*.whl
    touch "$results/extra/.installed"
fi
export PYTHONPATH="$PWD/$results/extra${PYTHONPATH:+:$PYTHONPATH}"
status=0
"$PYTHON" -m benchmarks.gpu_day "$part" "$results" "$@" || status=$?
if [ -n "${OUT:-}" ]; then
    find "$results" \( -name '*.md' -o -name '*.failed' -o -name '*.part' -o -name '*.jsonl' \) -exec cp {} "$OUT" \;
fi
exit "$status"
