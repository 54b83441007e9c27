//! Throughput of writing Parquet tables in bytes of trace per second, on one and two threads, compared with a memory copy.
//!
//!   scripts/demo.sh && cargo bench --package moe-trace

mod long_run;

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use moe_trace::tables::{TableOptions, write_tables};
use zerocopy::IntoBytes;

fn tables(criterion: &mut Criterion) {
    let (_dir, run) = long_run::long_run();
    let trace = run.trace.records().as_bytes();
    let mut group = criterion.benchmark_group("tables");
    group.sample_size(10);
    group.throughput(Throughput::Bytes(trace.len() as u64));
    let mut copy = vec![0; trace.len()];
    group.bench_function("copy in memory", |b| {
        b.iter(|| {
            copy.copy_from_slice(trace);
            black_box(&copy);
        });
    });
    drop(copy);
    for threads in [1, 2] {
        let out = tempfile::tempdir().expect("a temporary directory");
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        let pool = pool.build().expect("threads");
        group.bench_function(format!("Parquet, threads: {threads}"), |b| {
            b.iter(|| {
                let options = TableOptions {
                    force: true,
                    ..TableOptions::default()
                };
                pool.install(|| write_tables(&run, out.path(), options).expect("tables"))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, tables);
criterion_main!(benches);
