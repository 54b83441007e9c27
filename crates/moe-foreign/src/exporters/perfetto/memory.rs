//! Memory of each backend over time, from `buffers.jsonl`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;

use moe_trace::buffers::{Buffer, BufferEvent, Change};

use super::timeline::{Counter, Timeline, Unit};

/// Rank of the counter of the first backend, after the other counters.
const FIRST_RANK: i32 = 10;

/// Memory in use of a backend.
struct Memory {
    counter: Counter,
    bytes: u64,
}

/// The backend of each buffer. A buffer keeps its id and its backend when it grows.
pub(super) fn backends(events: &[BufferEvent]) -> HashMap<u64, String> {
    let allocated = events.iter().filter_map(|event| match &event.change {
        Change::Alloc(buffer) => Some((buffer.buffer_id, buffer.backend.clone())),
        Change::Dealloc { .. } => None,
    });
    allocated.collect()
}

/// Writes the memory after each change. Events without a time on the clock of the trace are skipped; returns their number.
pub(super) fn write(events: &[BufferEvent], timeline: &mut Timeline<'_>) -> io::Result<usize> {
    let mut memories: BTreeMap<&str, Memory> = BTreeMap::new();
    let mut allocated: HashMap<u64, &Buffer> = HashMap::new();
    let mut n_skipped = 0;
    for simultaneous in events.chunk_by(|a, b| a.timestamp_ns == b.timestamp_ns) {
        let Some(at_ns) = simultaneous.first().and_then(|event| event.timestamp_ns) else {
            n_skipped += simultaneous.len();
            continue;
        };
        let at_ns = timeline.times(at_ns, at_ns).start_ns;
        let mut changed: BTreeSet<&str> = BTreeSet::new();
        for event in simultaneous {
            let (id, added) = match &event.change {
                Change::Alloc(buffer) => (buffer.buffer_id, Some(buffer)),
                Change::Dealloc { buffer_id } => (*buffer_id, None),
            };
            if let Some(removed) = allocated.remove(&id) {
                let memory = memory_of(&mut memories, &removed.backend);
                memory.bytes = memory.bytes.saturating_sub(removed.size);
                changed.insert(&removed.backend);
            }
            if let Some(added) = added {
                let memory = memory_of(&mut memories, &added.backend);
                memory.bytes = memory.bytes.saturating_add(added.size);
                changed.insert(&added.backend);
                allocated.insert(id, added);
            }
        }
        for backend in changed {
            let memory = memory_of(&mut memories, backend);
            memory.counter.set(timeline, at_ns, memory.bytes as f64)?;
        }
    }
    Ok(n_skipped)
}

fn memory_of<'m, 'e>(
    memories: &'m mut BTreeMap<&'e str, Memory>,
    backend: &'e str,
) -> &'m mut Memory {
    memories.entry(backend).or_insert_with(|| Memory {
        counter: Counter::new(format!("memory {backend}"), Unit::Bytes, FIRST_RANK),
        bytes: 0,
    })
}
