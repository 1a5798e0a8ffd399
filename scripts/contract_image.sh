#!/usr/bin/env bash
# Writes protos/released/<CONTRACT_VERSION>.binpb: the contract as released, which later protos are compared with.
# A released image is never rewritten: raise CONTRACT_VERSION first.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(.venv/bin/python -c 'from headrace.common.contract_version import CONTRACT_VERSION; print(CONTRACT_VERSION)')
image=protos/released/$version.binpb
if git ls-files --error-unmatch "$image" >/dev/null 2>&1; then
  echo "contract image: $image is released; raise CONTRACT_VERSION for a new contract" >&2
  exit 1
fi
mkdir -p protos/released
.venv/bin/buf build --exclude-source-info --output "$image"
echo "contract image: wrote $image"
