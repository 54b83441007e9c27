#!/usr/bin/env bash
# Tokens per second of this executor and of llama.cpp, in one process each, in turn, on the same files with the same
# tokens, threads and batch: prompts of 512 tokens and 128 decoded tokens. llama.cpp runs with its defaults (flash
# attention, an F16 cache) and is compiled for this very processor.
#
#   RUSTFLAGS="-C target-cpu=native" cargo build --release --features llama-cpp
#   docs/measurements/speed.sh [REPETITIONS] > docs/measurements/speed.txt
#
# MOE_ANALYZE names the binary, THREADS the threads (default: all cores), MODELS a folder for the made-up models (default: a
# temporary one), NOTE is printed.
set -euo pipefail
cd "$(dirname "$0")/../.."

repetitions=${1:-5}
moe_analyze=${MOE_ANALYZE:-target/release/moe-analyze}
threads=${THREADS:-$(nproc)}
if [ -z "${MODELS:-}" ]; then
  MODELS=$(mktemp -d)
  trap 'rm -rf "$MODELS"' EXIT
fi

# name, architecture, layers, n_embd, heads, key heads, head width, experts, experts used, n_ff_exp, types, pre-tokenizer
while read -r name arch layers n_embd heads kv_heads head_dim experts used n_ff quant pre; do
  [ -f "$MODELS/$name.gguf" ] && continue
  cat > "$MODELS/$name.json" <<JSON
{"arch": "$arch", "n_layer": $layers, "n_embd": $n_embd, "n_head": $heads, "n_head_kv": $kv_heads, "head_dim": $head_dim,
 "n_expert": $experts, "n_expert_used": $used, "n_ff_exp": $n_ff, "quant": "$quant", "vocab": {"n_tokens": 32000, "pre": "$pre"}}
JSON
  "$moe_analyze" --quiet synth --spec "$MODELS/$name.json" --out "$MODELS/$name.gguf"
done <<'LIST'
qwen3moe-Q4_K_M qwen3moe 8 2048 32 4 128 64 8 768 Q4_K_M qwen2
qwen3moe-Q8_0 qwen3moe 6 2048 32 4 128 64 8 768 Q8_0 qwen2
gpt-oss-MXFP4 gpt-oss 4 2880 64 8 64 32 4 2880 MXFP4_MOE gpt-4o
qwen3moe-F16 qwen3moe 4 2048 32 4 128 64 8 768 F16 qwen2
LIST

source docs/measurements/head.sh
echo "threads    $threads"
echo

python3 - "$moe_analyze" "$threads" "$repetitions" fixtures/tiny-qwen3moe-Q4_K_M.gguf fixtures/tiny-gpt-oss-MXFP4.gguf \
  "$MODELS"/{qwen3moe-Q4_K_M,qwen3moe-Q8_0,gpt-oss-MXFP4,qwen3moe-F16}.gguf <<'PYTHON'
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

moe_analyze, threads, repetitions, *models = sys.argv[1:]
ENGINES = ("native", "llama.cpp")


def bench(engine, model):
    """Rows of one process: a prompt and a run of decoded tokens, each after one to warm up."""
    command = [moe_analyze, "--quiet", "bench", "--engine", engine, "--model", model, "-p", "512", "-n", "128", "-r", "1"]
    out = subprocess.run(command + ["-t", threads, "-o", "json"], capture_output=True, text=True, check=True).stdout
    return json.loads(out)


summary = [("model", "MB", "test", "native t/s", "llama.cpp t/s", "ratio", "native GB/s", "share of bandwidth")]
for model in models:
    rows = {engine: [] for engine in ENGINES}
    for _ in range(int(repetitions)):
        for engine in ENGINES:
            rows[engine].append(bench(engine, model))
    for i, test in enumerate(("prompt 512", "decode 128")):
        speeds = {engine: [run[i]["avg_ts"] for run in runs] for engine, runs in rows.items()}
        for engine in ENGINES:
            print(f"{Path(model).stem:22} {test} {engine:10}", *(f"{speed:10.2f}" for speed in speeds[engine]))
        ours, theirs = (median(speeds[engine]) for engine in ENGINES)
        ratio = median(a / b for a, b in zip(*speeds.values()))
        read = median(run[i]["gb_per_s"] for run in rows["native"])
        share = median(run[i]["bandwidth_share"] for run in rows["native"])
        size = rows["native"][0][i]["model_size"] / 1e6
        summary.append((Path(model).stem, f"{size:.0f}", test, f"{ours:.1f}", f"{theirs:.1f}", f"{ratio:.2f}", f"{read:.1f}",
                        f"{share:.2f}" if i else ""))
print("\nMedians; the ratio is the median of the pairs' ratios. Bytes are those of the weights that a test touches.")
widths = [max(len(row[i]) for row in summary) for i in range(len(summary[0]))]
for row in summary:
    print("  ".join(cell.rjust(width) if i > 2 else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))))
PYTHON
