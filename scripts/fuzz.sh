#!/usr/bin/env bash
# Fuzzes the readers of untrusted files: scripts/fuzz.sh [TARGET|all [SECONDS]]
#
# A target runs for at least SECONDS of CPU time (default 600), and continues until SECONDS / 2 pass without new coverage, at most
# for FUZZ_LIMIT seconds of CPU time (default 6 * SECONDS). FUZZ_JOBS targets run in parallel (default 1), each as FUZZ_WORKERS processes (default 1) with a common corpus.
# Writes the results of all targets that were run on this machine to docs/measurements/fuzz.txt. Keeps the corpus in the cache.
# FUZZ_BIN is the directory of the targets if they are already built.
# Exit code 1: an input crashed a target. Its path is printed.
# Needs the AddressSanitizer runtime of the Rust toolchain, a C++ compiler and Linux.
set -euo pipefail
cd "$(dirname "$0")/.."

cache=${MOE_ANALYZE_CI_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/moe-analyze}
work=$cache/fuzz
targets=$(sed -n 's/^name = "\(.*\)"$/\1/p' fuzz/Cargo.toml | grep -v '^moe-fuzz$')
case ${1:-all} in
  all) selected=$targets ;;
  *) selected=$1 ;;
esac
seconds=${2:-600}
quiet=$((seconds / 2))
limit=${FUZZ_LIMIT:-$((6 * seconds))}
for target in $selected; do
  grep -qx "$target" <<<"$targets" || { echo "no target $target; targets: $(echo $targets)" >&2; exit 2; }
done

bin=${FUZZ_BIN:-$work/target/release}
if [ -z "${FUZZ_BIN:-}" ]; then
  # The same versions of dependencies as in the main workspace.
  cp Cargo.lock fuzz/Cargo.lock
  CARGO_TARGET_DIR=$work/target CARGO_INCREMENTAL=0 RUSTC_WRAPPER=$PWD/fuzz/rustc.sh \
    cargo build --release --manifest-path fuzz/Cargo.toml
fi

mkdir -p "$work/results"
TMPDIR=$(mktemp -d "$([ -w /dev/shm ] && echo /dev/shm || echo "${TMPDIR:-/tmp}")/moe-fuzz.XXXXXX")
export TMPDIR ASAN_OPTIONS=detect_leaks=0
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$TMPDIR"' EXIT
"$bin/seeds" fixtures "$TMPDIR/seeds"
# Keys and magic numbers of the formats: the short string literals of the readers.
LC_ALL=C grep -rhoE '"[A-Za-z_][A-Za-z0-9_. -]{1,30}"' crates/moe-{foreign,gguf,placement,trace}/src | LC_ALL=C sort -u >"$TMPDIR/dictionary"

# Prints the CPU seconds of a process, user and system. Fails if the process has ended.
cpu_seconds() {
  local stat
  stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
  # Skips the name, which may contain spaces.
  set -- ${stat##*) }
  [ "$1" != Z ] || return 1
  echo $(((${12} + ${13}) / $(getconf CLK_TCK)))
}

last_of() { # KEY LOG: prints the last value of KEY in a log
  tail -c 20000 "$2" | grep -o "$1: *[0-9]*" | tail -1 | grep -o '[0-9]*$' || echo 0
}

cpu_seconds_of_all() { # PID...: fails if a process has ended
  local pid sum=0 cpu
  for pid; do
    cpu=$(cpu_seconds "$pid") || return 1
    sum=$((sum + cpu))
  done
  echo "$sum"
}

fuzz() {
  local target=$1 logs=() log pids=() cpu=0 changed=0 cov=0 executions=0 now seen result="no crash"
  mkdir -p "$work/corpus/$target" "$work/artifacts/$target"
  for ((worker = 0; worker < ${FUZZ_WORKERS:-1}; worker++)); do
    log=$TMPDIR/$target.$worker.log
    "$bin/$target" -timeout=30 -rss_limit_mb=2048 -print_final_stats=1 -detect_leaks=0 -reload=1 -max_len=65536 \
      -dict="$TMPDIR/dictionary" \
      -artifact_prefix="$work/artifacts/$target/" "$work/corpus/$target" "$TMPDIR/seeds/$target" >"$log" 2>&1 &
    pids+=($!)
    logs+=("$log")
  done
  trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
  while sleep 2; now=$(cpu_seconds_of_all "${pids[@]}"); do
    cpu=$now
    for log in "${logs[@]}"; do
      seen=$(last_of cov "$log")
      [ "$seen" -le "$cov" ] || { cov=$seen changed=$cpu; }
    done
    if [ "$cpu" -ge "$seconds" ] && [ $((cpu - changed)) -ge "$quiet" ] || [ "$cpu" -ge "$limit" ]; then
      break
    fi
  done
  kill -INT "${pids[@]}" 2>/dev/null || true
  wait "${pids[@]}" || true
  for log in "${logs[@]}"; do
    executions=$((executions + $(last_of stat::number_of_executed_units "$log")))
    if ! grep -q 'libFuzzer: run interrupted' "$log"; then
      result=$(grep -o 'Test unit written to .*' "$log" | tail -1 || true)
      result="CRASH ${result##*/}"
      echo "$target: $(grep -m1 -E 'panicked at|ERROR: ' "$log" || tail -1 "$log")"
      grep -o 'Test unit written to .*' "$log" || true
      cp "$log" "$work/artifacts/$target/log"
    fi
  done
  if [[ $result == CRASH* ]]; then
    :
  elif [ "$cpu" -lt "$seconds" ]; then
    result="no crash, ended before $seconds s"
  elif [ $((cpu - changed)) -lt "$quiet" ]; then
    result="no crash, coverage still growing"
  fi
  printf '%-14s %12s %8s %12s %8s %8s  %s\n' "$target" "$executions" "$cpu" "$((cpu - changed))" "$cov" \
    "$(ls "$work/corpus/$target" | wc -l)" "$result" | tee "$work/results/$target"
}

for target in $selected; do
  while [ "$(jobs -rp | wc -l)" -ge "${FUZZ_JOBS:-1}" ]; do wait -n; done
  rm -f "$work/results/$target"
  fuzz "$target" &
done
wait

{
  echo "# scripts/fuzz.sh, $(rustc --version), AddressSanitizer; the code under test has debug assertions and overflow checks."
  echo "# Times are CPU seconds. A target stops after $seconds s if $quiet s have passed without new coverage, and at most after"
  echo "# $limit s. Edges: covered control-flow edges in the crates of this repository."
  printf '%-14s %12s %8s %12s %8s %8s  %s\n' target executions time "without new" edges inputs result
  for target in $targets; do
    cat "$work/results/$target" 2>/dev/null || printf '%-14s %12s\n' "$target" "not run"
  done
} >docs/measurements/fuzz.txt
cat docs/measurements/fuzz.txt
! grep -q CRASH docs/measurements/fuzz.txt
