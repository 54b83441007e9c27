#!/usr/bin/env bash
# GPU tests and measurements: correctness, memory errors, speed, and the benefit of Post-Fetch. The binaries are built beforehand, so the
# machine with the GPU needs no Rust toolchain.
#
#   cargo build --release && cargo test --release --no-run -p moe-executor
#   MOE_ANALYZE=… TESTS=DIR docs/measurements/cuda.sh PART... > docs/measurements/cuda-PART.txt
#
# PART is one of:
#   tests       models compared with llama.cpp, kernels compared with the CPU
#   sound       recorded runs, checked with `info`
#   sanitizer   compute-sanitizer
#   kernels     times of kernels
#   speed       tokens per second of complete models
#   trace       cost of recording: paired ratios of blocks of 128 tokens that alternate in one process
#   parallel    tokens per second of several sequences at the same time
#   post-fetch  speed of Post-Fetch and overlap of its transfers
#   replay      the MoE layers alone with every policy
#
# TESTS is a directory with the test binaries `moe_executor` (unit tests) and `it`. MOE_FIXTURES is the directory of the fixtures (default:
# where the tests were built). WORK is a directory for synthetic models, 40 GB. NOTE is printed. Subsets: TOOLS (memcheck racecheck), SHAPES (models
# of post-fetch, separated by commas), ROUNDS (of post-fetch). JOBS is the number of concurrent tests and sanitizers.
set -uo pipefail
cd "$(dirname "$0")/../.."
moe_analyze=${MOE_ANALYZE:-target/release/moe-analyze}
tests=${TESTS:-target/release/deps}
work=${WORK:-$(mktemp -d)}

source docs/measurements/head.sh
echo "gpu        $(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader)"

# Prints the path of a synthetic model with the shape of a known one, and creates the model if necessary.
model() {
  local file=$work/$1${3:+-$3}.gguf
  [ -f "$file" ] || "$moe_analyze" --quiet synth --like "$1" ${2:+--quant "$2"} ${3:+--layers "$3"} --out "$file"
  echo "$file"
}

bench() {
  "$moe_analyze" --quiet bench -o json "$@" | python3 -c '
import json, sys
for row in json.load(sys.stdin):
    what = "prompt %d" % row["n_prompt"] if row["n_prompt"] else "decode %d" % row["n_gen"]
    speed = (row["policy"], row["n_threads"], what, row["avg_ts"], row["stddev_ts"])
    line = "  %-10s %3d threads  %-11s %9.2f ± %6.2f tokens/s" % speed
    if row["bandwidth_share"] and row["n_gen"]:
        share = (row["gb_per_s"], 100 * row["bandwidth_share"], row["bandwidth_gb_per_s"])
        line += ", %.0f GB/s of weights, %.1f %% of %.0f GB/s" % share
    print(line)
'
}

# Runs the commands on stdin, one per line, concurrently, each with another first GPU. Prints their output in the order of the commands.
side_by_side() {
  local n=0 command gpus
  gpus=$(nvidia-smi --list-gpus | wc -l)
  while read -r command; do
    while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-8}" ]; do wait -n; done
    CUDA_VISIBLE_DEVICES=$((n % gpus)),$(((n + 1) % gpus)) NUMBER=$n bash -c "$command" >"$work/said-$n" 2>&1 &
    n=$((n + 1))
  done
  wait
  for ((i = 0; i < n; i++)); do cat "$work/said-$i"; done
}

tests_part() {
  export MOE_REQUIRE=gpu # tests that would be skipped fail
  for name in moe_executor it; do
    printf '\n== %s\n' "$name"
    "$tests/$name" --list --format terse 2>/dev/null | sed -n 's/: test$//p' | grep -v timings | grep -E "^cuda::tests|^cuda_models::" |
      sed "s#.*#'$tests/$name' --exact & --nocapture#" | side_by_side |
      grep -E '^(random|tiny|test |testing)|FAILED|panicked|not run|outside' | grep -v 'test result: ok'
  done
}

# Prints the last line of a compute-sanitizer tool for a command, and the exit status if it is not 0.
sanitize() {
  local tool=$1 log=$work/sanitizer-$NUMBER rc; shift
  rm -f "$log"
  timeout 300 compute-sanitizer --tool "$tool" --log-file "$log" "$@" >/dev/null 2>&1
  rc=$?
  echo "$(tail -1 "$log" 2>/dev/null || echo "no log")$([ $rc = 0 ] || echo ", exit status $rc")"
}

# Counts the experts of a model for its hot cache.
learn_file() {
  "$moe_analyze" --quiet record --model "fixtures/$1.gguf" -n 8 --ignore-eos --prompt "The quick brown fox" --trace experts \
    --out "$work/learn-$1" --force >/dev/null
  "$moe_analyze" --quiet hotness "$work/learn-$1" --out "$work/learn-$1.json" --force >/dev/null
}

# Records a run with the given options and prints whether `info` finds it sound.
check_run() {
  local out=$work/sound-$NUMBER rc
  "$moe_analyze" --quiet record --device cuda -n 3 --ignore-eos --prompts "$work/prompts.jsonl" --out "$out" --force "$@" >"$out.log" 2>&1
  rc=$?
  [ $rc = 0 ] || { echo "FAILED, exit status $rc: $(tail -1 "$out.log")"; return; }
  "$moe_analyze" --quiet info "$out" >"$out.info"
  rc=$?
  grep -E '^sound' "$out.info" | tr -s ' '
  [ $rc = 0 ] || echo "FAILED, exit status $rc of info"
}

sound_part() {
  export -f check_run
  export work moe_analyze
  printf '%s\n' '{"prompt": "The quick brown fox jumps"}' '{"prompt": "over"}' >"$work/prompts.jsonl"
  local model place policy batch
  for model in tiny-qwen3moe-Q4_K_M tiny-gpt-oss-MXFP4 random-qwen2moe-F16 random-dots1-F16; do
    learn_file "$model"
    for place in "-ngl 99" "-ngl 99 --cpu-moe" "-ngl 3" "--vram-mib 6" "-ngl 3 --n-cpu-moe 2"; do
      for policy in cpu gpu post-fetch "post-fetch --postfetch-cpu-limit 2" \
        "hot-cache --hot-cache $work/learn-$model.json --hot-cache-mib 1" "dynamic --hot-cache-mib 1 --predictor previous"; do
        for batch in 1 3 512; do
          echo "echo '-- $model $place --policy $policy --batch-size $batch:'" \
            "\$(check_run --model 'fixtures/$model.gguf' $place --policy $policy --batch-size $batch)"
        done
      done
    done
  done | side_by_side >"$work/sound"
  # One line for the batch sizes with the same result.
  awk -F ' --batch-size |: ' '{
    rest = substr($0, length($1 " --batch-size " $2) + 1)
    if ($1 == run && rest == result) sizes = sizes ", " $2
    else { if (run) print run " --batch-size " sizes result; run = $1; sizes = $2; result = rest }
  } END { if (run) print run " --batch-size " sizes result }' "$work/sound"
  echo "$(wc -l <"$work/sound") runs, $(grep -c FAILED "$work/sound") failed"
}

sanitizer_part() {
  export -f sanitize
  export work tests moe_analyze
  export prompt="a prompt of some length, so that many rows go through at once: one two three four five six seven eight nine ten"
  for tool in ${TOOLS:-memcheck racecheck}; do
    printf '\n== compute-sanitizer --tool %s\n' "$tool"
    {
      echo "echo '-- kernels'; sanitize $tool '$tests/moe_executor' --test-threads=1 cuda::tests::kernels"
      for part in plain::products_are_close plain::nan experts::fetched token::; do
        echo "echo '-- products ($part)'; sanitize $tool '$tests/moe_executor' --test-threads=1 products::$part"
      done
      for model in tiny-gpt-oss-MXFP4 tiny-qwen3moe-Q4_K_M; do
        learn_file "$model"
        for policy in gpu post-fetch "hot-cache --hot-cache $work/learn-$model.json --hot-cache-mib 1" "dynamic --hot-cache-mib 1"; do
          echo "echo '-- record --policy $policy, $model'; sanitize $tool '$moe_analyze' --quiet record" \
            "--model 'fixtures/$model.gguf' --device cuda --policy $policy -n 3 --prompt \"\$prompt\"" \
            "--out '$work/sanitized-$tool-$model-${policy%% *}' --force"
        done
      done
    } | side_by_side
  done
}

kernels_part() {
  "$tests/moe_executor" kernels::timings --ignored --nocapture 2>&1 | grep -v '^$\|^running\|^test '
  "$tests/moe_executor" products::timings --ignored --nocapture 2>&1 | grep -v '^$\|^running\|^test '
}

speed_part() {
  for shape in "gpt-oss-20b" "qwen3-30b-a3b Q4_K_M"; do
    set -- $shape
    printf '\n%s\n' "$shape"
    local file; file=$(model "$@")
    bench --model "$file" --device cuda -p 512 -n 64 -r 5 -t 8
  done
}

# Prints the rows of `bench --trace`.
trace_of() {
  printf -- '-- %s\n' "$*"
  "$moe_analyze" --quiet bench -o json --device cuda -t 16 -p 0 --trace off,experts,all "$@" | python3 -c '
import json, sys
for row in json.load(sys.stdin):
    speed = "%7.2f ± %5.2f tokens/s" % (row["avg_ts"], row["stddev_ts"])
    ratio = "time %.4f × [%.4f, %.4f]" % (row["time_ratio"], row["time_ratio_low"], row["time_ratio_high"])
    print("  %-8s %s, %s" % (row["trace"], speed, ratio))
'
}

trace_part() {
  for shape in "gpt-oss-20b MXFP4_MOE" "qwen3-30b-a3b Q4_K_M"; do
    set -- $shape
    printf '\n%s\n' "$shape"
    local file; file=$(model "$@")
    trace_of --model "$file" -n 128 -r 21
    trace_of --model "$file" -n 32 -r 15 --cpu-moe --policy post-fetch
    "$moe_analyze" --quiet record --model "$file" --device cuda -n 64 --ignore-eos --prompt "hello" --trace experts --out "$work/learn" \
      --force >/dev/null
    "$moe_analyze" --quiet hotness "$work/learn" --out "$work/learn.json" --force >/dev/null
    trace_of --model "$file" -n 64 -r 15 --cpu-moe --policy hot-cache --hot-cache "$work/learn.json" --hot-cache-mib 5000
  done
}

parallel_part() {
  for shape in "gpt-oss-20b MXFP4_MOE" "qwen3-30b-a3b Q4_K_M"; do
    set -- $shape
    printf '\n%s\n' "$shape"
    local file; file=$(model "$@")
    "$moe_analyze" --quiet bench -o json --model "$file" --device cuda -t 16 -p 0 -n 64 -r 3 --parallel 1,2,4,8,16,32 | python3 -c '
import json, sys
for row in json.load(sys.stdin):
    print("  %2d sequences %8.2f ± %6.2f tokens/s" % (row.get("n_parallel", 1), row["avg_ts"], row["stddev_ts"]))
'
  done
}

post_fetch_part() {
  local shapes shape
  IFS=, read -ra shapes <<<"${SHAPES:-gpt-oss-20b,qwen3-30b-a3b Q4_K_M,mixtral-8x7b Q4_K_M 8}"
  for shape in "${shapes[@]}"; do
    set -- $shape
    printf '\n%s\n' "$shape"
    local file; file=$(model "$@")
    # Alternately, so that other load on the machine affects all policies equally.
    for round in $(seq "${ROUNDS:-3}"); do
      for threads in 4 8 16; do
        bench --model "$file" --device cuda --policy cpu -p 0 -n 32 -r 5 -t $threads
        bench --model "$file" --device cuda --policy post-fetch -p 0 -n 32 -r 5 -t $threads
        bench --model "$file" --device cuda --policy gpu --cpu-moe -p 0 -n 32 -r 5 -t $threads
      done
    done
    # Half of the selected experts of a token; and the memory bandwidth of the CPU, which limits the overlap.
    local half=4 memory
    case $1 in gpt-oss*) half=2 ;; mixtral*) half=1 ;; esac
    memory=$("$moe_analyze" --quiet bench -o json --model "$file" --device cpu -p 0 -n 1 -r 1 -t 16 |
      python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["bandwidth_gb_per_s"])')
    for setting in "-t 4" "-t 8" "-t 16" "-t 8 --postfetch-block-on-miss 0" "-t 16 --postfetch-block-on-miss 0" \
      "-t 8 --postfetch-use-dedicated-streams 0" "-t 8 --postfetch-cpu-limit $half"; do
      printf '\n-- overlap, %s\n' "$setting"
      "$moe_analyze" --quiet record --model "$file" --device cuda --policy post-fetch $setting -n 48 --ignore-eos \
        --prompt "hello" --out "$work/run" --force >/dev/null
      # The summary, the first layers, and the GPU memory.
      "$moe_analyze" --quiet overlap "$work/run" --phase generate --memory-gb-s "$memory" |
        sed -n '1,12p; / scratchpad of \| in use at most/p'
    done
  done
}

replay_part() {
  for shape in "gpt-oss-20b" "qwen3-30b-a3b Q4_K_M"; do
    set -- $shape
    local file; file=$(model "$@")
    "$moe_analyze" --quiet record --model "$file" --device cuda -n 64 --ignore-eos --prompt "hello" \
      --out "$work/routing" --force >/dev/null
    for policy in "gpu" "cpu --cpu-moe" "post-fetch --cpu-moe" "gpu --cpu-moe"; do
      printf '\n-- %s, --policy %s\n' "$shape" "$policy"
      # The table header and the row for all layers.
      "$moe_analyze" --quiet replay "$work/routing" --model "$file" --device cuda --policy $policy -t 8 -r 2 --out "$work/replayed" \
        --force | sed -n '1,4p;$p'
    done
  done
}

for part in "$@"; do
  printf '\n#### %s\n' "$part"
  "${part//-/_}_part"
done
