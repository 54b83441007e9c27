//! Shared by the tests of the program: the binary, the fixtures, and a small run with known routing.

#[cfg(all(target_os = "linux", feature = "cuda"))]
pub mod gpu;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use assert_cmd::Command;
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_trace::manifest::{Engine, Manifest, Model, ModelFile};
use moe_trace::record::{
    EXT_V1, PHASE_GENERATE, PHASE_PROMPT, SOURCE_BUFFER, SOURCE_DISK, lane, set_name,
};
use moe_trace::{NO_LAYER, NO_TENSOR, RunOptions, RunWriter, TensorAccessLog, ops};

/// The binary under test.
pub fn moe_analyze() -> Command {
    Command::new(assert_cmd::cargo::cargo_bin!("moe-analyze"))
}

/// A file of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

/// An argument of the program, or a list of arguments.
pub trait Arg {
    fn push_to(&self, args: &mut Vec<OsString>);
}

macro_rules! single_arg {
    ($($type:ty),*) => {$(
        impl Arg for $type {
            fn push_to(&self, args: &mut Vec<OsString>) {
                args.push(self.into());
            }
        }
    )*};
}
single_arg!(str, String, OsString, Path, PathBuf);

impl<T: Arg + ?Sized> Arg for &T {
    fn push_to(&self, args: &mut Vec<OsString>) {
        (**self).push_to(args);
    }
}

impl<T: Arg> Arg for [T] {
    fn push_to(&self, args: &mut Vec<OsString>) {
        self.iter().for_each(|arg| arg.push_to(args));
    }
}

impl<T: Arg, const N: usize> Arg for [T; N] {
    fn push_to(&self, args: &mut Vec<OsString>) {
        self[..].push_to(args);
    }
}

impl<T: Arg> Arg for Vec<T> {
    fn push_to(&self, args: &mut Vec<OsString>) {
        self[..].push_to(args);
    }
}

/// Builds a list of arguments from texts, paths and lists of them: `args!["hotness", run, options]`.
macro_rules! args {
    ($($arg:expr),* $(,)?) => {
        $crate::support::flatten(&[$(&$arg),*])
    };
}

/// Runs the program with the arguments, as in [`args!`], expects success, and returns stdout.
macro_rules! run {
    ($($arg:expr),* $(,)?) => {
        $crate::support::stdout_of($crate::support::args![$($arg),*])
    };
}

/// Runs the program with the arguments, as in [`args!`], and returns the message with which it fails ([`failure_of`]).
macro_rules! fail {
    ($($arg:expr),* $(,)?) => {
        $crate::support::failure_of($crate::support::args![$($arg),*])
    };
}

pub(crate) use {args, fail, run};

/// Arguments and lists of them as one list.
pub fn flatten(args: &[&dyn Arg]) -> Vec<OsString> {
    let mut list = Vec::new();
    args.iter().for_each(|arg| arg.push_to(&mut list));
    list
}

/// Runs the program and expects success; returns stdout. Stdout of a model with random weights may not be UTF-8.
pub fn stdout_of(args: impl Arg) -> String {
    let assert = moe_analyze().args(args![args]).assert().success();
    String::from_utf8_lossy(&assert.get_output().stdout).into_owned()
}

/// Runs the program and expects exit code 2, nothing on stdout and one line on stderr; returns the line.
pub fn failure_of(args: impl Arg) -> String {
    let assert = moe_analyze().args(args![args]).assert().code(2).stdout("");
    let stderr = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert_eq!(stderr.lines().count(), 1, "one line: {stderr}");
    assert!(stderr.starts_with("moe-analyze: "), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    stderr
}

/// Compares a text with a file of `tests/golden`; with `MOE_BLESS=1` writes the file instead.
#[track_caller]
pub fn expect_golden(name: &str, text: &str) {
    // Plots are large.
    let is_compressed = name.ends_with(".zst");
    let path = repository("tests/golden").join(name);
    if std::env::var_os("MOE_BLESS").is_some_and(|bless| bless == "1") {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let bytes = if is_compressed {
            zstd::encode_all(text.as_bytes(), 19).unwrap()
        } else {
            text.as_bytes().to_vec()
        };
        std::fs::write(&path, bytes).unwrap();
    }
    let bytes = std::fs::read(&path)
        .unwrap_or_else(|error| panic!("{}: {error}; run with MOE_BLESS=1", path.display()));
    let bytes = if is_compressed {
        zstd::decode_all(&bytes[..]).unwrap()
    } else {
        bytes
    };
    let golden = String::from_utf8(bytes).unwrap();
    assert_eq!(text, golden, "{} differs; run with MOE_BLESS=1 to renew it", path.display());
}

/// Returns the exit code with some stdout.
pub fn code_with_stdout(args: impl Arg, stdout: impl Into<Stdio>) -> i32 {
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin!("moe-analyze"));
    command
        .args(args![args])
        .stdout(stdout)
        .stderr(Stdio::null());
    command.status().unwrap().code().unwrap()
}

/// A pipe without a reader.
pub fn closed_pipe() -> Stdio {
    let (_, writer) = std::io::pipe().unwrap();
    writer.into()
}

/// Stdouts that cannot be written, each with the exit code of a command without a verdict: a closed pipe, and a full device
/// if the system has one.
pub fn bad_stdouts() -> Vec<(Stdio, i32)> {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full");
    let mut stdouts = vec![(closed_pipe(), 0)];
    stdouts.extend(full.ok().map(|full| (full.into(), 2)));
    stdouts
}

/// The records of a run as a trace.bin with other operation numbers, and the table with their names.
pub fn renumbered(run: &Path, dir: &Path) -> (PathBuf, PathBuf) {
    let mut bytes = std::fs::read(run.join("trace.bin")).unwrap();
    let mut names = std::collections::BTreeSet::new();
    for record in bytes.chunks_exact_mut(1024) {
        let op = std::mem::offset_of!(TensorAccessLog, operation_type);
        let name = ops::default_table().name(record[op]).unwrap().to_owned();
        record[op] += 100;
        names.insert(format!("{},{name}\n", record[op]));
    }
    let (trace, table) = (dir.join("renumbered.bin"), dir.join("ops.csv"));
    std::fs::write(&trace, bytes).unwrap();
    let lines: String = names.into_iter().collect();
    std::fs::write(&table, format!("number,name\n{lines}")).unwrap();
    (trace, table)
}

/// Writes a file in a directory.
pub fn file_of(dir: &Path, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, contents).unwrap();
    path
}

/// The path as an argument.
pub fn arg(path: &Path) -> &str {
    path.to_str().unwrap()
}

pub const N_LAYER: u32 = 6;
pub const N_EXPERT: u32 = 32;
pub const N_EXPERT_USED: u32 = 4;
pub const N_PROMPT: u32 = 10;
pub const N_GENERATED: u32 = 6;

/// Router weights of the four experts of every token of the known run. Their sums are exact in binary.
pub const WEIGHTS: [f32; 4] = [0.5, 0.25, 0.125, 0.125];

/// The experts of a token in a layer of the known run, by descending weight.
pub fn experts_of(token: u32, layer: u32) -> [u32; 4] {
    // Every token selects expert 3, every other token expert 20; the other experts vary.
    let wander = (token * 5 + layer * 7) % 10;
    [3, 20 + token % 2, 4 + wander, 22 + wander]
}

/// Tokens that a layer of the known run routes in a phase: the last layer computes only the prompt's last token.
pub fn tokens_of(layer: u32, phase: u8) -> std::ops::Range<u32> {
    match phase {
        PHASE_PROMPT if layer == N_LAYER - 1 => N_PROMPT - 1..N_PROMPT,
        PHASE_PROMPT => 0..N_PROMPT,
        _ => N_PROMPT..N_PROMPT + N_GENERATED,
    }
}

/// (layer, expert) → count of the known run.
pub fn known_counts(phases: &[u8]) -> BTreeMap<(u32, u32), u64> {
    let mut counts = BTreeMap::new();
    for layer in 0..N_LAYER {
        for token in phases.iter().flat_map(|&phase| tokens_of(layer, phase)) {
            for expert in experts_of(token, layer) {
                *counts.entry((layer, expert)).or_default() += 1;
            }
        }
    }
    counts
}

/// Writes a GGUF file with the keys and F32 tensors of zeros, after the keys and tensors of `like`.
pub fn write_gguf(
    path: &Path,
    like: Option<&Gguf>,
    keys: &[(&str, moe_gguf::Value)],
    tensors: &[(String, Vec<u64>)],
) {
    use moe_gguf::GgmlType;
    use moe_synth::write::{Header, Writer};

    let mut header = match like {
        Some(gguf) => Header::like(gguf, |key| keys.iter().any(|(name, _)| *name == key)).unwrap(),
        None => Header::new(),
    };
    for (key, value) in keys {
        header.set(key, value).unwrap();
    }
    let old = like.map_or(&[][..], |gguf| gguf.tensors());
    for t in old {
        let ne = &t.ne[..t.n_dims as usize];
        header.tensor(&t.name, t.ty, ne).unwrap();
    }
    for (name, ne) in tensors {
        header.tensor(name, GgmlType::F32, ne).unwrap();
    }
    let mut writer = Writer::new(std::fs::File::create(path).unwrap(), header).unwrap();
    for t in old {
        writer.write(like.unwrap().data(t).unwrap()).unwrap();
    }
    for (_, ne) in tensors {
        let n_bytes = 4 * ne.iter().product::<u64>();
        writer.write(&vec![0; n_bytes as usize]).unwrap();
    }
    writer.finish().unwrap();
}

/// Both phases.
pub const ALL: [u8; 2] = [PHASE_PROMPT, PHASE_GENERATE];

/// Writes the known run: one prompt pass, then one pass for each generated token, over the qwen3moe fixture.
pub fn known_run(dir: &Path) {
    let gguf = Gguf::open(repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf")).unwrap();
    known_run_of(dir, &gguf);
}

/// Writes the known run over a model that has the tensors of the qwen3moe fixture and possibly more.
pub fn known_run_of(dir: &Path, gguf: &Gguf) {
    let file = &gguf.files()[0];
    let manifest = Manifest {
        engine: Engine {
            name: "test".into(),
            version: "1".into(),
        },
        model: Model {
            path: file.name.clone(),
            files: vec![ModelFile {
                name: file.name.clone(),
                size_bytes: file.size_bytes,
            }],
            header_xxh3: format!("{:016x}", gguf.header_xxh3()),
            arch: "qwen3moe".into(),
            n_layer: N_LAYER,
            n_expert: N_EXPERT,
            n_expert_used: N_EXPERT_USED,
            ..Model::default()
        },
        started: "2025-01-02T03:04:05Z".into(),
        ..Manifest::default()
    };
    let mut writer =
        RunWriter::create(dir, manifest, &OffsetMap::new(gguf), RunOptions::default()).unwrap();
    let mut clock = 1_000_000;
    pass(&mut writer, gguf, &mut clock, PHASE_PROMPT, |layer| tokens_of(layer, PHASE_PROMPT));
    for token in N_PROMPT..N_PROMPT + N_GENERATED {
        pass(&mut writer, gguf, &mut clock, PHASE_GENERATE, |_| token..token + 1);
    }
    writer.finish().unwrap();
}

fn pass(
    writer: &mut RunWriter,
    gguf: &Gguf,
    clock: &mut u64,
    phase: u8,
    tokens: impl Fn(u32) -> std::ops::Range<u32>,
) {
    for layer in 0..N_LAYER {
        let tokens = tokens(layer);
        let n_tokens = tokens.len() as u32;
        let mut log =
            |clock: u64, op: u8, dst: String, weights: String, token: u32, is_expert: bool| {
                let mut record = TensorAccessLog {
                    operation_type: op,
                    phase,
                    ext_version: EXT_V1,
                    ..Default::default()
                };
                record.timestamp_ns.set(clock);
                record.duration_ns.set(500);
                record.token_id.set(token);
                record.layer_id.set(layer as u16);
                record.n_tokens.set(n_tokens);
                set_name(&mut record.dst_name, &dst);
                record.num_sources = 2;

                let tensor = gguf.tensor(&weights).unwrap();
                let source = &mut record.sources[0];
                set_name(&mut source.name, &weights);
                source.layer_id.set(layer as u16);
                source.memory_source = SOURCE_DISK;
                source.offset_or_buffer_id.set(tensor.offset);
                source.tensor_idx.set(tensor.index);
                record.set_source_size(0, tensor.size_bytes);

                let source = &mut record.sources[1];
                set_name(&mut source.name, &format!("ffn_norm-{layer}"));
                source.layer_id.set(NO_LAYER);
                source.memory_source = SOURCE_BUFFER;
                source.offset_or_buffer_id.set(1);
                source.tensor_idx.set(NO_TENSOR);
                record.set_source_size(1, 1024 * u64::from(n_tokens));

                if is_expert {
                    record.num_experts = 4;
                    for (slot, expert) in experts_of(token, layer).into_iter().enumerate() {
                        record.expert_ids[slot].set(expert as i32);
                        record.expert_weights[slot].set(WEIGHTS[slot]);
                        record.expert_lane[slot] = lane::CPU;
                    }
                }
                *writer.next_record().unwrap() = record;
            };
        let first = tokens.start;
        log(
            *clock,
            ops::MUL_MAT,
            format!("Qcur-{layer}"),
            format!("blk.{layer}.attn_q.weight"),
            first,
            false,
        );
        for projection in ["gate", "up", "down"] {
            let weights = format!("blk.{layer}.ffn_{projection}_exps.weight");
            *clock += 1000;
            for token in tokens.clone() {
                let dst = format!("ffn_moe_{projection}-{layer}");
                log(*clock, ops::MUL_MAT_ID, dst, weights.clone(), token, true);
            }
        }
        *clock += 1000;
    }
}
