#!/usr/bin/env bash
# What recording costs: the same text formed with --trace off, experts and all, as whole processes in turn.
#
#   docs/measurements/recording.sh [REPETITIONS] > docs/measurements/recording.txt
#
# MOE_ANALYZE names the binary (a release build), MODEL a model of 1 GB or more (default: one is made up), THREADS the
# threads (default: all cores), NOTE is printed.
set -euo pipefail
cd "$(dirname "$0")/../.."

repetitions=${1:-7}
moe_analyze=${MOE_ANALYZE:-target/release/moe-analyze}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${MODEL:-}" ]; then
  MODEL=$work/qwen3moe-Q4_K_M.gguf
  cat > "$work/spec.json" <<'JSON'
{"arch": "qwen3moe", "n_layer": 8, "n_embd": 2048, "n_head": 32, "n_head_kv": 4, "head_dim": 128, "n_expert": 64, "n_expert_used": 8,
 "n_ff_exp": 768, "quant": "Q4_K_M", "vocab": {"n_tokens": 32000, "pre": "qwen2"}}
JSON
  "$moe_analyze" --quiet synth --spec "$work/spec.json" --out "$MODEL"
fi

source docs/measurements/head.sh
echo

python3 - "$moe_analyze" "$work" "$repetitions" "${THREADS:-$(nproc)}" "$MODEL" <<'PYTHON'
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

moe_analyze, work, repetitions, threads, big = sys.argv[1:]
MODES = ("off", "experts", "all")


def run(model, mode, n_predict):
    """Wall time of a process, and its records."""
    out = Path(work) / "run"
    command = [moe_analyze, "--quiet", "record", "--model", model, "--prompt", "It was", "--n-predict", str(n_predict)]
    command += ["--ignore-eos", "-t", threads, "--trace", mode]
    if mode != "off":
        command += ["--out", str(out)]
    shutil.rmtree(out, ignore_errors=True)
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    seconds = time.perf_counter() - start
    return seconds, (out / "trace.bin").stat().st_size // 1024 if mode != "off" else 0


for model, n_predict in (("fixtures/tiny-qwen3moe-Q4_K_M.gguf", 900), ("fixtures/tiny-gpt-oss-MXFP4.gguf", 900), (big, 100)):
    # A run of one token has what a run directory costs by itself: the map, the manifest, the graphs.
    lengths = (1, n_predict)
    times = {(mode, n): [] for mode in MODES for n in lengths}
    records = {}
    for mode in MODES:
        run(model, mode, 1)
    for _ in range(int(repetitions)):
        for n in lengths:
            for mode in MODES:
                seconds, records[mode, n] = run(model, mode, n)
                times[mode, n].append(seconds)
    print(f"{Path(model).stem}: seconds of each process, in turn")
    for (mode, n), seconds in times.items():
        print(f"  {mode:8} {n:4} tokens", *(f"{t:8.4f}" for t in seconds), f"  median {median(seconds):8.4f}")
    token = median(times["off", n_predict]) / n_predict
    for mode in MODES[1:]:
        once, whole = (median(b - a for a, b in zip(times["off", n], times[mode, n])) for n in lengths)
        extra = records[mode, n_predict] - records[mode, 1]
        print(f"  {mode}: {1000 * once:.1f} ms for a run; {1e9 * (whole - once) / extra:.0f} ns for each of {extra} records,"
              f" {100 * (whole - once) / (token * n_predict):.2f} % of the time ({1000 * token:.2f} ms a token with recording off)")
    print()
PYTHON
