//! `token-NNNNN.json` of the thesis's `parse_trace.py`: the operations of one token per file. See [`super`] for the layout.
//!
//! The importer converts the entries to records in a temporary file, so that memory does not grow with the trace.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, Write};
use std::path::Path;

use moe_trace::ops::OpTable;
use moe_trace::record::{
    MAX_EXPERTS, MAX_SOURCES, NO_TENSOR, SOURCE_BUFFER, SOURCE_DISK, TensorAccessLog, layer_number,
    set_name,
};
use moe_trace::{LayerId, Phase, Trace};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{I32, U16, U32, U64};

use crate::json::invalid_in_stream;
use crate::source::text_reader;
use crate::{Contents, ForeignError, ImportOptions, Importer, Location, Output, Records, Source};

use super::super::shared::text::shown;
use super::import_records;

/// Maximum size of an entry in bytes; most have less than 1000.
const MAX_ENTRY: u64 = 16 << 20;

/// Importer of `token-NNNNN.json`: a file, or a directory of them.
pub struct ThesisJson;

impl Importer for ThesisJson {
    fn name(&self) -> &'static str {
        "thesis-json"
    }

    fn description(&self) -> &'static str {
        "token-NNNNN.json of the TensorAccessLog tools (BSc thesis of E. Keri), a file or a directory: every operation"
    }

    fn contents(&self) -> Contents {
        Contents::Operations
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        let text = String::from_utf8_lossy(sample);
        text.trim_start().starts_with('{')
            && ["\"token_id\"", "\"entries\"", "\"operation_type\""]
                .iter()
                .all(|key| text.contains(key))
    }

    fn takes_directories(&self) -> bool {
        true
    }

    fn import(
        &self,
        source: &Source,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        import_records(self.records(source, options), output)
    }

    fn records(
        &self,
        source: &Source,
        options: &ImportOptions,
    ) -> Result<Option<Records>, ForeignError> {
        let failed = |error| ForeignError::Io {
            action: "write a temporary file for",
            path: source.path().to_owned(),
            source: error,
        };
        let default = OpTable::default();
        let ops = options.ops.as_ref().unwrap_or(&default);
        let mut spool = Spool {
            file: BufWriter::new(tempfile::tempfile().map_err(failed)?),
            n_excess_sources: 0,
            n_excess_experts: 0,
        };
        for path in source.files() {
            read_file(path, ops, &mut spool)?;
        }
        let mut file = spool
            .file
            .into_inner()
            .map_err(|error| failed(error.into_error()))?;
        file.rewind().map_err(failed)?;
        let trace = Trace::from_file(source.path(), &file)?;
        let mut records = Records::new(trace, options)?;
        let excess = [
            (spool.n_excess_sources, "sources after the fourth"),
            (spool.n_excess_experts, "experts after the sixteenth"),
        ];
        for (n, what) in excess {
            if n > 0 {
                records.notes.push(format!(
                    "skipped {what} in {}",
                    if n == 1 {
                        "1 entry".into()
                    } else {
                        format!("{n} entries")
                    }
                ));
            }
        }
        Ok(Some(records))
    }
}

/// The temporary file of records.
struct Spool {
    file: BufWriter<File>,
    /// Entries with more sources than a record has.
    n_excess_sources: u64,
    /// Entries with more experts than a record has.
    n_excess_experts: u64,
}

#[derive(Deserialize)]
struct Entry {
    timestamp_ns: u64,
    token_id: u32,
    layer_id: Option<LayerId>,
    #[serde(default)]
    thread_id: u16,
    phase: String,
    operation_type: String,
    dst_name: String,
    #[serde(default)]
    sources: Vec<EntrySource>,
    #[serde(default)]
    expert_ids: Vec<i32>,
    num_experts: Option<usize>,
}

#[derive(Deserialize)]
struct EntrySource {
    name: String,
    #[serde(default)]
    tensor_ptr: String,
    size_bytes: u64,
    layer_id: Option<LayerId>,
    memory_source: String,
    disk_offset: Option<u64>,
    buffer_id: Option<u64>,
}

/// Reads the entries of a file one after the other.
fn read_file(path: &Path, ops: &OpTable, spool: &mut Spool) -> Result<(), ForeignError> {
    // The error of an entry, which is returned instead of the generic error of serde_json.
    let entry_error = RefCell::new(None);
    let mut n_entries = 0u64;
    let remaining = Cell::new(MAX_ENTRY);
    let mut write = |entry: Entry| {
        remaining.set(MAX_ENTRY);
        let at = Location::Element(format!("entries[{n_entries}]"));
        n_entries += 1;
        let result = spool.write(entry, ops);
        result.map_err(|error| {
            *entry_error.borrow_mut() = Some(ForeignError::invalid(path, at, error));
        })
    };
    let mut json = serde_json::Deserializer::from_reader(LimitedReader {
        reader: text_reader(path)?,
        remaining: &remaining,
    });
    let result = Document(&mut write)
        .deserialize(&mut json)
        .and_then(|()| json.end());
    match (entry_error.into_inner(), result) {
        (Some(error), _) => Err(error),
        (None, Err(error)) => Err(invalid_in_stream(path, &error)),
        (None, Ok(())) => Ok(()),
    }
}

/// A reader that fails after `remaining` bytes, which limits the size of an entry in memory.
struct LimitedReader<'a, R> {
    reader: R,
    remaining: &'a Cell<u64>,
}

impl<R: Read> Read for LimitedReader<'_, R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n = self.reader.read(bytes)?;
        match self.remaining.get().checked_sub(n as u64) {
            Some(remaining) => self.remaining.set(remaining),
            None => {
                let reason = format!("an entry is longer than {MAX_ENTRY} bytes");
                return Err(io::Error::other(reason));
            }
        }
        Ok(n)
    }
}

/// Why an entry cannot be converted to a record.
#[derive(Debug, thiserror::Error)]
enum EntryError {
    #[error("timestamp_ns is 0; the file is damaged")]
    NoTimestamp,
    #[error(
        "operation {operation:?} is not in the table of operations; use the table of the llama.cpp version that recorded the trace"
    )]
    Operation { operation: String },
    #[error("phase {phase:?} is not PROMPT or GENERATE; the file is damaged")]
    Phase { phase: String },
    #[error(
        "memory_source {memory:?} of source {source_index} is not DISK or BUFFER; the file is damaged"
    )]
    Memory { source_index: usize, memory: String },
    #[error("cannot write to a temporary file: {0}")]
    Spool(#[source] io::Error),
}

impl Spool {
    fn write(&mut self, entry: Entry, ops: &OpTable) -> Result<(), EntryError> {
        let mut record = record_of(&entry, ops)?;
        self.n_excess_sources += u64::from(entry.sources.len() > MAX_SOURCES);
        let n_experts = entry.num_experts.unwrap_or(entry.expert_ids.len());
        let n_experts = n_experts.min(entry.expert_ids.len());
        self.n_excess_experts += u64::from(n_experts > MAX_EXPERTS);
        record.num_experts = small(n_experts.min(MAX_EXPERTS));
        let written = self.file.write_all(record.as_bytes());
        written.map_err(EntryError::Spool)
    }
}

/// A number of sources or experts, as in a record.
fn small(n: usize) -> u8 {
    u8::try_from(n).expect("a record has few sources and experts")
}

fn record_of(entry: &Entry, ops: &OpTable) -> Result<TensorAccessLog, EntryError> {
    if entry.timestamp_ns == 0 {
        return Err(EntryError::NoTimestamp);
    }
    let op = &entry.operation_type;
    let number = ops
        .number(op)
        .or_else(|| op.strip_prefix("op_")?.parse().ok());
    let mut record = TensorAccessLog {
        timestamp_ns: U64::new(entry.timestamp_ns),
        token_id: U32::new(entry.token_id),
        layer_id: U16::new(layer_number(entry.layer_id)),
        thread_id: U16::new(entry.thread_id),
        operation_type: number.ok_or_else(|| EntryError::Operation {
            operation: shown(op),
        })?,
        phase: Phase::from_name(&entry.phase)
            .ok_or_else(|| EntryError::Phase {
                phase: shown(&entry.phase),
            })?
            .number(),
        num_sources: small(entry.sources.len().min(MAX_SOURCES)),
        ..TensorAccessLog::default()
    };
    set_name(&mut record.dst_name, &entry.dst_name);
    for (i, source) in entry.sources.iter().take(MAX_SOURCES).enumerate() {
        let to = &mut record.sources[i];
        set_name(&mut to.name, &source.name);
        let pointer = source.tensor_ptr.trim_start_matches("0x");
        to.tensor_ptr = U64::new(u64::from_str_radix(pointer, 16).unwrap_or(0));
        // The thesis's recorder truncates sizes to 32 bits; sizes of other writers are truncated in the same way.
        to.size_bytes = U32::new((source.size_bytes & 0xFFFF_FFFF) as u32);
        to.layer_id = U16::new(layer_number(source.layer_id));
        let (memory, place) = match source.memory_source.as_str() {
            "DISK" => (SOURCE_DISK, source.disk_offset),
            "BUFFER" => (SOURCE_BUFFER, source.buffer_id),
            memory => {
                return Err(EntryError::Memory {
                    source_index: i,
                    memory: shown(memory),
                });
            }
        };
        to.memory_source = memory;
        to.offset_or_buffer_id = U64::new(place.unwrap_or(0));
        to.tensor_idx = U32::new(NO_TENSOR);
    }
    for (to, &id) in record.expert_ids.iter_mut().zip(&entry.expert_ids) {
        *to = I32::new(id);
    }
    Ok(record)
}

/// Deserializes a document and calls `F` with each of its entries.
struct Document<F>(F);

/// Deserializes the list of entries and calls `F` with each of them.
struct Entries<F>(F);

impl<'de, F: FnMut(Entry) -> Result<(), ()>> DeserializeSeed<'de> for Document<&mut F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, F: FnMut(Entry) -> Result<(), ()>> Visitor<'de> for Document<&mut F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with entries")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            if key == "entries" {
                map.next_value_seed(Entries(&mut *self.0))?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

impl<'de, F: FnMut(Entry) -> Result<(), ()>> DeserializeSeed<'de> for Entries<&mut F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, F: FnMut(Entry) -> Result<(), ()>> Visitor<'de> for Entries<&mut F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of entries")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        while let Some(entry) = entries.next_element()? {
            (self.0)(entry).map_err(|()| serde::de::Error::custom("the entry is invalid"))?;
        }
        Ok(())
    }
}
