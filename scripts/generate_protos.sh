#!/usr/bin/env bash
# Generates the Python code of protos/**/*.proto, typed, beside the .proto files or under the folder given.
# usage: scripts/generate_protos.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-protos}
export PATH="$PWD/.venv/bin:$PATH" # where protoc finds protoc-gen-mypy and protoc-gen-mypy_grpc
find "$out" -name '*_pb2*.py*' -delete
find protos -name '*.proto' | sort | xargs python -m grpc_tools.protoc -I protos --python_out="$out" \
  --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out"
