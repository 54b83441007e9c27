"""Reads the outputs of `convert` with implementations of the format descriptions, and compares them with the run's records.

    exports.py DIR      # DIR contains the run in DIR/run, and the outputs of tests/exports.rs; prints one line per format
"""

import csv
import json
import struct
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

DIR = Path(sys.argv[1])
N_LAYER, N_EXPERT, K = 6, 32, 4


def text(field):
    return field.split(b"\0", 1)[0].decode()


# (token, phase, layer) -> experts and weights, in the order of the trace; and the operations
routing, operations = {}, []
trace = (DIR / "run" / "trace.bin").read_bytes()
for at in range(0, len(trace), 1024):
    record = trace[at : at + 1024]
    time, token, layer, _thread, op, phase, n_sources = struct.unpack_from("<QIHHBBB", record)
    name, k = text(record[24:152]), record[856]
    experts = struct.unpack_from("<16i", record, 792)[:k]
    if not operations or operations[-1][:2] != (time, name):
        source = record[152:312]
        size, offset = struct.unpack_from("<I", source, 136)[0], struct.unpack_from("<Q", source, 144)[0]
        operations.append((time, name, token, layer, phase, list(experts), text(source), size, offset))
    if name.startswith("ffn_moe_gate-"):
        weights = struct.unpack_from("<16f", record, 892)[:k]
        routing[token, phase, layer] = list(experts), list(weights)
n_tokens = 1 + max(token for token, _, _ in routing)

counts = np.zeros((N_LAYER, N_EXPERT), dtype=np.int64)
masses = np.zeros((N_LAYER, N_EXPERT))
for (_, _, layer), (experts, weights) in routing.items():
    for expert, weight in zip(experts, weights):
        counts[layer, expert] += 1
        masses[layer, expert] += weight
assert counts.sum() == len(routing) * K


def passed(name):
    print(f"{name}: as in the run")


# NumPy: routing in the format of vLLM, counts
array = np.load(DIR / "routing.npy", allow_pickle=False)
assert array.dtype == np.int16 and array.shape == (n_tokens, N_LAYER, K), (array.dtype, array.shape)
expected = np.full_like(array, -1)
for (token, _, layer), (experts, _) in routing.items():
    expected[token, layer] = experts
assert (array == expected).all() and (expected == -1).sum() == 9 * K
passed("npy")
array = np.load(DIR / "counts.npy", allow_pickle=False)
assert array.dtype == np.int64 and (array == counts).all()
passed("npy-counts")

# matrices
assert json.loads((DIR / "sglang.json").read_text()) == {"logical_count": counts.tolist()}
passed("sglang")
assert json.loads((DIR / "eplb.json").read_text()) == counts.tolist()
passed("eplb")
assert (np.loadtxt(DIR / "eplb.csv", delimiter=",", dtype=np.int64) == counts).all()
passed("eplb-csv")

# colibri: triples of numbers, negative layers are headers
triples = [tuple(map(int, line.split())) for line in (DIR / "coli_usage").read_text().splitlines()]
assert triples[0] == (-1, N_LAYER, N_EXPERT)
assert triples[1:] == [(l, e, counts[l, e]) for l, e in np.ndindex(*counts.shape) if counts[l, e]]
passed("coli-usage")

# ds4: the hottest expert is first
lines = (DIR / "hotlist").read_text().splitlines()
assert lines[0] == "# ds4 expert hotlist v1"
rows = [line.split() for line in lines if not line.startswith("#")]
hits = [int(row[2]) for row in rows]
assert hits == sorted(hits, reverse=True) and len(rows) == (counts > 0).sum()
for layer, expert, n, weight in rows:
    place = int(layer), int(expert)
    assert int(n) == counts[place] and abs(float(weight) - masses[place]) < 1e-5, place
passed("ds4-hotlist")

# Mesh-LLM: one ranking per layer, the heaviest expert is first
for layer in range(N_LAYER):
    lines = (DIR / "rankings" / f"layer-{layer:03}.csv").read_text().splitlines()
    assert f"# layer={layer}" in lines
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    order = [int(row["expert_id"]) for row in rows]
    assert order == [e for e in np.argsort(-masses[layer], kind="stable") if counts[layer, e]], layer
    for row in rows:
        expert = int(row["expert_id"])
        assert int(row["selection_count"]) == counts[layer, expert]
        assert float(row["total_mass"]) == masses[layer, expert]
        assert abs(float(row["mass_fraction"]) - masses[layer, expert] / masses[layer].sum()) < 1e-9
passed("mesh-llm")

# tokens: JSON lines and BigMoeOnEdge's CSV
lines = [json.loads(line) for line in (DIR / "tokens.jsonl").read_text().splitlines()]
phases = {"prefill": 0, "decode": 1}
found = {(line["t"], phases[line["phase"]], line["layer"]): (line["experts"], line["weights"]) for line in lines}
assert found == routing and len(lines) == len(routing)
passed("jsonl")
found = defaultdict(lambda: ([], []))
lines = (DIR / "route.csv").read_text().splitlines()
assert lines[0] == "# route_trace v1" and f"n_expert={N_EXPERT}" in lines[1].split()
for row in csv.DictReader(line for line in lines if not line.startswith("#")):
    experts, weights = found[int(row["step"]), int(row["phase"]), int(row["layer"])]
    assert int(row["slot"]) == len(experts) and row["turn"] == "0"
    experts.append(int(row["expert"]))
    weights.append(float(row["weight"]))
assert found == routing
passed("bigmoeonedge")

# the learn file
learn = json.loads((DIR / "learn.json").read_text())
assert (learn["schema"], learn["n_expert"], learn["n_expert_used"]) == ("llama.cpp.moe_layer_opt_perf.v1", N_EXPERT, K)
found = {(layer["layer"], e): n for layer in learn["layers"] for e, n in layer["experts"]}
assert found == {(l, e): counts[l, e] for l, e in np.ndindex(*counts.shape) if counts[l, e]}
passed("learn")

# TensorAccessLog's JSON: one entry per operation; the first file contains the prompt and the first pass after it
entries = []
for i, path in enumerate(sorted((DIR / "tokens").glob("token-*.json"))):
    token = json.loads(path.read_text())
    assert path.name == f"token-{i:05}.json" and token["token_id"] == i
    assert token["metadata"]["total_entries"] == len(token["entries"])
    assert token["metadata"]["timestamp_start_ns"] == token["entries"][0]["timestamp_ns"]
    entries += token["entries"]
assert i == 5, "six generated tokens"
assert len(entries) == len(operations)
for entry, (time, name, token, layer, phase, experts, source, size, offset) in zip(entries, operations):
    assert (entry["timestamp_ns"], entry["dst_name"], entry["layer_id"]) == (time, name, layer)
    assert entry["phase"] == ("PROMPT", "GENERATE")[phase]
    assert entry["token_id"] == (token - 10 if phase else 0)
    assert (entry["expert_ids"], entry["num_experts"]) == (experts, len(experts))
    assert entry["operation_type"] == ("MUL_MAT_ID" if experts else "MUL_MAT")
    first = entry["sources"][0]
    assert (first["name"], first["size_bytes"], first["disk_offset"]) == (source, size, offset)
passed("thesis-json")
