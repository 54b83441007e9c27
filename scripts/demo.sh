#!/usr/bin/env bash
# The complete workflow with a model of the repository: records a run, checks an offset map, writes tables, measures hotness, plans
# a cache.
# Usage: scripts/demo.sh [OUT]      OUT is the output directory (default: runs/demo in the repository)
# MOE_ANALYZE is the path of the program if it is already built. Otherwise it is built without SQL, the server, GPUs and the built-in model.
set -euo pipefail
out=${1:-$(dirname "$0")/../runs/demo}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."

if [ -n "${MOE_ANALYZE:-}" ]; then
  moe=("$MOE_ANALYZE")
else
  moe=(cargo run --quiet --package moe-analyze --no-default-features --features plot --)
  echo "building (the first build takes several minutes) ..." >&2
fi

step() {
  printf '\n$ moe-analyze' >&2
  printf ' %q' "$@" >&2
  printf '\n' >&2
  "${moe[@]}" "$@"
}

step record --model fixtures/tiny-qwen3moe-Q4_K_M.gguf \
  --prompt "The kernel driver is responsible for" --n-predict 64 --out "$out/run" --force
step gguf-map fixtures/tiny-gpt-oss-MXFP4.gguf --check-overlaps --out "$out/gpt-oss-map.csv" --force
step parquet "$out/run" --out "$out/tables" --force
step hotness "$out/run" --out "$out/learn.json" --plot "$out/hotness.png" --force
step plan "$out/learn.json" --model fixtures/tiny-qwen3moe-Q4_K_M.gguf --budget-mib 2
