//! Values of a small run, decoded with the definitions of the exporter. `tests/check_perfetto.py` uses Perfetto's own definitions.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use moe_trace::record::{EXT_V1, PHASE_GENERATE, SOURCE_BUFFER, lane, set_name};
use moe_trace::{LayerId, ModelInfo, NO_LAYER, Run, TensorAccessLog, ops};
use prost::Message;
use serde_json::{Value, json};
use zerocopy::IntoBytes;

use super::proto::{DebugAnnotation, TracePacket, TrackEvent, kind};
use super::*;
use crate::{ImportOptions, Input, detect, has_format};

#[derive(Clone, PartialEq, Message)]
struct Trace {
    #[prost(message, repeated, tag = "1")]
    packet: Vec<TracePacket>,
}

/// A matrix multiplication of a generated token.
fn record(name: &str, layer: u16, token: u32, start_ns: u64, duration_ns: u64) -> TensorAccessLog {
    let mut record = TensorAccessLog {
        operation_type: ops::MUL_MAT,
        phase: PHASE_GENERATE,
        ext_version: EXT_V1,
        ..TensorAccessLog::default()
    };
    set_name(&mut record.dst_name, name);
    record.layer_id.set(layer);
    record.token_id.set(token);
    record.timestamp_ns.set(start_ns);
    record.duration_ns.set(duration_ns);
    record.n_tokens.set(1);
    record
}

fn with_buffer(mut record: TensorAccessLog, buffer_id: u64) -> TensorAccessLog {
    record.num_sources = 1;
    record.sources[0].memory_source = SOURCE_BUFFER;
    record.sources[0].offset_or_buffer_id.set(buffer_id);
    record
}

fn with_experts(mut record: TensorAccessLog, experts: [(i32, f32, u8); 2]) -> TensorAccessLog {
    record.operation_type = ops::MUL_MAT_ID;
    record.num_experts = 2;
    for (slot, (expert, weight, lane)) in experts.into_iter().enumerate() {
        record.expert_ids[slot].set(expert);
        record.expert_weights[slot].set(weight);
        record.expert_lane[slot] = lane;
    }
    record
}

fn lines(values: &[Value]) -> String {
    values.iter().map(|value| format!("{value}\n")).collect()
}

/// Two passes. The second starts an operation of layer 0 before the previous one ends.
fn write_run(dir: &Path) {
    let (hot, cpu) = (lane::HOT_CACHE, lane::CPU);
    let gate = "ffn_moe_gate-0";
    let records = [
        with_buffer(record("norm-0", 0, 7, 1000, 100), 5),
        with_experts(
            record(gate, 0, 7, 1100, 300),
            [(3, 0.75, hot), (1, 0.25, cpu)],
        ),
        record("result_output", NO_LAYER, 7, 1400, 0),
        with_buffer(record("norm-0", 0, 8, 2000, 100), 5),
        with_experts(
            record(gate, 0, 8, 2050, 150),
            [(3, 0.5, hot), (2, 0.5, hot)],
        ),
    ];
    fs::write(dir.join("trace.bin"), records.as_bytes()).unwrap();
    let alloc = |ns: u64, id: u64, size: u64| {
        json!({
            "timestamp_ms": 0, "timestamp_ns": ns, "event": "alloc", "buffer_id": id, "buffer_ptr": 0, "size": size, "name": "x",
            "backend": "CUDA0", "usage": 2, "layer": 65535
        })
    };
    let buffers = [
        alloc(900, 5, 100),
        alloc(1500, 6, 50),
        json!({"timestamp_ms": 0, "timestamp_ns": 2100, "event": "dealloc", "buffer_id": 5}),
    ];
    fs::write(dir.join("buffers.jsonl"), lines(&buffers)).unwrap();
    let span = |start_ns: u64, end_ns: u64| json!({"start_ns": start_ns, "end_ns": end_ns});
    let transfer = json!({
        "sequence_id": 0, "token_id": 7, "phase": 1, "layer_id": 0, "n_tokens": 1, "n_experts": 2, "n_fetched": 1, "bytes": 400,
        "window": span(1000, 1300), "transfer": span(1010, 1210), "product": span(1300, 1320)
    });
    fs::write(dir.join("transfers.jsonl"), lines(&[transfer])).unwrap();
}

/// The packets and the notes of the run in `dir`.
fn exported(dir: &Path) -> (Vec<u8>, Vec<TracePacket>, Vec<String>) {
    let input = Input::Run(Box::new(Run::open(dir).unwrap()));
    let options = ImportOptions {
        model: Some(ModelInfo {
            expert_bytes: BTreeMap::from([(LayerId(0), 1000)]),
            ..ModelInfo::default()
        }),
        ..ImportOptions::default()
    };
    let export = Export::new(&input, &options).unwrap();
    let mut bytes = Vec::new();
    let losses = Perfetto.export(&export, &mut bytes).unwrap();
    let packets = Trace::decode(&bytes[..]).unwrap().packet;
    (bytes, packets, losses)
}

/// Names of the tracks; a second track of a name has an apostrophe.
fn track_names(packets: &[TracePacket]) -> BTreeMap<u64, String> {
    let mut names: BTreeMap<u64, String> = BTreeMap::new();
    for track in packets
        .iter()
        .filter_map(|packet| packet.track_descriptor.as_ref())
    {
        let mut name = track.name.clone().unwrap();
        if names.values().any(|other| *other == name) {
            name.push('\'');
        }
        names.insert(track.uuid.unwrap(), name);
    }
    names
}

/// Events as `TRACK TIME +NAME` (start), `-` (end), `!NAME` (instant) or `=VALUE` (counter).
fn events(packets: &[TracePacket]) -> Vec<String> {
    let names = track_names(packets);
    let event = |packet: &TracePacket| {
        let event = packet.track_event.as_ref()?;
        let name = event.name.as_deref().unwrap_or_default();
        let what = match event.r#type? {
            kind::SLICE_BEGIN => format!("+{name}"),
            kind::SLICE_END => "-".to_owned(),
            kind::INSTANT => format!("!{name}"),
            _ => format!("={}", event.double_counter_value?),
        };
        let track = &names[&event.track_uuid?];
        Some(format!("{track} {} {what}", packet.timestamp?))
    };
    packets.iter().filter_map(event).collect()
}

/// The events of a track with a name: the starts of slices.
fn slices(packets: &[TracePacket], track: &str, name: &str) -> Vec<TrackEvent> {
    let names = track_names(packets);
    let events = packets
        .iter()
        .filter_map(|packet| packet.track_event.as_ref());
    let found = events.filter(|event| {
        names[&event.track_uuid.unwrap()] == track && event.name.as_deref() == Some(name)
    });
    found.cloned().collect()
}

#[test]
fn writes_tracks_of_passes_layers_lanes_devices_copies_and_counters() {
    let dir = tempfile::tempdir().unwrap();
    write_run(dir.path());
    let (_, packets, losses) = exported(dir.path());
    let expected = [
        "memory CUDA0 900 =100",
        "memory CUDA0 1500 =150",
        "memory CUDA0 2100 =50",
        "gate and up on the CPU 1000 +layer 0",
        "gate and up on the CPU 1300 -",
        "copy stream 1010 +layer 0",
        "copy stream 1210 -",
        // 400 bytes in 200 ns
        "copies to the GPU 1010 =2000000000",
        "copies to the GPU 1210 =0",
        "down on the GPU 1300 +layer 0",
        "down on the GPU 1320 -",
        "passes 1000 +token 7",
        "layer 0 1000 +token 7",
        "layer 0 1000 +norm-0",
        "layer 0 1100 -",
        "CUDA0 1000 +norm-0",
        "CUDA0 1100 -",
        "layer 0 1100 +ffn_moe_gate-0",
        "layer 0 1400 -",
        "cpu 1100 +ffn_moe_gate-0",
        "cpu 1400 -",
        "hot_cache 1100 +ffn_moe_gate-0",
        "hot_cache 1400 -",
        "layer 0 1400 -",
        "no layer 1400 +token 7",
        "no layer 1400 !result_output",
        "no layer 1400 -",
        "passes 1400 -",
        // one of two activations; two experts of 1000 bytes in 400 ns
        "hit rate 1000 =50",
        "selected experts 1000 =5000000000",
        "passes 2000 +token 8",
        "layer 0 2000 +token 8",
        "layer 0 2000 +norm-0",
        "layer 0 2100 -",
        "CUDA0 2000 +norm-0",
        "CUDA0 2100 -",
        "layer 0' 2050 +ffn_moe_gate-0",
        "layer 0' 2200 -",
        "hot_cache 2050 +ffn_moe_gate-0",
        "hot_cache 2200 -",
        "layer 0 2200 -",
        "passes 2200 -",
        "hit rate 2000 =100",
        "selected experts 2000 =10000000000",
    ];
    assert_eq!(events(&packets), expected);
    assert_eq!(
        losses,
        ["addresses, sources and the experts of each token of a batch are lost"]
    );
}

#[test]
fn annotates_experts_and_connects_a_copy_with_its_use() {
    let dir = tempfile::tempdir().unwrap();
    write_run(dir.path());
    let (_, packets, _) = exported(dir.path());
    let gate = "ffn_moe_gate-0";
    assert_eq!(
        slices(&packets, "layer 0", gate)[0].debug_annotations,
        [
            DebugAnnotation::text("operation", "MUL_MAT_ID"),
            DebugAnnotation::numbers("experts", [3, 1]),
            DebugAnnotation::fractions("weights", [0.75, 0.25]),
        ]
    );
    assert_eq!(
        slices(&packets, "hot_cache", gate)[1].debug_annotations,
        [
            DebugAnnotation::numbers("experts", [2, 3]),
            DebugAnnotation::number("activations", 2u64),
        ]
    );
    let copy = &slices(&packets, "copy stream", "layer 0")[0];
    let product = &slices(&packets, "down on the GPU", "layer 0")[0];
    assert_eq!(copy.flow_ids, [1]);
    assert_eq!(product.terminating_flow_ids, [1]);
    assert!(
        copy.debug_annotations
            .contains(&DebugAnnotation::number("bytes", 400u64))
    );
}

#[test]
fn tracks_have_parents() {
    let dir = tempfile::tempdir().unwrap();
    write_run(dir.path());
    let (_, packets, _) = exported(dir.path());
    let names = track_names(&packets);
    let tracks = packets
        .iter()
        .filter_map(|packet| packet.track_descriptor.as_ref());
    let paths: Vec<String> = tracks
        .filter_map(|track| {
            let parent = &names[&track.parent_uuid?];
            Some(format!("{parent}/{}", names[&track.uuid?]))
        })
        .collect();
    assert_eq!(
        paths,
        [
            "moe-analyze/counters",
            "counters/memory CUDA0",
            "moe-analyze/Post-Fetch",
            "Post-Fetch/gate and up on the CPU",
            "Post-Fetch/copy stream",
            "counters/copies to the GPU",
            "Post-Fetch/down on the GPU",
            "moe-analyze/passes",
            "moe-analyze/layers",
            "layers/layer 0",
            "moe-analyze/devices by memory of the inputs",
            "devices by memory of the inputs/CUDA0",
            "moe-analyze/lanes of experts",
            "lanes of experts/cpu",
            "lanes of experts/hot_cache",
            "layers/no layer",
            "counters/hit rate",
            "counters/selected experts",
            "layers/layer 0'",
        ]
    );
}

#[test]
fn recognizes_its_own_files_only() {
    let dir = tempfile::tempdir().unwrap();
    write_run(dir.path());
    let (bytes, ..) = exported(dir.path());
    let path = dir.path().join("out.pftrace");
    fs::write(&path, bytes).unwrap();
    assert!(has_format(&path, "perfetto").unwrap());
    assert!(!has_format(&path, "jsonl").unwrap());
    // A packet of another program.
    fs::write(&path, [0x0a, 2, 0x40, 1]).unwrap();
    assert!(!has_format(&path, "perfetto").unwrap());
}

/// Plain v4 records have no durations.
#[test]
fn plain_records_are_instants_and_never_go_back_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let lanes = [(3, 0.0, lane::UNKNOWN), (1, 0.0, lane::UNKNOWN)];
    let mut records = [
        record("norm-0", 0, 7, 2000, 10),
        with_experts(record("ffn_moe_gate-0", 0, 7, 1500, 10), lanes),
        record("norm-1", 1, 7, 2500, 10),
    ];
    records.iter_mut().for_each(|record| record.ext_version = 0);
    fs::write(dir.path().join("trace.bin"), records.as_bytes()).unwrap();
    let (_, packets, losses) = exported(dir.path());
    assert_eq!(
        events(&packets),
        [
            "passes 2000 +token 7",
            "layer 0 2000 +token 7",
            "layer 0 2000 !norm-0",
            "layer 0 2000 !ffn_moe_gate-0",
            "layer 0 2000 -",
            "layer 1 2500 +token 7",
            "layer 1 2500 !norm-1",
            "layer 1 2500 -",
            "passes 2500 -",
            "selected experts 2000 =4000000000",
        ]
    );
    assert_eq!(
        losses[1],
        "1 operation started before the previous one in the trace; their starts were set to the start of the previous one"
    );
}

/// Perfetto's times are signed.
#[test]
fn reports_times_above_the_maximum() {
    let dir = tempfile::tempdir().unwrap();
    let records = [
        with_experts(
            record("ffn_moe_down-0", 0, 7, 1000, 100),
            [(0, 0.5, 0), (1, 0.5, 0)],
        ),
        record("norm-0", 0, 8, u64::MAX, 0),
        record("ffn_inp-0", 0, 9, u64::MAX, 0),
    ];
    fs::write(dir.path().join("trace.bin"), records.as_bytes()).unwrap();
    let (_, packets, losses) = exported(dir.path());
    let last = packets.iter().filter_map(|packet| packet.timestamp).max();
    assert_eq!(last, Some(u64::MAX >> 1));
    let expected =
        "times above 9223372036854775807 ns, the maximum of the format, were set to it: 2 events";
    assert!(losses.iter().any(|loss| loss == expected), "{losses:?}");
}

#[test]
fn refuses_traces_without_operations() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens.jsonl");
    let rows = "{\"t\":0,\"layer\":0,\"experts\":[3,1]}\n{\"t\":1,\"layer\":0,\"experts\":[3,0]}\n";
    fs::write(&path, rows).unwrap();
    let input = Input::Foreign(detect(&path).unwrap().unwrap());
    let options = ImportOptions::default();
    let export = Export::new(&input, &options).unwrap();
    let error = Perfetto.export(&export, &mut Vec::<u8>::new()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "perfetto needs the times of operations, which the trace does not contain; use a run directory or a trace.bin"
    );
}
