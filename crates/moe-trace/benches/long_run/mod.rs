//! A long run for benchmarks: a repeated recording.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::PathBuf;

use moe_trace::{Run, TensorAccessLog};
use tempfile::TempDir;
use zerocopy::IntoBytes;

/// A run directory whose trace repeats that of the run in `MOE_ANALYZE_RUN` (default: `runs/demo/run`, which
/// `scripts/demo.sh` writes) until it has `MOE_ANALYZE_MIB` MiB (default: 1024). Timestamps and positions continue to
/// increase.
///
/// # Panics
/// If there is no such run, or not enough disk space.
pub fn long_run() -> (TempDir, Run) {
    let from = std::env::var_os("MOE_ANALYZE_RUN").map(PathBuf::from);
    let from = from
        .unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../runs/demo/run"));
    let mib = std::env::var("MOE_ANALYZE_MIB").map_or(1024, |mib| {
        mib.parse::<u64>().expect("MOE_ANALYZE_MIB is a number")
    });
    let source = Run::open(&from).expect("a run to repeat: scripts/demo.sh makes one");
    let records = source.trace.records();
    let (first, last) = (&records[0], &records[records.len() - 1]);
    let lasts = last.timestamp_ns.get() - first.timestamp_ns.get() + 1;
    let tokens = records.iter().map(|r| r.token_id.get()).max().unwrap_or(0) + 1;

    let dir = tempfile::tempdir().expect("a temporary directory");
    for name in ["manifest.json", "gguf-map.parquet"] {
        fs::copy(from.join(name), dir.path().join(name)).expect("the run's files");
    }
    let file = File::create(dir.path().join("trace.bin")).expect("a trace");
    let mut file = BufWriter::new(file);
    let times = (mib << 20).div_ceil(size_of_val(records) as u64);
    for time in 0..times {
        for record in records {
            let mut record: TensorAccessLog = *record;
            let timestamp = record.timestamp_ns.get() + time * lasts;
            record.timestamp_ns.set(timestamp);
            let token = record.token_id.get() + time as u32 * tokens;
            record.token_id.set(token);
            file.write_all(record.as_bytes())
                .expect("disk space for the trace");
        }
    }
    file.into_inner().expect("disk space for the trace");
    let run = Run::open(dir.path()).expect("the repeated run");
    (dir, run)
}
