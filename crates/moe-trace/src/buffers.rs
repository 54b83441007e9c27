//! `buffers.jsonl`: the buffers of a run as they come and go, and how much memory they take over time.
//!
//! A line is an event, in the form of `buffer_stats.jsonl` of Keri's thesis (`schemas/buffers.schema.json`); the timeline
//! is its `buffer-timeline.json`.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use moe_ids::LayerId;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::lines;
use crate::record::TensorAccessLog;

/// Name of the file in a run directory.
pub const FILE_NAME: &str = "buffers.jsonl";

/// What a buffer is used for, as ggml counts it.
pub mod usage {
    /// Anything, the key-value cache among it.
    pub const ANY: u8 = 0;
    /// The model's weights.
    pub const WEIGHTS: u8 = 1;
    /// Results of operations.
    pub const COMPUTE: u8 = 2;

    /// Names by number.
    pub const NAMES: [&str; 3] = ["ANY", "WEIGHTS", "COMPUTE"];

    /// Name of a number.
    pub fn name(usage: u8) -> &'static str {
        NAMES.get(usize::from(usage)).copied().unwrap_or("UNKNOWN")
    }
}

/// A buffer was made, or given back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BufferEvent {
    /// Milliseconds since the recorder started.
    pub timestamp_ms: f64,
    /// The same moment on the clock of the trace's records; recorders of the thesis do not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timestamp_ns: Option<u64>,
    /// What happened.
    #[serde(flatten)]
    pub change: Change,
}

/// What happened to a buffer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Change {
    /// It was made. A buffer that grows is given back and made anew under its id.
    Alloc(Buffer),
    /// It was given back.
    Dealloc {
        /// Its id.
        buffer_id: u64,
    },
}

/// A buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffer {
    /// Identity, the one that the trace's sources name.
    pub buffer_id: u64,
    /// Address of its first byte.
    pub buffer_ptr: u64,
    /// Bytes.
    pub size: u64,
    /// Name.
    #[serde(default)]
    pub name: String,
    /// Where it lies: `CPU`, `CUDA0`, `mmap`.
    #[serde(default)]
    pub backend: String,
    /// One of [`usage`].
    #[serde(default)]
    pub usage: u8,
    /// Layer.
    #[serde(default, with = "layer")]
    pub layer: Option<LayerId>,
}

/// A layer as the format has it: a number, [`NO_LAYER`](crate::record::NO_LAYER) for none.
mod layer {
    use moe_ids::LayerId;
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::record::{NO_LAYER, layer_number};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
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

/// Reads the events of a file. A last line that its recorder did not finish is left out.
///
/// # Errors
/// [`Error::Line`] for a line that is no event, [`Error::OtherLines`] or [`Error::OtherContent`] for another file, [`Error::Io`].
pub fn read(path: &Path) -> Result<Vec<BufferEvent>, Error> {
    lines::read(
        path,
        "the buffers.jsonl of a run: give that file, or its run directory",
        |_| Ok(()),
    )
}

/// A remark about a file whose last event is incomplete, which [`read`] leaves out.
///
/// # Errors
/// The file cannot be read.
pub fn truncation(path: &Path) -> Result<Option<String>, Error> {
    lines::truncation(path)
}

/// When the run of these events ended, in milliseconds as [`BufferEvent::timestamp_ms`]; `last` is the last record of its trace.
/// `None` if the events are not on the trace's clock.
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

/// How much memory the buffers of a run take over time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timeline {
    /// Counts.
    pub metadata: TimelineMetadata,
    /// Every buffer that was made, in order of time; one that grew is there once for each size.
    pub buffers: Vec<TimelineBuffer>,
    /// What was taken after each event.
    pub timeline: Vec<TimelineEvent>,
}

/// Counts of a timeline.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TimelineMetadata {
    /// Events read.
    pub total_events: u64,
    /// Length of `buffers`.
    pub total_buffers: u64,
    /// The most bytes taken at a time.
    pub peak_occupancy_bytes: u64,
    /// The same in MiB, to two decimals.
    pub peak_occupancy_mb: f64,
    /// From the first event to the last.
    pub duration_ms: f64,
    /// Buffers by the name of their usage.
    pub usage_breakdown: BTreeMap<&'static str, u64>,
}

/// A buffer of a timeline.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)] // the keys are the form's
pub struct TimelineBuffer {
    pub id: u64,
    pub name: String,
    pub size: u64,
    pub backend: String,
    pub usage: u8,
    pub usage_name: &'static str,
    #[serde(serialize_with = "layer::serialize")]
    pub layer: Option<LayerId>,
    pub alloc_time_ms: f64,
    /// `None`: it was never given back.
    pub dealloc_time_ms: Option<f64>,
}

/// What was taken after an event.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct TimelineEvent {
    pub timestamp_ms: f64,
    pub event: &'static str,
    pub buffer_id: u64,
    pub buffer_name: String,
    pub size: u64,
    /// Bytes of all buffers that are there.
    pub cumulative_size: u64,
    pub num_active_buffers: u64,
}

impl Timeline {
    /// The buffers that are there when most memory is taken, for the first time.
    pub fn at_peak(&self) -> Vec<&TimelineBuffer> {
        let peak = self.metadata.peak_occupancy_bytes;
        let mut made = self.buffers.iter();
        let mut active: BTreeMap<u64, &TimelineBuffer> = BTreeMap::new();
        for event in &self.timeline {
            active.remove(&event.buffer_id);
            if event.event == "alloc" {
                // Buffers are in the order of the events that made them.
                active.extend(made.next().map(|buffer| (event.buffer_id, buffer)));
            }
            if event.cumulative_size == peak {
                break;
            }
        }
        active.into_values().collect()
    }

    /// The timeline of events in order of time. Also gives how many of them give back a buffer that is not there; those
    /// are left out. A buffer made twice under one id without being given back between replaces the first.
    pub fn new(events: &[BufferEvent]) -> (Timeline, u64) {
        let mut buffers: Vec<TimelineBuffer> = Vec::new();
        let mut timeline = Vec::new();
        // id → place in `buffers`
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
