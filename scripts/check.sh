#!/usr/bin/env bash
# Every check that needs no test run, one line each; prints the output of those that fail. mypy runs beside the others.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

# report NAME EXIT_CODE SECONDS: one line, and the output (in $work/NAME) of a check that failed.
report() {
  if [ "$2" = 0 ]; then
    printf '%-18s ok  %3d s\n' "$1" "$3"
  else
    printf '%-18s FAILED (exit %d)\n' "$1" "$2"
    cat "$work/$1"
    status=1
  fi
}

# check NAME COMMAND...: runs the command and reports it.
check() {
  local name=$1 start=$SECONDS
  shift
  "$@" >"$work/$name" 2>&1
  report "$name" $? $((SECONDS - start))
}

stubs_are_current() {
  scripts/generate_protos.sh "$work" && diff --recursive --exclude='*.proto' --exclude=__pycache__ protos/headrace "$work/headrace"
}

contract_is_compatible() {
  local newest
  newest=$(find protos/released -name '*.binpb' | sort --version-sort | tail -n 1)
  [ -n "$newest" ] || { echo "protos/released holds no image"; return 1; }
  "$bin/buf" breaking --against "$newest"
}

compose_files_are_valid() {
  "$bin/docker-compose" --file docker-compose.yml config --quiet || return
  local overlay
  for overlay in deploy/docker-compose.*.yml; do
    "$bin/docker-compose" --file docker-compose.yml --file "$overlay" config --quiet || return
  done
}

# Syntax only: no linter for shell scripts is among the packages used here.
scripts_parse() {
  local script
  for script in scripts/*.sh .ci/run; do bash -n "$script" || return; done
}

MYPYPATH=scripts "$bin/mypy" --no-error-summary src tests scripts >"$work/mypy" 2>&1 &
mypy_pid=$!
check ruff "$bin/ruff" check --quiet
check format "$bin/ruff" format --check --quiet
check shell scripts_parse
check layers "$bin/python" scripts/check_layers.py
check file-sizes "$bin/python" scripts/check_file_sizes.py
check buf-lint "$bin/buf" lint
check buf-breaking contract_is_compatible
check stubs stubs_are_current
check dockerfiles "$bin/hadolint" deploy/gateway.Dockerfile deploy/core.Dockerfile
check compose compose_files_are_valid
wait "$mypy_pid"
report mypy $? "$SECONDS"
exit $status
