#!/usr/bin/env bash
# Memory while a trace of 4 GiB becomes tables. The trace is that of a demo run, repeated; time and positions go on from one to
# the next.
#
#   scripts/demo.sh && docs/measurements/tables.sh > docs/measurements/tables.txt
#
# MOE_ANALYZE names the binary (a release build), RUN the run to repeat (default: runs/first), PYTHON an interpreter,
# NOTE is printed. Speeds beside a copy in memory: cargo bench --package moe-trace --package moe-analysis.
set -euo pipefail
cd "$(dirname "$0")/../.."

moe_analyze=${MOE_ANALYZE:-target/release/moe-analyze}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

source docs/measurements/head.sh
echo

"${PYTHON:-python3}" - "$moe_analyze" "${RUN:-runs/first}" "$work" <<'PYTHON'
import subprocess
import sys
import time
from pathlib import Path

moe_analyze, source, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
run = work / "run"
subprocess.run([sys.executable, "docs/measurements/repeat_run.py", source, run, "4096"], check=True)
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
PYTHON
