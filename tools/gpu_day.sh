#!/bin/sh
# tools/gpu_day.sh PARTS… [options of benchmarks.gpu_day]: parts, 1 to 4, of the first day on a GPU, as far as time goes.
# PYTHON is the machine's own, with torch; tools/gpu_environment.sh adds what it lacks. Results stay in build/gpu_day. If
# OUT names a folder, an archive of them, gpu_day.tar.gz, goes there after each section and at the end, so that a killed
# part loses at most its current section. On another machine, put that archive into build/gpu_day as before.tar.gz:
# sections in it are not run again.
set -eu
begun="$(date +%s)"
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
results=build/gpu_day
mkdir -p "$results"
if [ -e "$results/before.tar.gz" ]; then
    tar -xzf "$results/before.tar.gz" -C "$results" --skip-old-files || echo "the archive of before cannot be read" >&2
    [ -e "$results/model" ] || rm -f "$results/checkpoint.md"
fi
. ./tools/gpu_environment.sh
pack() {
    [ -n "${OUT:-}" ] || return 0
    (cd "$results" && find . \( -name '*.md' -o -name '*.failed' -o -name '*.part' -o -name '*.jsonl' \) ! -path './extra/*') |
        tar -czf "$OUT/gpu_day.tar.half" -C "$results" -T - || true  # with what a section that was ended has said
    mv "$OUT/gpu_day.tar.half" "$OUT/gpu_day.tar.gz" || true
}
trap pack EXIT
trap 'exit 130' INT TERM
"$PYTHON" -m benchmarks.gpu_day --folder "$results" --begun "$begun" "$@"
