//! Prints the number of records of each ggml operation in a trace.
//!
//!   cargo run --package moe-trace --example read_trace -- RUN_DIRECTORY|trace.bin
//!
//! It needs neither Arrow nor Parquet: `moe-trace = { version = "…", default-features = false }`.

use std::collections::BTreeMap;
use std::error::Error;

use moe_trace::Run;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1);
    let path = path.ok_or("usage: read_trace RUN_DIRECTORY|trace.bin")?;
    for (name, n) in records_by_operation(&Run::open(path)?) {
        println!("{n:>10}  {name}");
    }
    Ok(())
}

/// Number of records by name of the operation.
pub fn records_by_operation(run: &Run) -> BTreeMap<&str, u64> {
    let mut n_records = BTreeMap::new();
    for operation in run.trace.operations() {
        let name = run.ops().name(operation.head().operation_type);
        *n_records.entry(name.unwrap_or("unknown")).or_default() +=
            operation.records().len() as u64;
    }
    n_records
}
