//! Throughput of counting: from trace.bin compared with a sequential read of the mapped file, and from the Parquet table.
//!
//!   scripts/demo.sh && cargo bench --package moe-analysis --bench hotness
//!
//! With `MOE_ANALYZE_ROUTING=routing.parquet` the benchmark counts only this table.

#[path = "../../moe-trace/benches/long_run/mod.rs"]
mod long_run;

use std::hint::black_box;
use std::path::Path;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use moe_analysis::hotness::Hotness;
use moe_trace::tables::{TableOptions, table_paths, write_tables};
use zerocopy::IntoBytes;

fn from_table(group: &mut BenchmarkGroup<WallTime>, routing: &Path) {
    group.bench_function("from routing.parquet", |b| {
        b.iter(|| Hotness::from_routing_table(routing, None).expect("hotness"));
    });
}

fn hotness(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("hotness");
    group.sample_size(10);
    if let Some(routing) = std::env::var_os("MOE_ANALYZE_ROUTING") {
        from_table(&mut group, Path::new(&routing));
        return;
    }
    let (_dir, run) = long_run::long_run();
    let trace = run.trace.records().as_bytes();
    group.throughput(Throughput::Bytes(trace.len() as u64));
    group.bench_function("sequential read", |b| {
        b.iter(|| {
            let words = trace.as_chunks::<8>().0.iter();
            let sum = words.fold(0u64, |sum, word| {
                sum.wrapping_add(u64::from_le_bytes(*word))
            });
            black_box(sum)
        });
    });
    group.bench_function("from trace.bin", |b| {
        b.iter(|| Hotness::from_run(&run, None).expect("hotness"));
    });
    let out = tempfile::tempdir().expect("a temporary directory");
    write_tables(&run, out.path(), TableOptions::default()).expect("tables");
    let [_, _, routing] = table_paths(out.path());
    from_table(&mut group, &routing);
    group.finish();
}

criterion_group!(benches, hotness);
criterion_main!(benches);
