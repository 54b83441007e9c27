//! Writes the initial inputs of all fuzz targets: `seeds FIXTURES CORPUS`. Inputs are `CORPUS/TARGET/NAME`.

use std::error::Error;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use moe_foreign::SAMPLE_SIZE;
use moe_gguf::map::OffsetMap;
use moe_gguf::{GgmlType, Gguf, Value};
use moe_synth::write::{Header, Writer};
use moe_trace::buffers::{Buffer, BufferEvent, Change, usage};
use moe_trace::graph::reconstruct;
use moe_trace::manifest::{Engine, Manifest, Model, ModelFile};
use moe_trace::ops::{MUL_MAT, MUL_MAT_ID};
use moe_trace::record::{EXT_V1, SOURCE_BUFFER, SOURCE_DISK, lane, set_name};
use moe_trace::tables::{TableOptions, write_tables};
use moe_trace::transfers::{Span, Transfer};
use moe_trace::{
    LayerId, NO_TENSOR, Phase, Run, RunOptions, RunWriter, TensorAccessLog, TokenId, map_table,
};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::file::properties::WriterProperties;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const N_LAYER: u16 = 2;
const N_EXPERT: u64 = 4;

fn main() -> Result<()> {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [fixtures, corpus] = &arguments[..] else {
        return Err("usage: seeds FIXTURES CORPUS".into());
    };
    let scratch = corpus.join("scratch");
    fs::create_dir_all(&scratch)?;

    let models = models(&scratch)?;
    for model in &models {
        seed(corpus, "gguf", &name_of(model), &[], &fs::read(model)?)?;
    }
    let imatrix = fs::read(fixtures.join("foreign/imatrix/small.gguf"))?;
    seed(corpus, "gguf", "imatrix.gguf", &[], &imatrix)?;

    foreign(&fixtures.join("foreign"), corpus)?;
    for entry in fs::read_dir(fixtures.join("foreign/learn"))? {
        let path = entry?.path();
        seed(corpus, "learn", &name_of(&path), &[], &fs::read(&path)?)?;
    }
    run(corpus, &scratch, &models[0])?;
    fs::remove_dir_all(scratch)?;
    Ok(())
}

/// Adds an input: `prefix`, which selects its reader, and `bytes`.
fn seed(corpus: &Path, target: &str, name: &str, prefix: &[u8], bytes: &[u8]) -> Result<()> {
    let directory = corpus.join(target);
    fs::create_dir_all(&directory)?;
    let prefix_name: String = prefix.iter().map(|byte| format!("{byte}-")).collect();
    let name = format!("{prefix_name}{name}");
    fs::write(directory.join(name), [prefix, bytes].concat())?;
    Ok(())
}

fn name_of(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// Writes small models with stacked experts or one tensor per expert, and several types.
fn models(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for (ty, per_expert) in [
        (GgmlType::F16, false),
        (GgmlType::Q4_K, false),
        (GgmlType::F32, true),
    ] {
        let mut header = Header::new();
        for (key, value) in [
            ("general.architecture", Value::String("qwen3moe".into())),
            ("general.alignment", Value::U32(32)),
            ("qwen3moe.block_count", Value::U32(N_LAYER.into())),
            ("qwen3moe.expert_count", Value::U32(N_EXPERT as u32)),
            ("qwen3moe.expert_used_count", Value::U32(2)),
            ("qwen3moe.rope.freq_base", Value::F32(1e6)),
        ] {
            header.set(key, &value)?;
        }
        let n = ty.block_size();
        header.tensor("token_embd.weight", ty, &[n, 3])?;
        for layer in 0..N_LAYER {
            header.tensor(
                &format!("blk.{layer}.ffn_gate_inp.weight"),
                GgmlType::F32,
                &[n, N_EXPERT],
            )?;
            for projection in ["gate", "up", "down"] {
                if per_expert {
                    for expert in 0..N_EXPERT {
                        header.tensor(
                            &format!("blk.{layer}.ffn_{projection}.{expert}.weight"),
                            ty,
                            &[n, 2],
                        )?;
                    }
                } else {
                    header.tensor(
                        &format!("blk.{layer}.ffn_{projection}_exps.weight"),
                        ty,
                        &[n, 2, N_EXPERT],
                    )?;
                }
            }
        }
        let kind = if per_expert { "per-expert" } else { "merged" };
        let path = directory.join(format!("{ty}-{kind}.gguf"));
        let size = header
            .tensors()
            .iter()
            .map(|tensor| tensor.size_bytes)
            .sum::<u64>();
        let mut writer = Writer::new(File::create(&path)?, header)?;
        writer.write(&vec![1; size as usize])?;
        writer.finish()?;
        paths.push(path);
    }
    Ok(paths)
}

/// Adds the fixtures of foreign formats, for all importers that recognize them.
fn foreign(fixtures: &Path, corpus: &Path) -> Result<()> {
    for entry in fs::read_dir(fixtures)? {
        let directory = entry?.path();
        let name = name_of(&directory);
        if !directory.is_dir() || ["make", "expected", "__pycache__"].contains(&&*name) {
            continue;
        }
        for entry in fs::read_dir(&directory)? {
            let path = entry?.path();
            if !path.is_file() {
                continue;
            }
            let mut bytes = fs::read(&path)?;
            // Large files are truncated to their first records or lines.
            bytes.truncate(16 * 1024);
            let name = format!("{name}-{}", name_of(&path));
            for (target, binary) in [("import_text", false), ("import_binary", true)] {
                for (i, importer) in moe_fuzz::importers(binary).iter().enumerate() {
                    if importer.is_applicable(&bytes[..bytes.len().min(SAMPLE_SIZE)]) {
                        for options in 0..3 {
                            seed(corpus, target, &name, &[i as u8, options], &bytes)?;
                        }
                        seed(corpus, target, &name, &[moe_fuzz::DETECT, 0], &bytes)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Adds the files of a run: manifest and trace, tables, buffer events, transfers, and a graph.
fn run(corpus: &Path, scratch: &Path, model: &Path) -> Result<()> {
    let gguf = Gguf::open(model)?;
    let map = OffsetMap::new(&gguf);
    let directory = scratch.join("run");
    let mut writer = RunWriter::create(&directory, manifest(model)?, &map, RunOptions::default())?;
    for record in records(&gguf) {
        *writer.next_record()? = record;
    }
    writer.finish()?;
    let manifest = fs::read(directory.join("manifest.json"))?;
    let trace = fs::read(directory.join("trace.bin"))?;
    let size = (manifest.len() as u16).to_le_bytes();
    seed(
        corpus,
        "run",
        "run",
        &[],
        &[&size[..], &manifest, &trace].concat(),
    )?;
    seed(corpus, "run", "bare", &[], &[&[0, 0][..], &trace].concat())?;
    seed(
        corpus,
        "run",
        "foreign",
        &[],
        &[&[2, 0][..], b"{}", &trace].concat(),
    )?;

    let run = Run::open(&directory)?;
    write_tables(&run, &directory, TableOptions::default())?;
    table(corpus, &directory.join(map_table::FILE_NAME), &[0])?;
    table(corpus, &directory.join("routing.parquet"), &[1, 2, 3])?;

    let events = [
        BufferEvent {
            timestamp_ms: 1.5,
            timestamp_ns: Some(1_500_000),
            change: Change::Alloc(Buffer {
                buffer_id: 7,
                buffer_ptr: 4096,
                size: 1 << 20,
                name: "kv".into(),
                backend: "CPU".into(),
                usage: usage::COMPUTE,
                layer: Some(LayerId(1)),
            }),
        },
        BufferEvent {
            timestamp_ms: 2.5,
            timestamp_ns: None,
            change: Change::Dealloc { buffer_id: 7 },
        },
    ];
    seed(corpus, "side_files", "buffers", &[0], &lines(&events)?)?;
    let span = |start_ns, end_ns| Span { start_ns, end_ns };
    let transfer = Transfer {
        sequence_id: 0,
        token_id: TokenId(3),
        phase: Phase::Generate,
        layer_id: LayerId(1),
        n_tokens: 1,
        n_experts: 2,
        n_fetched: 2,
        bytes: 4096,
        transfer: Some(span(10, 20)),
        window: span(10, 30),
        product: Some(span(30, 40)),
    };
    seed(
        corpus,
        "side_files",
        "transfers",
        &[1],
        &lines(&[transfer])?,
    )?;
    let graph = reconstruct(&run, Phase::Prompt).ok_or("the run has a prompt")?;
    seed(
        corpus,
        "side_files",
        "graph",
        &[2],
        &serde_json::to_vec(&graph)?,
    )?;
    Ok(())
}

fn lines<T: serde::Serialize>(values: &[T]) -> Result<Vec<u8>> {
    let mut lines = Vec::new();
    for value in values {
        serde_json::to_writer(&mut lines, value)?;
        lines.push(b'\n');
    }
    Ok(lines)
}

/// Adds a table with and without compression. Without compression, a changed byte changes a value.
fn table(corpus: &Path, path: &Path, selectors: &[u8]) -> Result<()> {
    let plain = path.with_extension("plain.parquet");
    let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(path)?)?;
    let metadata = reader
        .metadata()
        .file_metadata()
        .key_value_metadata()
        .cloned();
    let schema = reader.schema().clone();
    let properties = WriterProperties::builder()
        .set_key_value_metadata(metadata)
        .build();
    let mut writer = ArrowWriter::try_new(File::create(&plain)?, schema, Some(properties))?;
    for batch in reader.build()? {
        writer.write(&batch?)?;
    }
    writer.close()?;
    for path in [path, &plain] {
        for &selector in selectors {
            seed(
                corpus,
                "parquet",
                &name_of(path),
                &[selector],
                &fs::read(path)?,
            )?;
        }
    }
    Ok(())
}

fn manifest(model: &Path) -> Result<Manifest> {
    Ok(Manifest {
        engine: Engine {
            name: "moe-analyze".into(),
            version: "0.1.0".into(),
        },
        model: Model {
            path: name_of(model),
            files: vec![ModelFile {
                name: name_of(model),
                size_bytes: fs::metadata(model)?.len(),
            }],
            arch: "qwen3moe".into(),
            n_layer: N_LAYER.into(),
            n_expert: N_EXPERT as u32,
            n_expert_used: 2,
            ..Model::default()
        },
        started: "2026-07-01T12:34:56Z".into(),
        ..Manifest::default()
    })
}

/// Returns the records of a prompt of two tokens and one generated token, in all layers.
fn records(gguf: &Gguf) -> Vec<TensorAccessLog> {
    let mut records = Vec::new();
    let mut timestamp_ns = 1000;
    for (phase, tokens) in [(0, 0..2), (1, 2..3)] {
        for layer in 0..N_LAYER {
            for projection in ["gate", "up", "down"] {
                for token in tokens.clone() {
                    let mut record = TensorAccessLog {
                        operation_type: MUL_MAT_ID,
                        ext_version: EXT_V1,
                        phase,
                        num_sources: 2,
                        num_experts: 2,
                        ..TensorAccessLog::default()
                    };
                    record.timestamp_ns.set(timestamp_ns);
                    record.duration_ns.set(10);
                    record.token_id.set(token);
                    record.layer_id.set(layer);
                    record.n_tokens.set(tokens.len() as u32);
                    set_name(
                        &mut record.dst_name,
                        &format!("ffn_moe_{projection}-{layer}"),
                    );
                    let name = format!("blk.{layer}.ffn_{projection}_exps.weight");
                    if let Some(tensor) = gguf.tensor(&name) {
                        set_name(&mut record.sources[0].name, &name);
                        record.sources[0].memory_source = SOURCE_DISK;
                        record.sources[0].tensor_idx.set(tensor.index);
                        record.sources[0].offset_or_buffer_id.set(tensor.offset);
                        record.set_source_size(0, tensor.size_bytes);
                    }
                    set_name(&mut record.sources[1].name, &format!("ffn_norm-{layer}"));
                    record.sources[1].memory_source = SOURCE_BUFFER;
                    record.sources[1].tensor_idx.set(NO_TENSOR);
                    record.sources[1].offset_or_buffer_id.set(7);
                    record.set_source_size(1, 1024);
                    for (i, expert) in [token as i32, 3].into_iter().enumerate() {
                        record.expert_ids[i].set(expert);
                        record.expert_weights[i].set(0.5);
                        record.expert_lane[i] = lane::CPU;
                    }
                    records.push(record);
                }
                timestamp_ns += 20;
            }
            let mut output = TensorAccessLog {
                operation_type: MUL_MAT,
                ext_version: EXT_V1,
                phase,
                ..TensorAccessLog::default()
            };
            output.timestamp_ns.set(timestamp_ns);
            output.token_id.set(tokens.start);
            output.layer_id.set(layer);
            output.n_tokens.set(tokens.len() as u32);
            set_name(&mut output.dst_name, &format!("l_out-{layer}"));
            records.push(output);
            timestamp_ns += 20;
        }
    }
    records
}
