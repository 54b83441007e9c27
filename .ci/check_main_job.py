"""Checks the output of the main job with an independent reader of the trace and the model (standard library only)."""

import csv
import json
import struct
import sys
from collections import Counter, defaultdict
from pathlib import Path

out = Path(sys.argv[1])
run = out / "run"
N_LAYER, N_EXPERT, K = 6, 32, 4


def text(field):
    return field.split(b"\0", 1)[0].decode()


trace = (run / "trace.bin").read_bytes()
assert len(trace) % 1024 == 0, len(trace)
manifest = json.loads((run / "manifest.json").read_text())
assert manifest["records"] == len(trace) // 1024
assert manifest["tokens"] == {"prompt": 9, "generated": 64, "sequences": 1}, manifest["tokens"]

counts, rows = defaultdict(Counter), Counter()
for at in range(0, len(trace), 1024):
    record = trace[at : at + 1024]
    timestamp, _token, layer, _thread, _op, _phase, n_sources = struct.unpack_from("<QIHHBBB", record)
    assert timestamp > 0 and n_sources <= 4
    if text(record[24:152]).startswith("ffn_moe_gate-"):
        ids = struct.unpack_from("<16i", record, 792)[: record[856]]
        assert len(set(ids)) == K, ids
        counts[layer].update(ids)
        rows[layer] += 1

# The nine prompt tokens are routed in every layer except the last one, which computes only one of them.
assert [rows[layer] for layer in range(N_LAYER)] == [73] * 5 + [65], rows

learn = json.loads((out / "learn.json").read_text())
assert learn["schema"] == "llama.cpp.moe_layer_opt_perf.v1" and learn["mode"] == "update"
assert (learn["n_expert"], learn["n_expert_used"]) == (N_EXPERT, K)
assert [layer["layer"] for layer in learn["layers"]] == list(range(N_LAYER))
for layer in learn["layers"]:
    assert layer["experts"] == sorted([e, n] for e, n in counts[layer["layer"]].items()), layer["layer"]
    assert layer["cold_experts"] == layer["experts"] and layer["hot_experts"] == []
    assert sum(n for _, n in layer["experts"]) == rows[layer["layer"]] * K == layer["cold_slots_total"]

# The rows of the offset map cover the data of the other model: no overlaps, and only padding to 32 bytes in between.
with (out / "gpt-oss-map.csv").open() as file:
    places = sorted((int(row["file_offset"]), int(row["size_bytes"])) for row in csv.DictReader(file))
assert len(places) == 117 + 18 * 31, len(places)
for (offset, size), (following, _) in zip(places, places[1:]):
    assert 0 <= following - (offset + size) < 32, (offset, size, following)
offset, size = places[-1]
assert offset + size == Path("fixtures/tiny-gpt-oss-MXFP4.gguf").stat().st_size

for name in ("ops", "accesses", "routing"):
    table = (out / "tables" / f"{name}.parquet").read_bytes()
    assert table[:4] == table[-4:] == b"PAR1", name
assert (out / "hotness.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
print("main job: trace, learn file, map and tables agree")
