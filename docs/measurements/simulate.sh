#!/usr/bin/env bash
# Simulated caches: look-ups in a second for each policy (criterion), beside a replay in plain Python of the same trace, and time
# and memory of a trace of 100 million choices.
#
#   docs/measurements/simulate.sh > docs/measurements/simulate.txt
#
# MOE_ANALYZE names the binary, BENCH the bench of simulate as cargo built it, PYTHON an interpreter with numpy, MILLIONS another
# length of the long trace, NOTE is printed.
set -euo pipefail
cd "$(dirname "$0")/../.."

moe_analyze=${MOE_ANALYZE:-target/release/moe-analyze}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${BENCH:-}" ]; then
  cargo bench --quiet --package moe-analysis --bench simulate --no-run
  BENCH=$(find target/release/deps -name 'simulate-*' -executable -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2)
fi

source docs/measurements/head.sh

printf '\nmillions of look-ups in a second: a trace of 3.84 million, a cache of 1/8 and of 1/2 of all 6144 experts\n'
"$BENCH" --bench --noplot --warm-up-time 0.5 --measurement-time 2 | grep -v '^Benchmarking\|^$\|outliers\|high\|low'

PYTHONPATH=docs/measurements "${PYTHON:-python3}" - "$moe_analyze" "$BENCH" "$work" "${MILLIONS:-100}" <<'PYTHON'
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

from replay import POLICIES, made_up

moe_analyze, bench, work, millions = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
N_LAYER, N_EXPERT, N_USED, BYTES = 48, 128, 8, 1 << 20
SLOTS = N_LAYER * N_EXPERT

sizes = work / "sizes.csv"
sizes.write_text("layer,expert,bytes\n" + "".join(f"{l},{e},{BYTES}\n" for l in range(N_LAYER) for e in range(N_EXPERT)))


def simulate(trace, *args):
    """Rows of `simulate`, its seconds and its most resident memory in MiB."""
    command = [moe_analyze, "--quiet", "simulate", str(trace), "--sizes", str(sizes), "-o", "csv", *args]
    out = open(work / "out.csv", "w+")
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=out)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    assert status == 0, command
    out.seek(0)
    header, *lines = out.read().splitlines()
    rows = [dict(zip(header.split(","), line.split(","))) for line in lines]
    return rows, seconds, usage.ru_maxrss / 1024


def ours(n_token, policy, part):
    """Seconds of one replay, criterion's median."""
    environment = os.environ | {"MOE_ANALYZE_TOKENS": str(n_token)}
    command = [bench, "--bench", f"simulate/{policy}/1/{part}", "--exact", "--noplot", "--warm-up-time", "0.5", "--measurement-time", "1"]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    value, unit = re.search(r"time:\s+\[\S+ \S+ (\S+) (\S+)", out).groups()
    return float(value) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


print("\nthe same trace in plain Python (replay.py) and here, one policy; hits are equal; three rounds in turn, medians")
for n_token, names in ((2000, ("lru",)), (60, ("lru", "lfu", "belady"))):
    tokens = made_up(n_token)
    trace = work / "trace.npy"
    np.save(trace, np.array(tokens, dtype=np.int16))
    n = n_token * N_LAYER * N_USED
    for name in names:
        for part in (8, 2):
            theirs, here = [], []
            for _ in range(3):
                start = time.perf_counter()
                hits = POLICIES[name](tokens, SLOTS // part)
                theirs.append(time.perf_counter() - start)
                here.append(ours(n_token, name, part))
            rows, *_ = simulate(trace, "--policy", name, "--budget-mib", str(SLOTS // part))
            assert int(rows[0]["hits"]) == hits, (rows, hits)
            theirs, here = median(theirs), median(here)
            print(f"  {name:7} 1/{part}  {n:8} look-ups  Python {n / theirs / 1e6:8.4f} M/s  here {n / here / 1e6:7.2f} M/s  ratio {theirs / here:8.0f}")

n_token = millions * 1_000_000 // (N_LAYER * N_USED) + 1
long = work / "long.npy"
array = np.lib.format.open_memmap(long, "w+", np.int16, (n_token, N_LAYER, N_USED))
dice = np.random.default_rng(0)
layer = np.arange(N_LAYER)[None, :, None]
for at in range(0, n_token, 8192):
    some = len(array[at : at + 8192])
    first = (dice.random((some, N_LAYER, 1)) ** 2 * N_EXPERT).astype(np.int64)
    step = 2 * dice.integers(0, 4, (some, N_LAYER, 1)) + 1
    array[at : at + some] = (first + step * np.arange(N_USED) + 11 * layer) % N_EXPERT
array.flush()
del array
print(f"\na trace of {n_token * N_LAYER * N_USED} choices ({long.stat().st_size >> 20} MiB of int16), read and simulated, whole process")
eighths = ",".join(str(SLOTS * part // 8) for part in range(1, 9))
for what, args in (
    ("lru, one pass for every budget; belady for the regret, at one budget", ["--policy", "lru", "--budget-mib", str(SLOTS // 8)]),
    ("lru from a tenth of the experts, at eight budgets", ["--policy", "lru", "--sample", "0.1", "--budget-mib", eighths]),
    ("belady, lru, lfu, s3fifo at two budgets", ["--policy", "belady,lru,lfu,s3fifo", "--budget-mib", f"{SLOTS // 8},{SLOTS // 2}"]),
):
    rows, seconds, most = simulate(long, *args)
    print(f"  {seconds:6.1f} s, at most {most:6.0f} MiB resident: {what}")
    for row in rows:
        error = row.get("hit_pct_cum_error")
        print(f"           {row['budget_mib']:>5} MiB {row['policy']:7} {row['hit_pct_cum']:>7} %" + (f" ± {error}" if error else ""))
PYTHON
