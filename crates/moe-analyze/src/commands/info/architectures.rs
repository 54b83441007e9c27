//! `info --architectures`: the MoE architectures of both engines.

use std::collections::BTreeMap;

use moe_llama_cpp::MOE_ARCHITECTURES;

use crate::context::Context;
use crate::output::{self, Format, Table};

/// The engines that run an architecture.
#[derive(Debug, Clone, Copy, Default)]
struct Engines {
    /// The executor, on the CPU and on GPUs.
    executor: bool,
    /// llama.cpp.
    llama_cpp: bool,
}

/// Prints the architectures, sorted by name.
pub fn list(format: Format, ctx: &Context) -> anyhow::Result<()> {
    let mut engines: BTreeMap<&str, Engines> = BTreeMap::new();
    for name in moe_executor::architectures() {
        engines.entry(name).or_default().executor = true;
    }
    for &name in MOE_ARCHITECTURES {
        engines.entry(name).or_default().llama_cpp = true;
    }
    let rows: Vec<(&str, Engines)> = engines.into_iter().collect();
    output::to_stdout(format, |stdout| {
        Table::of(&rows)
            .column("architecture", "architecture", |row| row.0)
            .column("cpu", "CPU", |row| yes_or_no(row.1.executor))
            .column("gpu", "GPU", |row| yes_or_no(row.1.executor))
            .column("llama_cpp", "llama.cpp", |row| yes_or_no(row.1.llama_cpp))
            .write(stdout, format)
    })?;
    if cfg!(not(feature = "cuda")) {
        ctx.note("note: this program was built without GPU support; the column GPU is for builds with the feature cuda");
    }
    if cfg!(not(feature = "llama-cpp")) {
        ctx.note("note: this program was built without llama.cpp; the column llama.cpp is for builds with the feature llama-cpp");
    }
    Ok(())
}

fn yes_or_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}
