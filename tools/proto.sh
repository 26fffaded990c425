#!/usr/bin/env bash
# Generates the Python stubs in twinlens/v1 from proto/. Usage: tools/proto.sh [OUT_DIR]   (default: the repository root)
#
# The generator has a separate environment, so that its version, not the services', decides which protobuf runtimes can
# load the stubs: grpcio-tools 1.76 generates code for protobuf 6.31, which every later runtime accepts.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
env=.venv-proto
if [ ! -x "$env/bin/protoc-gen-mypy_grpc" ]; then
  "${PYTHON:-python3}" -m venv "$env"
  "$env/bin/pip" install -q -r tools/proto-requirements.txt
fi
generate() { PATH="$PWD/$env/bin:$PATH" "$env/bin/python" -m grpc_tools.protoc -I proto "$@"; }
generate --python_out="$out" --pyi_out="$out" proto/twinlens/v1/{media,encoder,llm}.proto
generate --grpc_python_out="$out" --mypy_grpc_out=quiet:"$out" proto/twinlens/v1/{encoder,llm}.proto
