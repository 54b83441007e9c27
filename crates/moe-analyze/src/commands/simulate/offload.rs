//! The offload crossover: rows of batches, and the line that names it.

use std::io::{self, Write};

use moe_analysis::simulate::{BatchTime, MAX_BATCH, Offload};

use super::report::rounded;
use crate::context::Context;
use crate::output::{Format, Table};

/// The largest batch of the table; llama.cpp's batches hold 512 to 4096 tokens.
const MAX_ROW: u64 = 4096;

/// Prints a row for each power of two.
pub fn print(offload: &Offload, out: &mut dyn Write, format: Format) -> io::Result<()> {
    let sizes = std::iter::successors(Some(1u64), |n| Some(2 * n));
    let sizes = sizes.take_while(|&n| n <= MAX_ROW);
    let ms = |seconds: f64| rounded(1e3 * seconds, 3);
    Table::of(sizes.map(|n| offload.time(n)))
        .column("n_tokens", "batch (tokens)", |time| time.n_tokens)
        .column("distinct_experts", "distinct experts", |time| {
            rounded(time.distinct, 1)
        })
        .column("cpu_ms", "CPU (ms)", move |time| ms(time.cpu_s))
        .column("load_ms", "H2D copies (ms)", move |time| ms(time.load_s))
        .column("gpu_ms", "GPU (ms)", move |time| ms(time.device_s))
        .column("offload_ms_min", "offload, min (ms)", move |time| {
            ms(time.offload_min_s())
        })
        .column("offload_ms_max", "offload, max (ms)", move |time| {
            ms(time.offload_max_s())
        })
        .column("faster", "faster", faster)
        .write(out, format)
}

fn faster(time: &BatchTime) -> &'static str {
    if time.offload_max_s() <= time.cpu_s {
        "gpu"
    } else if time.offload_min_s() <= time.cpu_s {
        "gpu if copies are hidden"
    } else {
        "cpu"
    }
}

/// Tells from which batch on copying is faster, and what llama.cpp should be told.
pub fn remark(offload: &Offload, ctx: &Context) {
    let hidden = offload.crossover(BatchTime::offload_min_s);
    let serial = offload.crossover(BatchTime::offload_max_s);
    match (hidden, serial) {
        (_, Some(serial)) => {
            let hidden = match hidden {
                Some(hidden) if hidden < serial => {
                    format!(" (from {hidden} on if copies are hidden)")
                }
                _ => String::new(),
            };
            ctx.remark(format_args!(
                "copying a batch's experts to the GPU is faster than computing them on the CPU from a batch of {serial} on{hidden}; \
                 llama.cpp does so from 32 on unless GGML_OP_OFFLOAD_MIN_BATCH={serial} is set"
            ));
        }
        (Some(hidden), None) => ctx.remark(format_args!(
            "copying a batch's experts to the GPU is faster than computing them on the CPU only if copies are hidden, from a \
             batch of {hidden} on; llama.cpp copies from 32 on (GGML_OP_OFFLOAD_MIN_BATCH)"
        )),
        (None, None) => ctx.remark(format_args!(
            "copying a batch's experts to the GPU is not faster than computing them on the CPU for any batch up to {MAX_BATCH}; \
             llama.cpp copies from 32 on (GGML_OP_OFFLOAD_MIN_BATCH)"
        )),
    }
}
