//! `token-NNNNN.json`: every operation of a run, in the JSON format of the TensorAccessLog tools (E. Keri's BSc thesis,
//! <https://github.com/ErsjanKeri/BSC>, `tensor-tracing/tools/parse_trace.py`).
//!
//! The layout is described in [`crate::importers::thesis`]. Each file contains the operations of one token. The prompt and the first
//! pass after it are token 0, as in the thesis. Like the thesis, an operation is one entry with at most 16 experts of the first
//! token of its batch. Compared with our records, the format lacks the experts of the other tokens, router weights, lanes,
//! durations, sequences and shards.

use std::collections::BTreeMap;
use std::io::{self, Write};

use moe_trace::ops::OpTable;
use moe_trace::record::{SourceLog, TensorAccessLog};
use moe_trace::{LayerId, Phase, Run};
use serde::{Serialize, Serializer};

use super::is_numbered;
use crate::{Export, ExportError, FilesExporter, UnsupportedTrace};

/// Start of every file, before the token number.
const HEAD: &str = "{\"token_id\": ";

/// Exporter of `token-NNNNN.json`.
pub struct Thesis;

impl FilesExporter for Thesis {
    fn name(&self) -> &'static str {
        "thesis-json"
    }

    fn description(&self) -> &'static str {
        "directory of token-NNNNN.json for the TensorAccessLog tools (BSc thesis of E. Keri): every operation of a run"
    }

    fn is_file_name(&self, name: &str) -> bool {
        is_numbered(name, "token-", 5, ".json")
    }

    fn head(&self) -> &'static str {
        HEAD
    }

    fn export(
        &self,
        export: &Export<'_>,
        create: &mut dyn FnMut(&str) -> io::Result<Box<dyn Write>>,
    ) -> Result<Vec<String>, ExportError> {
        let run = export.run().ok_or(ExportError::Missing {
            format: self.name(),
            what: "the operations of a run",
            hint: "use a run directory or a trace.bin",
        })?;
        let tokens = count(run).map_err(unsupported)?;
        write_files(run, &tokens, create)?;
        Ok(vec![
            "each batch keeps only the experts of its first token, at most 16".into(),
            "router weights, lanes, durations, sequences and shards are lost".into(),
        ])
    }
}

fn unsupported(error: UnsupportedTrace) -> ExportError {
    ExportError::Unsupported {
        format: Thesis.name(),
        source: error.into(),
    }
}

/// The `metadata` object of a file.
#[derive(Serialize)]
struct Metadata {
    total_entries: u64,
    duration_ms: f64,
    timestamp_start_ns: u64,
    format_version: &'static str,
    #[serde(skip)]
    last_ns: u64,
}

/// The tokens of a run, numbered as in the thesis.
struct Tokens {
    /// Position of the first token of the decode phase.
    first_generated: Option<u32>,
    files: BTreeMap<u32, Metadata>,
}

impl Tokens {
    fn number(&self, record: &TensorAccessLog) -> u32 {
        match self.first_generated {
            Some(first) if record.phase() != Some(Phase::Prompt) => {
                record.token_id.get().saturating_sub(first)
            }
            _ => 0,
        }
    }
}

/// Counts the entries of each file.
fn count(run: &Run) -> Result<Tokens, UnsupportedTrace> {
    let mut tokens = Tokens {
        first_generated: None,
        files: BTreeMap::new(),
    };
    let mut sequence = None;
    for operation in run.trace.operations() {
        let head = operation.head();
        // In a plain v4 record, without our extension, the bytes of `sequence_id` are undefined.
        let of_record = head.has_extension().then(|| head.sequence_id.get());
        if *sequence.get_or_insert(of_record) != of_record {
            return Err(UnsupportedTrace::Sequences {
                hint: "record one prompt",
            });
        }
        if head.phase() != Some(Phase::Prompt) {
            tokens.first_generated.get_or_insert(head.token_id.get());
        }
        let time = head.timestamp_ns.get();
        let number = tokens.number(head);
        let metadata = tokens.files.entry(number).or_insert(Metadata {
            total_entries: 0,
            duration_ms: 0.0,
            timestamp_start_ns: time,
            format_version: "1024-byte",
            last_ns: time,
        });
        metadata.total_entries += 1;
        metadata.last_ns = metadata.last_ns.max(time);
        metadata.duration_ms = milliseconds(metadata.timestamp_start_ns, metadata.last_ns);
    }
    Ok(tokens)
}

fn milliseconds(from_ns: u64, to_ns: u64) -> f64 {
    to_ns.saturating_sub(from_ns) as f64 / 1e6
}

/// Writes the files one after the other, in the order of the tokens in the trace.
fn write_files(
    run: &Run,
    tokens: &Tokens,
    create: &mut dyn FnMut(&str) -> io::Result<Box<dyn Write>>,
) -> Result<(), ExportError> {
    let mut operations = run
        .trace
        .operations()
        .map(|operation| operation.head())
        .peekable();
    for (&number, metadata) in &tokens.files {
        let mut out = create(&format!("token-{number:05}.json"))?;
        write!(out, "{HEAD}{number}, \"metadata\": ")?;
        serde_json::to_writer(&mut out, metadata).map_err(io::Error::from)?;
        write!(out, ", \"entries\": [")?;
        for entry_id in 0..metadata.total_entries {
            let next = operations.next_if(|head| tokens.number(head) == number);
            let head =
                next.ok_or_else(|| unsupported(UnsupportedTrace::NotConsecutive { number }))?;
            out.write_all(if entry_id == 0 { b"\n" } else { b",\n" })?;
            let entry = Entry::new(entry_id, number, metadata, head, run.ops());
            serde_json::to_writer(&mut out, &entry).map_err(io::Error::from)?;
        }
        out.write_all(b"\n]}\n")?;
        out.flush()?;
    }
    Ok(())
}

#[derive(Serialize)]
struct Entry<'a> {
    entry_id: u64,
    timestamp_ns: u64,
    timestamp_relative_ms: f64,
    token_id: u32,
    layer_id: Option<LayerId>,
    thread_id: u16,
    phase: &'static str,
    operation_type: String,
    dst_name: String,
    num_sources: usize,
    sources: Vec<Source<'a>>,
    expert_ids: Vec<i32>,
    num_experts: usize,
}

impl<'a> Entry<'a> {
    fn new(
        entry_id: u64,
        token_id: u32,
        metadata: &Metadata,
        record: &'a TensorAccessLog,
        ops: &OpTable,
    ) -> Self {
        let time = record.timestamp_ns.get();
        let op = record.operation_type;
        let sources = record.sources().iter().enumerate();
        Self {
            entry_id,
            timestamp_ns: time,
            timestamp_relative_ms: milliseconds(metadata.timestamp_start_ns, time),
            token_id,
            layer_id: record.layer(),
            thread_id: record.thread_id.get(),
            phase: if record.phase() == Some(Phase::Prompt) {
                "PROMPT"
            } else {
                "GENERATE"
            },
            operation_type: ops
                .name(op)
                .map_or_else(|| format!("op_{op}"), str::to_owned),
            dst_name: record.dst_name().into_owned(),
            num_sources: record.sources().len(),
            sources: sources
                .map(|(i, source)| Source {
                    source,
                    size_bytes: record.source_size(i),
                })
                .collect(),
            expert_ids: record.expert_ids().iter().map(|id| id.get()).collect(),
            num_experts: record.expert_ids().len(),
        }
    }
}

struct Source<'a> {
    source: &'a SourceLog,
    size_bytes: u64,
}

impl Serialize for Source<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap;
        let source = self.source;
        let mut map = serializer.serialize_map(Some(6))?;
        map.serialize_entry("name", &source.name())?;
        map.serialize_entry("tensor_ptr", &format!("{:#x}", source.tensor_ptr.get()))?;
        map.serialize_entry("size_bytes", &self.size_bytes)?;
        map.serialize_entry("layer_id", &source.layer())?;
        let (memory, place) = if source.is_disk() {
            ("DISK", "disk_offset")
        } else {
            ("BUFFER", "buffer_id")
        };
        map.serialize_entry("memory_source", memory)?;
        map.serialize_entry(place, &source.offset_or_buffer_id.get())?;
        map.end()
    }
}
