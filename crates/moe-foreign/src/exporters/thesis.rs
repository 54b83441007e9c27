//! The JSON of the thesis's `parse_trace.py`: `token-00000.json` and so on, each with the operations of a token.
//!
//! As in its tracer, an operation is one entry with the experts of its batch's first token. Tokens are counted as there: the
//! prompt is of token 0, and so is the first pass after it.

use std::collections::BTreeMap;
use std::io::{self, Write};

use moe_trace::ops::OpTable;
use moe_trace::record::{SourceLog, TensorAccessLog};
use moe_trace::{LayerId, Phase, Run};
use serde::{Serialize, Serializer};

use super::is_numbered;
use crate::{Export, ExportError, FilesExporter};

/// Start of every file, up to the number of its token.
const HEAD: &str = "{\"token_id\": ";

/// `token-NNNNN.json`.
pub struct Thesis;

impl FilesExporter for Thesis {
    fn name(&self) -> &'static str {
        "thesis-json"
    }

    fn description(&self) -> &'static str {
        "directory of the thesis's token-NNNNN.json, every operation of a run"
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
            hint: "give a run directory or a trace.bin",
        })?;
        let tokens = count(run).map_err(unfit)?;
        write_files(run, &tokens, create)?;
        Ok(vec![
            "of a batch the experts of the first token were kept, 16 at most".into(),
            "router weights, lanes, durations, sequences and shards were left out".into(),
        ])
    }
}

/// Why a run does not fit into the format.
#[derive(Debug, thiserror::Error)]
enum RunFault {
    #[error("the run has several sequences and the format holds one; record one prompt")]
    Sequences,
    #[error("the operations of token {number} do not follow one another in the run")]
    Scattered { number: u32 },
}

fn unfit(fault: RunFault) -> ExportError {
    ExportError::Unfit {
        format: Thesis.name(),
        source: fault.into(),
    }
}

/// What the head of a token's file says.
#[derive(Serialize)]
struct Metadata {
    total_entries: u64,
    duration_ms: f64,
    timestamp_start_ns: u64,
    format_version: &'static str,
    #[serde(skip)]
    last_ns: u64,
}

/// The tokens of a run, as the thesis counts them.
struct Tokens {
    /// Position of the first generated token that was fed back.
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

/// Looks through the run for how many entries each file will have.
fn count(run: &Run) -> Result<Tokens, RunFault> {
    let mut tokens = Tokens {
        first_generated: None,
        files: BTreeMap::new(),
    };
    let mut sequence = None;
    for operation in run.trace.operations() {
        let head = operation.head();
        // The bytes of a plain v4 record after its experts mean nothing.
        let of_record = head.has_extension().then(|| head.sequence_id.get());
        if *sequence.get_or_insert(of_record) != of_record {
            return Err(RunFault::Sequences);
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

/// Writes one file after the other: a trace goes through its tokens in order.
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
            let head = next.ok_or_else(|| unfit(RunFault::Scattered { number }))?;
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
