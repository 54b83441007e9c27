#!/usr/bin/env bash
# The map of a model of 13.8 GB: `moe-analyze gguf-map` against the package `gguf` from PyPI, as whole processes, in turn.
# The models are sparse files with true headers, so nothing is downloaded and little is written.
#
#   docs/measurements/gguf-map.sh [REPETITIONS] > docs/measurements/gguf-map.txt
#
# MOE_ANALYZE names the binary (a release build), PYTHON an interpreter with the package; NOTE is printed.
set -euo pipefail
cd "$(dirname "$0")/../.."

repetitions=${1:-7}
moe_analyze=${MOE_ANALYZE:-target/release/moe-analyze}
python=${PYTHON:-python3}
models=$(mktemp -d)
trap 'rm -rf "$models"' EXIT

for name in olmoe-1b-7b mixtral-8x7b qwen3-30b-a3b qwen3-next-80b gpt-oss-20b gpt-oss-120b; do
  "$moe_analyze" --quiet synth --like "$name" --sparse --out "$models/$name.gguf"
done
# The same header before ten times the bytes: what is behind the last tensor is no fault.
cp --sparse=always "$models/gpt-oss-20b.gguf" "$models/gpt-oss-20b-and-a-hole.gguf"
truncate --size=138G "$models/gpt-oss-20b-and-a-hole.gguf"

source docs/measurements/head.sh
echo "package    $("$python" -c '
import platform
from importlib.metadata import version
print("gguf", version("gguf") + ", numpy", version("numpy") + ", Python", platform.python_version())')"
echo

"$python" - "$moe_analyze" "$models" "$repetitions" <<'PYTHON'
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

moe_analyze, models, repetitions = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
READER = "import sys; from gguf import GGUFReader; GGUFReader(sys.argv[1])"


def ours(name):
    return [moe_analyze, "gguf-map", str(models / name), "--check-overlaps", "-o", "csv"]


def theirs(name):
    return [sys.executable, "-c", READER, str(models / name)]


def seconds(command):
    """Wall time of a process from its start to its end."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def peak_kib(command, key):
    """The most of a kind of memory that was seen while a process ran: looked at all the time at first, then every 5 ms."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak, looks, start = 0, 0, time.perf_counter()
    while process.poll() is None:
        if time.perf_counter() - start > 0.5:
            time.sleep(0.005)
        try:
            with open(f"/proc/{process.pid}/status") as status:
                lines = dict(line.split(":", 1) for line in status)
            peak = max(peak, int(lines.get(key, "0").split()[0]))
            looks += 1
        except (FileNotFoundError, ProcessLookupError):
            pass
    return peak, looks


def table(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join([row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:])]))
    print()


def ms(times):
    return f"{1000 * median(times):.1f}"


name = "gpt-oss-20b.gguf"
size = (models / name).stat().st_size
print(f"{name}: {size} bytes, wall time in ms of each process, in turn")
a, b = [], []
seconds(ours(name)), seconds(theirs(name))  # once, so that both find the header in memory
for _ in range(repetitions):
    a.append(seconds(ours(name)))
    b.append(seconds(theirs(name)))
table(
    [["", *map(str, range(1, repetitions + 1)), "median"]]
    + [[label, *(f"{1000 * t:.1f}" for t in times), ms(times)]
       for label, times in (("gguf-map --check-overlaps -o csv", a), ("GGUFReader", b))]
)
print(f"ratio of the medians: {median(b) / median(a):.1f}\n")

print("anonymous memory (RssAnon), the most that was seen, in MiB")
rows = [["", "peak", "looks"]]
for label, command in (("gguf-map", ours(name)), ("GGUFReader", theirs(name))):
    seen = [peak_kib(command, "RssAnon") for _ in range(3)]
    rows.append([label, f"{max(peak for peak, _ in seen) / 1024:.1f}", str(sum(n for _, n in seen))])
table(rows)

print(f"what the time grows with: median of {repetitions}, in ms")
rows = [["", "file GB", "header MB", "map rows", "ms"]]
rows.append(["--version", "", "", "", ms([seconds([moe_analyze, "--version"]) for _ in range(repetitions)])])
for path in sorted(models.iterdir(), key=lambda path: path.stat().st_size):
    csv = subprocess.run(ours(path.name), capture_output=True, text=True, check=True).stdout
    first = min(int(line.split(",")[12]) for line in csv.splitlines()[1:])
    times = [seconds(ours(path.name)) for _ in range(repetitions)]
    rows.append([path.stem, f"{path.stat().st_size / 1e9:.1f}", f"{first / 1e6:.2f}", str(csv.count("\n") - 1), ms(times)])
table(rows)
PYTHON
