//! The C header and the NumPy dtype match the record that this crate writes.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use moe_testkit::{has_compiler, python};
use moe_trace::ops::MUL_MAT_ID;
use moe_trace::record::FLAG_CPU_FALLBACK;
use zerocopy::IntoBytes;

use super::common::{expert_operation, read_buffer, record};

fn schemas() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../schemas")
}

/// Runs a program that must succeed and returns its stdout.
fn run(program: impl AsRef<OsStr>, args: &[&str]) -> String {
    let program = program.as_ref();
    let output = Command::new(program).args(args).output().unwrap();
    assert!(
        output.status.success(),
        "{program:?} {args:?}:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Compiles a program that includes the header, runs it on a trace and checks its output.
fn read_with_c(compiler: &str, standard: &str, extension: &str) {
    if !has_compiler(compiler) {
        return;
    }
    let tmp = tempfile::tempdir().unwrap();
    let source = tmp.path().join("read").with_extension(extension);
    let program = tmp.path().join("read");
    let trace = tmp.path().join("trace.bin");
    fs::write(&source, READ_IN_C).unwrap();
    fs::write(&trace, sample().as_bytes()).unwrap();
    let include = format!("-I{}", schemas().display());
    let standard = format!("-std={standard}");
    let (source, program) = (source.to_str().unwrap(), program.to_str().unwrap());
    let args = [
        &standard,
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        &include,
        "-o",
        program,
        source,
    ];
    run(compiler, &args);
    let printed = run(program, &[trace.to_str().unwrap()]);
    assert_eq!(printed.trim(), EXPECTED);
}

const READ_IN_C: &str = r#"
#include "tensor_access_log.h"
#include <stdio.h>
int main(int argc, char **argv) {
    struct tensor_access_log r;
    FILE *f = argc > 1 ? fopen(argv[1], "rb") : NULL;
    if (!f || fread(&r, sizeof r, 1, f) != 1) return 1;
    fclose(f);
    printf("%llu %u %u %u %u %s %s %llu %d %u %u %u %llu %u %u %u %g %u %u\n",
        (unsigned long long) r.timestamp_ns, r.token_id, r.layer_id, r.operation_type, r.num_sources, r.dst_name,
        r.sources[1].name, (unsigned long long) r.sources[1].offset_or_buffer_id, r.expert_ids[2], r.num_experts,
        r.ext_version, r.flags, (unsigned long long) r.duration_ns, r.n_tokens, r.sequence_id, r.size_bytes_high[1],
        r.expert_weights[1], r.expert_lane[2], r.source_file[1]);
    return 0;
}
"#;

const EXPECTED: &str =
    "72623859790382856 77 5 30 2 ffn_moe_gate-5 ffn_norm-5 9 13 3 1 2 500 1 6 2 0.5 1 4";

fn sample() -> moe_trace::TensorAccessLog {
    let mut head = record(0x0102_0304_0506_0708, MUL_MAT_ID, "ffn_moe_gate-5");
    read_buffer(&mut head, "a", 8, 1);
    read_buffer(&mut head, "ffn_norm-5", 9, 2 << 32 | 3);
    head.source_file[1].set(4);
    head.sequence_id.set(6);
    let mut record = expert_operation(&head, 5, 77, &[&[11, 12, 13]])[0];
    record.flags = FLAG_CPU_FALLBACK;
    record
}

#[test]
fn header_compiles_as_c11() {
    read_with_c("cc", "c11", "c");
}

#[test]
fn header_compiles_as_cpp17() {
    read_with_c("c++", "c++17", "cpp");
}

#[test]
fn numpy_dtype_reads_the_record() {
    let Some(python) = python("numpy") else {
        return;
    };
    let tmp = tempfile::tempdir().unwrap();
    let trace = tmp.path().join("trace.bin");
    let mut bytes = sample().as_bytes().to_vec();
    bytes.extend([0; 2048]);
    bytes.extend(sample().as_bytes());
    fs::write(&trace, bytes).unwrap();
    let script = r#"
import sys
sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
import tensor_access_log as log
records = log.load(sys.argv[2])
assert len(records) == 1, len(records)
r = records[0]
s = r["sources"][1]
assert log.source_sizes(records)[0].tolist() == [1, (2 << 32) + 3, 0, 0]
print(r["timestamp_ns"], r["token_id"], r["layer_id"], r["operation_type"], r["num_sources"], r["dst_name"].decode(),
    s["name"].decode(), s["offset_or_buffer_id"], r["expert_ids"][2], r["num_experts"], r["ext_version"], r["flags"],
    r["duration_ns"], r["n_tokens"], r["sequence_id"], r["size_bytes_high"][1], "%g" % r["expert_weights"][1],
    r["expert_lane"][2], r["source_file"][1])
"#;
    let printed = run(
        python,
        &[
            "-c",
            script,
            schemas().to_str().unwrap(),
            trace.to_str().unwrap(),
        ],
    );
    assert_eq!(printed.trim(), EXPECTED);
}

#[test]
fn python_has_the_same_lane_names() {
    let python = fs::read_to_string(schemas().join("tensor_access_log.py")).unwrap();
    let names = moe_trace::record::lane::NAMES
        .map(|name| format!("    \"{name}\",\n"))
        .concat();
    assert!(python.contains(&format!("LANES = (\n{names})")));
}
