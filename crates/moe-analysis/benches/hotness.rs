//! Bytes of trace counted in a second, beside a sequential read of the same mapped file; and counting from the Parquet table.
//!
//!   scripts/demo.sh && cargo bench --package moe-analysis

#[path = "../../moe-trace/benches/long_run/mod.rs"]
mod long_run;

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use moe_analysis::hotness::Hotness;
use moe_trace::tables::{TableOptions, table_paths, write_tables};
use zerocopy::IntoBytes;

fn hotness(criterion: &mut Criterion) {
    let (_dir, run) = long_run::long_run();
    let trace = run.trace.records().as_bytes();
    let mut group = criterion.benchmark_group("hotness");
    group.sample_size(10);
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
    group.bench_function("from routing.parquet", |b| {
        b.iter(|| Hotness::from_routing_table(&routing, None).expect("hotness"));
    });
    group.finish();
}

criterion_group!(benches, hotness);
criterion_main!(benches);
