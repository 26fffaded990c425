#!/bin/sh
# Generates the contract's Go stubs in twinlensv1/ and fetches their modules. Needs protoc, protoc-gen-go and protoc-gen-go-grpc.
set -eu
cd "$(dirname "$0")"
names=""
for name in encoder llm media; do
  names="$names,Mtwinlens/v1/$name.proto=twinlens-example/twinlensv1"
done
protoc --proto_path=../../proto \
  --go_out=. --go_opt="module=twinlens-example$names" \
  --go-grpc_out=. --go-grpc_opt="module=twinlens-example$names" \
  twinlens/v1/encoder.proto twinlens/v1/llm.proto twinlens/v1/media.proto
if [ "$(go env GO111MODULE)" != off ]; then
  go mod tidy
fi
