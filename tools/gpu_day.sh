#!/bin/sh
# tools/gpu_day.sh PARTS… [options of benchmarks.gpu_day]: parts, 1 to 4, of the first day on a GPU, as far as nine minutes go.
# PYTHON is that machine's own, with torch; wheels of what it lacks lie in build/gpu_day/wheels (tools/gpu_wheels.sh).
# Results stay in build/gpu_day; where OUT names a folder, they are put there in one archive, gpu_day.tar.gz, after each
# section and once more at the end, so that a part that is killed has lost no more than the section that it was in. On a
# machine that has none of them, put that archive into build/gpu_day as before.tar.gz: what it says is not run again.
set -eu
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
results=build/gpu_day
mkdir -p "$results/extra"
if [ -e "$results/before.tar.gz" ]; then
    tar -xzf "$results/before.tar.gz" -C "$results" --skip-old-files || echo "the archive of before cannot be read" >&2
    [ -e "$results/model" ] || rm -f "$results/checkpoint.md"
fi
if [ ! -e "$results/extra/.installed" ] && ls "$results"/wheels/*.whl >/dev/null 2>&1; then
    if "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$results/extra" "$results"/wheels/*.whl; then
        touch "$results/extra/.installed"
    else
        echo "wheels could not be installed; what needs them will say so" >&2
    fi
fi
# PyAV's wheel is too large to be carried beside the rest. Nothing here decodes a sound: an empty folder lets services start.
"$PYTHON" -c 'import av' 2>/dev/null || mkdir -p "$results/extra/av"
export PYTHONPATH="$PWD/$results/extra${PYTHONPATH:+:$PYTHONPATH}"
pack() {
    [ -n "${OUT:-}" ] || return 0
    (cd "$results" && find . \( -name '*.md' -o -name '*.failed' -o -name '*.part' -o -name '*.jsonl' \) ! -path './extra/*') |
        tar -czf "$OUT/gpu_day.tar.gz" -C "$results" -T - || true  # with what a section that was ended has said
}
trap pack EXIT
trap 'exit 130' INT TERM
"$PYTHON" -m benchmarks.gpu_day --folder "$results" "$@"
