//! Prints how many records the operations of a trace have: `read_trace RUN_DIRECTORY`, or the path of a `trace.bin`.
//!
//! Needs no default features: `moe-trace = { version = "…", default-features = false }`.

use std::collections::BTreeMap;
use std::error::Error;

use moe_trace::Run;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1);
    let run = Run::open(path.ok_or("usage: read_trace RUN_DIRECTORY|trace.bin")?)?;
    let mut n_records: BTreeMap<u8, u64> = BTreeMap::new();
    for operation in run.trace.operations() {
        let n = n_records
            .entry(operation.head().operation_type)
            .or_default();
        *n += operation.records().len() as u64;
    }
    for (number, n) in n_records {
        let name = run.ops().name(number).unwrap_or("unknown operation");
        println!("{n:>10}  {name}");
    }
    Ok(())
}
