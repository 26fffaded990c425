#!/usr/bin/env bash
# Fails if the stubs in twinlens/v1 differ from what tools/proto.sh generates.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
tools/proto.sh "$fresh"
stale=0
for file in "$fresh"/twinlens/v1/*; do
  diff -u "twinlens/v1/${file##*/}" "$file" || stale=1
done
for file in twinlens/v1/*_pb2*; do
  [ -e "$fresh/$file" ] || { echo "$file has no source in proto/"; stale=1; }
done
[ "$stale" = 0 ] || { echo "the stubs are stale: run \`make proto\`"; exit 1; }
echo "the stubs are fresh"
