//! `buffers.jsonl`: allocations and deallocations of a run's buffers, and their memory over time.
//!
//! Each line is an event in the format of `buffer_stats.jsonl` of [E. Keri's BSc thesis](https://github.com/ErsjanKeri/BSC)
//! (`schemas/buffers.schema.json`). The timeline has the format of its `buffer-timeline.json`.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use moe_ids::LayerId;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::lines;
use crate::record::TensorAccessLog;

/// Name of the file in a run directory.
pub const FILE_NAME: &str = "buffers.jsonl";

/// What a buffer is used for: values of `ggml_backend_buffer_usage`.
pub mod usage {
    /// Any use, for example the KV cache.
    pub const ANY: u8 = 0;
    /// The model's weights.
    pub const WEIGHTS: u8 = 1;
    /// Results of operations.
    pub const COMPUTE: u8 = 2;

    /// Names, indexed by the value.
    pub const NAMES: [&str; 3] = ["ANY", "WEIGHTS", "COMPUTE"];

    /// The name of a value.
    pub fn name(usage: u8) -> &'static str {
        NAMES.get(usize::from(usage)).copied().unwrap_or("UNKNOWN")
    }
}

/// An event of `buffers.jsonl`: the allocation or deallocation of a buffer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BufferEvent {
    /// Milliseconds since the recorder started.
    pub timestamp_ms: f64,
    /// The same time on the clock of the trace's records, in nanoseconds. The thesis's recorders do not write it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timestamp_ns: Option<u64>,
    /// What happened.
    #[serde(flatten)]
    pub change: Change,
}

/// What happened to a buffer: the key `event`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Change {
    /// The buffer was allocated. A buffer that grows is deallocated and allocated again with the same id.
    Alloc(Buffer),
    /// The buffer was deallocated.
    Dealloc {
        /// Id of the buffer.
        buffer_id: u64,
    },
}

/// A buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffer {
    /// Id of the buffer; sources in the trace refer to it.
    pub buffer_id: u64,
    /// Address of the first byte during the recording.
    pub buffer_ptr: u64,
    /// Size in bytes.
    pub size: u64,
    /// Name.
    #[serde(default)]
    pub name: String,
    /// Backend that owns the memory: `CPU`, `CUDA0`, `mmap`.
    #[serde(default)]
    pub backend: String,
    /// What the buffer is used for: a value of [`usage`].
    #[serde(default)]
    pub usage: u8,
    /// Layer whose data the buffer contains, if it belongs to one.
    #[serde(default, with = "layer")]
    pub layer: Option<LayerId>,
}

/// A layer in this format: its number, or [`NO_LAYER`](crate::record::NO_LAYER) for a buffer of no layer.
mod layer {
    use moe_ids::LayerId;
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::record::{NO_LAYER, layer_number};

    #[expect(
        clippy::trivially_copy_pass_by_ref,
        reason = "serde passes a reference"
    )]
    pub(super) fn serialize<S: Serializer>(
        layer: &Option<LayerId>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_u16(layer_number(*layer))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<LayerId>, D::Error> {
        let layer = LayerId::deserialize(deserializer)?;
        Ok(Some(layer).filter(|&layer| layer.0 != NO_LAYER))
    }
}

/// Reads the events of a file. An incomplete last line is omitted.
///
/// # Errors
/// [`Error::Line`] for a line that is not an event, [`Error::OtherLines`] or [`Error::OtherContent`] for a file of another
/// format, [`Error::Io`].
pub fn read(path: &Path) -> Result<Vec<BufferEvent>, Error> {
    lines::read(
        path,
        "the buffers.jsonl of a run: pass that file, or its run directory",
        |_| Ok(()),
    )
}

/// A warning if the last event of the file is incomplete, which [`read`] omits.
///
/// # Errors
/// The file cannot be read.
pub fn truncation(path: &Path) -> Result<Option<String>, Error> {
    lines::truncation(path)
}

/// The end of the run on the clock of [`BufferEvent::timestamp_ms`], in milliseconds. `last` is the last record of the run's
/// trace. `None` if no event has [`BufferEvent::timestamp_ns`], so that the two clocks cannot be related.
pub fn end_of_run_ms(events: &[BufferEvent], last: &TensorAccessLog) -> Option<f64> {
    let on_clock = |event: &BufferEvent| Some((event.timestamp_ms, event.timestamp_ns?));
    let (ms, ns) = events.iter().find_map(on_clock)?;
    let duration_ns = if last.has_extension() {
        last.duration_ns.get()
    } else {
        0
    };
    let end_ns = last.timestamp_ns.get().saturating_add(duration_ns);
    Some(ms + (end_ns as f64 - ns as f64) / 1e6)
}

/// Memory use of the buffers of a run over time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timeline {
    /// Counts.
    pub metadata: TimelineMetadata,
    /// All allocations, ordered by time. A buffer that grew appears once for each size.
    pub buffers: Vec<TimelineBuffer>,
    /// Memory in use after each event.
    pub timeline: Vec<TimelineEvent>,
}

/// Counts of a timeline.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TimelineMetadata {
    /// Number of events.
    pub total_events: u64,
    /// Number of buffers: the length of [`Timeline::buffers`].
    pub total_buffers: u64,
    /// Maximum of the memory in use, in bytes.
    pub peak_occupancy_bytes: u64,
    /// `peak_occupancy_bytes` in MiB (2^20 bytes, despite the name of the key), rounded to two decimals.
    pub peak_occupancy_mb: f64,
    /// Milliseconds from the first event to the last.
    pub duration_ms: f64,
    /// Number of buffers for each name of [`usage`].
    pub usage_breakdown: BTreeMap<&'static str, u64>,
}

/// A buffer of a timeline.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimelineBuffer {
    /// Id of the buffer.
    pub id: u64,
    /// Name.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Backend that owns the memory: `CPU`, `CUDA0`, `mmap`.
    pub backend: String,
    /// What the buffer is used for: a value of [`usage`].
    pub usage: u8,
    /// Name of `usage`.
    pub usage_name: &'static str,
    /// Layer whose data the buffer contains, if it belongs to one.
    #[serde(serialize_with = "layer::serialize")]
    pub layer: Option<LayerId>,
    /// Time of the allocation, in milliseconds since the recorder started.
    pub alloc_time_ms: f64,
    /// Time of the deallocation, in milliseconds since the recorder started. `None` if the buffer was never deallocated.
    pub dealloc_time_ms: Option<f64>,
}

/// Memory in use after an event.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimelineEvent {
    /// Time of the event, in milliseconds since the recorder started.
    pub timestamp_ms: f64,
    /// `alloc` or `dealloc`.
    pub event: &'static str,
    /// Id of the buffer.
    pub buffer_id: u64,
    /// Name of the buffer.
    pub buffer_name: String,
    /// Size of the buffer in bytes.
    pub size: u64,
    /// Total size of the buffers that are allocated after the event, in bytes.
    pub cumulative_size: u64,
    /// Number of buffers that are allocated after the event.
    pub num_active_buffers: u64,
}

impl Timeline {
    /// The buffers that are allocated when the memory in use reaches its maximum for the first time.
    pub fn at_peak(&self) -> Vec<&TimelineBuffer> {
        let peak = self.metadata.peak_occupancy_bytes;
        let mut made = self.buffers.iter();
        let mut active: BTreeMap<u64, &TimelineBuffer> = BTreeMap::new();
        for event in &self.timeline {
            active.remove(&event.buffer_id);
            if event.event == "alloc" {
                // `buffers` has the order of the `alloc` events.
                active.extend(made.next().map(|buffer| (event.buffer_id, buffer)));
            }
            if event.cumulative_size == peak {
                break;
            }
        }
        active.into_values().collect()
    }

    /// The timeline of `events`, which must be ordered by time, and the number of deallocations of unknown buffers, which are
    /// omitted. A second allocation with the id of an allocated buffer replaces the first.
    pub fn new(events: &[BufferEvent]) -> (Timeline, u64) {
        let mut buffers: Vec<TimelineBuffer> = Vec::new();
        let mut timeline = Vec::new();
        // id → index in `buffers`
        let mut active: HashMap<u64, usize> = HashMap::new();
        let (mut taken, mut peak, mut n_strange) = (0u64, 0u64, 0u64);
        for event in events {
            let timestamp_ms = event.timestamp_ms;
            let id = match &event.change {
                Change::Alloc(buffer) => buffer.buffer_id,
                Change::Dealloc { buffer_id } => *buffer_id,
            };
            let before = active.remove(&id).and_then(|place| buffers.get_mut(place));
            let mut name = String::new();
            let mut size = 0;
            let is_known = before.is_some();
            if let Some(before) = before {
                before.dealloc_time_ms = Some(timestamp_ms);
                (name, size) = (before.name.clone(), before.size);
                taken = taken.saturating_sub(size);
            }
            let event = match &event.change {
                Change::Alloc(buffer) => {
                    (name, size) = (buffer.name.clone(), buffer.size);
                    taken = taken.saturating_add(size);
                    peak = peak.max(taken);
                    active.insert(id, buffers.len());
                    buffers.push(TimelineBuffer {
                        id,
                        name: buffer.name.clone(),
                        size,
                        backend: buffer.backend.clone(),
                        usage: buffer.usage,
                        usage_name: usage::name(buffer.usage),
                        layer: buffer.layer,
                        alloc_time_ms: timestamp_ms,
                        dealloc_time_ms: None,
                    });
                    "alloc"
                }
                Change::Dealloc { .. } if is_known => "dealloc",
                Change::Dealloc { .. } => {
                    n_strange += 1;
                    continue;
                }
            };
            timeline.push(TimelineEvent {
                timestamp_ms,
                event,
                buffer_id: id,
                buffer_name: name,
                size,
                cumulative_size: taken,
                num_active_buffers: active.len() as u64,
            });
        }
        let mut usage_breakdown = BTreeMap::new();
        for buffer in &buffers {
            *usage_breakdown.entry(buffer.usage_name).or_default() += 1;
        }
        let time = |event: Option<&BufferEvent>| event.map_or(0.0, |event| event.timestamp_ms);
        let metadata = TimelineMetadata {
            total_events: events.len() as u64,
            total_buffers: buffers.len() as u64,
            peak_occupancy_bytes: peak,
            peak_occupancy_mb: (peak as f64 / (1 << 20) as f64 * 100.0).round() / 100.0,
            duration_ms: time(events.last()) - time(events.first()),
            usage_breakdown,
        };
        (
            Timeline {
                metadata,
                buffers,
                timeline,
            },
            n_strange,
        )
    }
}
