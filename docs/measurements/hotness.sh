#!/usr/bin/env bash
# Hotness of a routing.parquet against DuckDB's answer from the same file: within a process, with one thread and with all, and
# as a whole process. The trace is that of a demo run, repeated to 4 GiB.
#
#   scripts/demo.sh && docs/measurements/hotness.sh > docs/measurements/hotness.txt
#
# Ours counts more than the query: tokens and passes of each layer, router weights always, experts that a token names twice.
# DuckDB's whole process is Python's less what Python and `import duckdb` take by themselves.
#
# MOE_ANALYZE names the binary, BENCH the bench of hotness as cargo built it, RUN the run to repeat (default: runs/demo/run), ROUTING
# a table to take instead, PYTHON an interpreter with duckdb, NOTE is printed.
set -euo pipefail
cd "$(dirname "$0")/../.."

moe_analyze=${MOE_ANALYZE:-target/release/moe-analyze}
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${ROUTING:-}" ]; then
  "$python" docs/measurements/repeat_run.py "${RUN:-runs/demo/run}" "$work/run" 4096
  "$moe_analyze" --quiet parquet "$work/run" --out "$work/tables"
  ROUTING=$work/tables/routing.parquet
fi
if [ -z "${BENCH:-}" ]; then
  cargo bench --quiet --package moe-analysis --bench hotness --no-run
  BENCH=$(find target/release/deps -name 'hotness-*' -executable -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2)
fi

source docs/measurements/head.sh
echo

"$python" - "$moe_analyze" "$BENCH" "$ROUTING" <<'PYTHON'
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import duckdb

moe_analyze, bench, routing = sys.argv[1:]
ROUNDS = 7
THREADS = [1, os.cpu_count()]
QUERIES = {
    "count, weight": "select layer_id, expert_id, phase, count(*), sum(weight)",
    "count": "select layer_id, expert_id, phase, count(*)",
}
QUERIES = {name: f"{query} from read_parquet('{routing}') group by all order by all" for name, query in QUERIES.items()}

times = {}


def note(name, seconds):
    times.setdefault(name, []).append(seconds)


def ours(threads):
    """Criterion's median of counting the table within a process."""
    environment = os.environ | {"MOE_ANALYZE_ROUTING": routing, "RAYON_NUM_THREADS": str(threads)}
    command = [bench, "--bench", "routing.parquet", "--warm-up-time", "0.5", "--measurement-time", "1", "--noplot"]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    value, unit = re.search(r"time:\s+\[\S+ \S+ (\S+) (\S+)", out).groups()
    return float(value) * {"ms": 1e-3, "µs": 1e-6, "s": 1.0}[unit]


def query(sql, threads):
    duckdb.sql(f"set threads = {threads}")
    start = time.perf_counter()
    rows = duckdb.sql(sql).fetchall()
    return time.perf_counter() - start, rows


def process(command):
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


# Both say the same.
_, rows = query(QUERIES["count"], 1)
theirs = {}
for layer, expert, _, n in rows:
    theirs[layer, expert] = theirs.get((layer, expert), 0) + n
lines = subprocess.run([moe_analyze, "--quiet", "hotness", routing, "-o", "csv"], capture_output=True, text=True, check=True)
header, *lines = lines.stdout.splitlines()
columns = header.split(",")
fields = [dict(zip(columns, line.split(","))) for line in lines]
counted = {(int(row["layer_id"]), int(row["expert_id"])): int(row["count"]) for row in fields}
assert {key: n for key, n in counted.items() if n} == theirs
print(f"routing.parquet: {sum(theirs.values())} rows, {Path(routing).stat().st_size} bytes; duckdb {duckdb.__version__}")
print("both count the same\n")

bare = "import duckdb"
for _ in range(ROUNDS):
    for threads in THREADS:
        note(f"in process, {threads} threads: moe-analyze", ours(threads))
        for name, sql in QUERIES.items():
            note(f"in process, {threads} threads: DuckDB, {name}", median(query(sql, threads)[0] for _ in range(51)))
    note("whole process: moe-analyze hotness -o csv", process([moe_analyze, "--quiet", "hotness", routing, "-o", "csv"]))
    note("whole process: moe-analyze hotness (summary)", process([moe_analyze, "--quiet", "hotness", routing]))
    note("whole process: moe-analyze --version", process([moe_analyze, "--version"]))
    start = process([sys.executable, "-c", bare])
    sql = QUERIES["count, weight"]
    whole = process([sys.executable, "-c", f'{bare}; print(duckdb.sql("""{sql}""").fetchall())'])
    note("whole process: DuckDB, count, weight, without the start of Python and duckdb", whole - start)

print(f"milliseconds in turn, {ROUNDS} rounds; in process each is a median: of criterion's samples, of 51 queries")
for name, seconds in times.items():
    print(f"  {name:78}", *(f"{1e3 * s:6.1f}" for s in seconds), f"  median {1e3 * median(seconds):6.1f}")
PYTHON
