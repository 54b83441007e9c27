//! Buffer ids in records, and the events of `buffers.jsonl`.

use std::collections::BTreeMap;

use moe_engine::Limits;
use moe_trace::RunOptions;
use moe_trace::buffers::{Change, Timeline};
use moe_trace::record::{PHASE_GENERATE, SOURCE_BUFFER};

use moe_testkit::fixture;

use super::{LIMITS, record};

#[test]
fn buffer_ids_have_constant_addresses_while_decoding() {
    let prompt: Vec<u32> = (300..320).collect();
    for arch in ["dots1", "gpt-oss", "olmoe", "qwen2moe"] {
        let file = format!("random-{arch}-F16.gguf");
        let recorded = record(&file, &prompt, LIMITS, RunOptions::default());
        let mut addresses = BTreeMap::new();
        let generated = recorded.records.iter();
        for record in generated.filter(|r| r.phase == PHASE_GENERATE) {
            let buffers = record.sources().iter();
            for source in buffers.filter(|s| s.memory_source == SOURCE_BUFFER) {
                let id = source.offset_or_buffer_id.get();
                let is_cache = id >= 1 << 16;
                if !is_cache {
                    let address = source.tensor_ptr.get();
                    let first = *addresses.entry(id).or_insert(address);
                    assert_eq!(first, address, "{arch}: {} of buffer {id}", source.name());
                }
            }
        }
        assert!(addresses.len() > 10, "{addresses:?}");
    }
}

#[test]
fn all_buffers_that_are_read_have_events() {
    let prompt: Vec<u32> = (300..320).collect();
    for arch in ["dots1", "gpt-oss", "qwen2moe", "qwen3moe"] {
        let file = format!("random-{arch}-F16.gguf");
        let recorded = record(&file, &prompt, LIMITS, RunOptions::default());
        let mut sizes: BTreeMap<u64, u64> = BTreeMap::new();
        for event in &recorded.buffers {
            if let Change::Alloc(buffer) = &event.change {
                let size = sizes.entry(buffer.buffer_id).or_default();
                *size = buffer.size.max(*size);
            }
        }
        for record in &recorded.records {
            let sources = record.sources().iter().enumerate();
            for (i, source) in sources.filter(|(_, s)| s.memory_source == SOURCE_BUFFER) {
                let id = source.offset_or_buffer_id.get();
                // The mask is computed from the positions and has no memory.
                let allocated = sizes.get(&id).copied().unwrap_or(0);
                let read = record.source_size(i);
                assert!(
                    read <= allocated,
                    "{arch}: {} of buffer {id}",
                    source.name()
                );
                assert!(
                    allocated > 0 || source.name() == "attn_inp_kq_mask",
                    "{arch}: {}",
                    source.name()
                );
            }
        }
        // The time of an event is the start of the pass that first used its buffer, before the first record that reads it.
        let first = recorded.records[0].timestamp_ns.get();
        assert!(
            recorded.buffers[0]
                .timestamp_ns
                .is_some_and(|ns| ns <= first)
        );
        let (timeline, n_strange) = Timeline::new(&recorded.buffers);
        assert_eq!(n_strange, 0);
        // Only the weights are not deallocated: the file, and its vectors as f32.
        let left: Vec<_> = timeline
            .buffers
            .iter()
            .filter(|b| b.dealloc_time_ms.is_none())
            .collect();
        assert!(left.iter().all(|b| b.usage_name == "WEIGHTS"), "{left:?}");
        let size = std::fs::metadata(fixture(&file)).unwrap().len();
        assert!(left.iter().any(|b| b.name == file && b.size == size));
        // Keys and values of at least three layers.
        let caches = timeline
            .buffers
            .iter()
            .filter(|b| b.name.starts_with("cache_"));
        assert!(caches.count() >= 6, "{arch}");
    }
}

#[test]
fn records_buffer_events_only_when_buffers_grow() {
    let prompt: Vec<u32> = (300..320).collect();
    let limits = Limits {
        n_predict: 100,
        ..LIMITS
    };
    let recorded = record(
        "random-qwen3moe-F16.gguf",
        &prompt,
        limits,
        RunOptions::default(),
    );
    let mut times: Vec<f64> = recorded.buffers.iter().map(|e| e.timestamp_ms).collect();
    times.dedup();
    // The cache has the 20 positions of the prompt, then 40, 80 and 160; the last events are those of the end.
    assert_eq!(times.len(), 5, "{times:?}");
    assert!(times.is_sorted());
}
