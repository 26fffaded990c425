#!/bin/sh
# tools/gpu_wheels.sh [FOLDER]: downloads what a GPU machine without internet needs besides torch, Triton and
# transformers, as wheels for its Python 3.12. Together with the sources they must stay below 64 MiB.
set -eu
cd "$(dirname "$0")/.."
folder="${1:-build/gpu_day/wheels}"
mkdir -p "$folder"
platforms="--platform manylinux2014_x86_64"
for n in 17 28 31; do platforms="$platforms --platform manylinux_2_${n}_x86_64"; done
# shellcheck disable=SC2086
"${PYTHON:-python3}" -m pip download --quiet --dest "$folder" --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp $platforms -c constraints.txt \
    decord2 execnet google-crc32c googleapis-common-protos grpcio grpcio-health-checking grpcio-reflection httpcore2 \
    httpx2 iniconfig llguidance msgspec pluggy prometheus-client protobuf pytest pytest-asyncio pytest-timeout \
    pytest-xdist pyzmq structlog truststore valkey
mebibytes=$(($(du -sk "$folder" | cut -f1) / 1024))
sources=$(($(git ls-files -z | xargs -0 du -ck --apparent-size | tail -n 1 | cut -f1) / 1024))
echo "$(ls "$folder" | wc -l) wheels, $mebibytes MiB, beside sources of $sources MiB"
[ "$((mebibytes + sources))" -le 62 ] || { echo "that is more than can be carried" >&2; exit 1; }
