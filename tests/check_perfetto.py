"""Decodes a trace of `convert --to perfetto` with the protobuf classes of PyPI's package `perfetto`, and compares it with its run.

    check_perfetto.py RUN TRACE      # prints one line with the numbers of passes, operations, flows and counters
"""

import json
import struct
import sys
from collections import defaultdict
from pathlib import Path

from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

RUN, FILE = map(Path, sys.argv[1:])
NO_LAYER = 65535
MUL_MAT_ID = 30
LANES = ("unknown", "cpu", "gpu_resident", "hot_cache", "post_fetched", "post_fetch_miss", "cache_hit", "cache_miss")
HITS = {"hot_cache", "post_fetched", "cache_hit"}
MISSES = {"cpu", "post_fetch_miss", "cache_miss"}
ROOT = "moe-analyze"


def text(field):
    return field.split(b"\0", 1)[0].decode()


# --- the run: operations, and passes as lists of operations -----------------------------------------------------------------------


class Operation:
    def __init__(self, record):
        time, self.token, layer, _thread, self.op, self.phase, self.n_sources = struct.unpack_from("<QIHHBBB", record)
        self.layer = None if layer == NO_LAYER else layer
        self.name = text(record[24:152])
        duration, self.n_tokens, self.sequence = struct.unpack_from("<QII", record, 860)
        self.start, self.end = time, time + duration
        self.bytes = struct.unpack_from("<I", record, 152 + 136)[0]
        self.tokens = []
        self.add(record)

    def add(self, record):
        k = record[856]
        ids, lanes = struct.unpack_from("<16i", record, 792)[:k], record[956 : 956 + k]
        assert not record[858] & 1, "no continuation records in these runs"
        self.tokens.append([(expert, LANES[lane]) for expert, lane in zip(ids, lanes)])

    def experts(self, lane=None):
        """The experts of all tokens, or those on a lane."""
        return [expert for token in self.tokens for expert, where in token if lane in (None, where)]

    def is_same(self, record):
        time, op = struct.unpack_from("<Q", record)[0], record[16]
        return (self.start, self.op, self.name) == (time, op, text(record[24:152]))


operations, passes = [], []
data = (RUN / "trace.bin").read_bytes()
for at in range(0, len(data), 1024):
    record = data[at : at + 1024]
    assert record[857] == 1, "these runs have records with extension 1"
    if operations and operations[-1].is_same(record):
        operations[-1].add(record)
        continue
    operation = Operation(record)
    operations.append(operation)
    layers = [o.layer for o in passes[-1] if o.layer is not None] if passes else []
    first = passes[-1][0] if passes else None
    is_back = layers and operation.layer is not None and operation.layer < layers[-1]
    is_repeated = first and (first.op, first.name) == (operation.op, operation.name)
    if first is None or is_back or is_repeated and (operation.layer is None or first.token != operation.token):
        passes.append([])
    passes[-1].append(operation)
manifest = json.loads((RUN / "manifest.json").read_text())
n_expert = manifest["model"]["n_expert"]


def json_lines(name):
    path = RUN / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- the trace: tracks, slices, counters ------------------------------------------------------------------------------------------

trace = Trace.FromString(FILE.read_bytes())
assert trace.packet[0].first_packet_on_sequence and trace.packet[0].track_descriptor.name == ROOT


def check_known(message):
    """Every field has a number that Perfetto defines."""
    assert len(UnknownFieldSet(message)) == 0, message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                check_known(part)


class Slice:
    def __init__(self, track, event, start, parent):
        self.track, self.name, self.start, self.parent = track, event.name, start, parent
        self.end = start
        self.category = event.categories[0]
        self.flows, self.ends_of_flows = list(event.flow_ids), list(event.terminating_flow_ids)
        self.values = {a.name: value_of(a) for a in event.debug_annotations}


def value_of(annotation):
    if annotation.array_values:
        return [value_of(value) for value in annotation.array_values]
    return getattr(annotation, annotation.WhichOneof("value"))


tracks, paths = {}, {}
slices, instants, counters = [], [], defaultdict(list)
open_slices, last_time = defaultdict(list), {}
for packet in trace.packet:
    check_known(packet)
    assert packet.trusted_packet_sequence_id == 1
    if packet.HasField("track_descriptor"):
        track = packet.track_descriptor
        assert track.uuid and track.uuid not in tracks
        tracks[track.uuid] = track
        if track.HasField("parent_uuid"):
            paths[track.uuid] = f"{paths[track.parent_uuid]}/{track.name}"
        else:
            assert track.name == ROOT
            paths[track.uuid] = ROOT
        continue
    event, time = packet.track_event, packet.timestamp
    track = event.track_uuid
    assert last_time.get(track, 0) <= time, f"{paths[track]} goes back from {last_time[track]} to {time}"
    last_time[track] = time
    assert tracks[track].HasField("counter") == (event.type == TrackEvent.TYPE_COUNTER)
    stack = open_slices[track]
    parent = stack[-1] if stack else None
    if event.type == TrackEvent.TYPE_SLICE_BEGIN:
        stack.append(Slice(paths[track], event, time, parent))
        slices.append(stack[-1])
    elif event.type == TrackEvent.TYPE_SLICE_END:
        stack.pop().end = time
    elif event.type == TrackEvent.TYPE_INSTANT:
        instants.append(Slice(paths[track], event, time, parent))
    else:
        counters[paths[track]].append((time, event.double_counter_value))
assert not any(open_slices.values()), "every slice ends"
assert all(len(counters[paths[uuid]]) > 0 for uuid, track in tracks.items() if track.HasField("counter"))


def of(category):
    return [event for event in slices + instants if event.category == category]


# --- passes, layers, operations ----------------------------------------------------------------------------------------------------


def span(group):
    return min(o.start for o in group), max(o.end for o in group)


def layer_track(layer):
    return f"{ROOT}/layers/" + ("no layer" if layer is None else f"layer {layer}")


found = sorted((s.start, s.end, s.values["token"], s.values["phase"]) for s in of("pass"))
assert found == sorted((*span(p), p[0].token, ("PROMPT", "GENERATE")[p[0].phase]) for p in passes)
assert {s.track for s in of("pass")} == {f"{ROOT}/passes"}

expected = []
for group in passes:
    visit = []
    for operation in group + [None]:
        if visit and (operation is None or operation.layer != visit[0].layer):
            expected.append((layer_track(visit[0].layer), *span(visit)))
            visit = []
        visit.append(operation)
assert sorted((s.track, s.start, s.end) for s in of("layer")) == sorted(expected)

found = sorted(of("operation"), key=lambda s: (s.start, s.end, s.track, s.name))
expected = sorted(operations, key=lambda o: (o.start, o.end, layer_track(o.layer), o.name))
assert len(found) == len(expected)
for event, operation in zip(found, expected):
    assert (event.track, event.name) == (layer_track(operation.layer), operation.name)
    assert (event.start, event.end) == (operation.start, operation.end)
    assert event.parent.category == "layer" and event.parent.start <= event.start <= event.end <= event.parent.end
    experts = operation.experts()
    if len(operation.tokens) == 1:
        assert event.values.get("experts", []) == experts, event.name
        assert len(event.values.get("weights", [])) == len(experts)
    else:
        assert event.values["experts"] == sorted(set(experts)), event.name

# --- lanes of experts --------------------------------------------------------------------------------------------------------------

expected = []
for operation in operations:
    for lane in {lane for token in operation.tokens for _, lane in token} - {"unknown"}:
        experts = operation.experts(lane)
        track = f"{ROOT}/lanes of experts/{lane}"
        expected.append((track, operation.start, operation.end, operation.name, sorted(set(experts)), len(experts)))
found = [(s.track, s.start, s.end, s.name, s.values["experts"], s.values["activations"]) for s in of("lane")]
assert sorted(found) == sorted(expected)

# --- counters of passes --------------------------------------------------------------------------------------------------------------

bytes_of_layer = defaultdict(int)
for operation in passes[0]:
    if operation.op == MUL_MAT_ID:
        bytes_of_layer[operation.layer] += operation.bytes // n_expert
hit_rates, expert_rates = [], []
for group in passes:
    start, end = span(group)
    routing = {}
    for operation in group:
        if operation.op == MUL_MAT_ID:
            routing.setdefault(operation.layer, operation)
    lanes = [lane for operation in routing.values() for token in operation.tokens for _, lane in token]
    hits, misses = sum(lane in HITS for lane in lanes), sum(lane in MISSES for lane in lanes)
    hit_rates.append((start, 100 * hits / (hits + misses)))
    n_bytes = sum(len(set(o.experts())) * bytes_of_layer[layer] for layer, o in routing.items())
    expert_rates.append((start, n_bytes * 1e9 / (end - start)))


def assert_close(found, expected):
    assert [time for time, _ in found] == [time for time, _ in expected], (found, expected)
    for (_, a), (_, b) in zip(found, expected):
        assert abs(a - b) <= 1e-9 * abs(b), (a, b)


has_cache = "hot_cache" in manifest or "dynamic_cache" in manifest or manifest["policy"] == "post-fetch"
assert_close(counters.pop(f"{ROOT}/counters/hit rate", []), hit_rates if has_cache else [])
assert_close(counters.pop(f"{ROOT}/counters/selected experts"), expert_rates)

# --- memory, devices ----------------------------------------------------------------------------------------------------------------

memory, sizes, backends = defaultdict(dict), {}, {}
for event in json_lines("buffers.jsonl"):
    time = event["timestamp_ns"]
    if event["event"] == "alloc":
        backends[event["buffer_id"]] = event["backend"]
    changed = {sizes.pop(event["buffer_id"], (None,))[0]} - {None}
    if event["event"] == "alloc":
        sizes[event["buffer_id"]] = event["backend"], event["size"]
        changed.add(event["backend"])
    for backend in changed:
        memory[backend][time] = sum(size for where, size in sizes.values() if where == backend)
for backend, values in memory.items():
    assert_close(counters.pop(f"{ROOT}/counters/memory {backend}"), sorted(values.items()))
devices = {s.track.rsplit("/", 1)[1] for s in of("device")}
assert devices <= set(backends.values()) and bool(devices) == bool(backends), devices

# --- transfers ----------------------------------------------------------------------------------------------------------------------

transfers = json_lines("transfers.jsonl")
copies = {tuple(s.flows): s for s in of("post-fetch") if s.flows}
uses = {tuple(s.ends_of_flows): s for s in of("post-fetch") if s.ends_of_flows}
assert copies.keys() == uses.keys() and all(len(flow) == 1 for flow in copies)
linked = [t for t in transfers if "transfer" in t and "product" in t]
assert len(copies) == len(linked)
for flow, transfer in zip(sorted(copies), linked):
    for part, slice_, row in ("transfer", copies[flow], "copy stream"), ("product", uses[flow], "down on the GPU"):
        assert (slice_.start, slice_.end) == (transfer[part]["start_ns"], transfer[part]["end_ns"])
        assert slice_.track == f"{ROOT}/Post-Fetch/{row}"
        keys = ("token_id", "token"), ("layer_id", "layer"), ("bytes", "bytes"), ("n_fetched", "n_fetched")
        assert all(transfer[key] == slice_.values[name] for key, name in keys)
windows = [s for s in of("post-fetch") if s.track.endswith("/gate and up on the CPU")]
assert [(s.start, s.end) for s in windows] == [(t["window"]["start_ns"], t["window"]["end_ns"]) for t in transfers]
rates = []
for transfer in transfers:
    if "transfer" in transfer:
        start, end = transfer["transfer"]["start_ns"], transfer["transfer"]["end_ns"]
        rates += [(start, transfer["bytes"] * 1e9 / (end - start)), (end, 0)]
assert_close(counters.pop(f"{ROOT}/counters/copies to the GPU", []), rates)
counters = {path: values for path, values in counters.items() if values}
assert not counters, counters.keys()

print(f"{len(passes)} passes, {len(operations)} operations, {len(copies)} flows, as in the run")
