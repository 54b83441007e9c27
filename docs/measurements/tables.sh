#!/usr/bin/env bash
# Memory while a trace of 4 GiB becomes tables, and hotness from the table against DuckDB. The trace is that of a demo run,
# repeated; time and positions go on from one to the next.
#
#   scripts/demo.sh && docs/measurements/tables.sh > docs/measurements/tables.txt
#
# MOE_ANALYZE names the binary (a release build), RUN the run to repeat (default: runs/first), PYTHON an interpreter with duckdb,
# NOTE is printed. Speeds beside a copy in memory: cargo bench --package moe-trace --package moe-analysis.
set -euo pipefail
cd "$(dirname "$0")/../.."

moe_analyze=${MOE_ANALYZE:-target/release/moe-analyze}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "date       $(date -u +%F)"
echo "machine    $(lscpu | sed -n 's/^Model name: *//p' | head -1), $(nproc) CPUs, $(uname -sr)"
echo "load       $(cut -d' ' -f1-3 /proc/loadavg)"
echo "program    $("$moe_analyze" --version), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
[ -z "${NOTE:-}" ] || echo "note       $NOTE"
echo

"${PYTHON:-python3}" - "$moe_analyze" "${RUN:-runs/first}" "$work" <<'PYTHON'
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import duckdb

moe_analyze, source, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
RECORD, SIZE = 1024, 4 << 30

run = work / "run"
run.mkdir()
for name in ("manifest.json", "gguf-map.parquet"):
    shutil.copy(source / name, run / name)
trace = (source / "trace.bin").read_bytes()
count = len(trace) // RECORD
first, last = (struct.unpack_from("<Q", trace, at * RECORD)[0] for at in (0, count - 1))
with open(run / "trace.bin", "wb") as out:
    for n in range(-(-SIZE // len(trace))):
        block = bytearray(trace)
        for at in range(0, len(block), RECORD):
            (timestamp,) = struct.unpack_from("<Q", block, at)
            struct.pack_into("<Q", block, at, timestamp + n * (last - first + 1))
            (token,) = struct.unpack_from("<I", block, at + 8)
            struct.pack_into("<I", block, at + 8, token + n * 100)
        out.write(block)
print(f"trace.bin: {(run / 'trace.bin').stat().st_size} bytes")


def peak(command):
    """Seconds of a process, and the most anonymous memory that was seen, in MiB, looked at every 2 ms."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    most = 0
    while process.poll() is None:
        try:
            with open(f"/proc/{process.pid}/status") as status:
                lines = dict(line.split(":", 1) for line in status)
            most = max(most, int(lines.get("RssAnon", "0").split()[0]))
        except (FileNotFoundError, ProcessLookupError):
            pass
        time.sleep(0.002)
    assert process.returncode == 0, command
    return time.perf_counter() - start, most / 1024


for command in (["parquet", str(run), "--out", str(work / "tables")], ["hotness", str(run)], ["accesses", str(run)]):
    seconds, most = peak([moe_analyze, "--quiet", *command])
    print(f"{command[0]:8} {seconds:6.2f} s, {(run / 'trace.bin').stat().st_size / seconds / 1e9:5.2f} GB/s of trace, at most {most:.1f} MiB of anonymous memory")

routing = work / "tables" / "routing.parquet"
query = f"""select layer_id, expert_id, phase, count(*), sum(weight) from read_parquet('{routing}')
            group by all order by layer_id, expert_id, phase"""
theirs, ours = [], []
duckdb.sql("set threads = 1")
for _ in range(7):
    start = time.perf_counter()
    rows = duckdb.sql(query).fetchall()
    theirs.append(time.perf_counter() - start)
    ours.append(peak([moe_analyze, "--quiet", "hotness", str(routing), "-o", "csv"])[0])
print(f"\nhotness of {sum(row[3] for row in rows)} rows of routing.parquet, seconds in turn; DuckDB with one thread, the query alone")
for name, times in (("moe-analyze hotness, whole process", ours), ("DuckDB", theirs)):
    print(f"  {name:34}", *(f"{t:7.4f}" for t in times), f"  median {median(times):7.4f}")
PYTHON
