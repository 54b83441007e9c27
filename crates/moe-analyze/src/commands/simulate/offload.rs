//! The offload crossover: rows of batches, and the line that names it.

use std::io::{self, Write};

use moe_analysis::simulate::{BatchTime, MAX_BATCH, Offload};

use super::report::rounded;
use crate::context::Context;
use crate::output::{Cell, Format, write_rows};

const COLUMNS: [&str; 8] = [
    "n_tokens",
    "distinct_experts",
    "cpu_ms",
    "load_ms",
    "gpu_ms",
    "offload_ms_min",
    "offload_ms_max",
    "faster",
];

/// The largest batch of the table; llama.cpp's batches hold 512 to 4096 tokens.
const MAX_ROW: u64 = 4096;

/// Prints a row for each power of two.
pub fn print(offload: &Offload, out: &mut dyn Write, format: Format) -> io::Result<()> {
    let sizes = std::iter::successors(Some(1u64), |n| Some(2 * n));
    let sizes = sizes.take_while(|&n| n <= MAX_ROW);
    let rows: Vec<Vec<Cell>> = sizes.map(|n| cells(&offload.time(n))).collect();
    write_rows(out, format, &COLUMNS, rows)
}

fn cells(time: &BatchTime) -> Vec<Cell<'static>> {
    let ms = |seconds: f64| rounded(1e3 * seconds, 3);
    let faster = if time.offload_max_s() <= time.cpu_s {
        "gpu"
    } else if time.offload_min_s() <= time.cpu_s {
        "gpu if copies are hidden"
    } else {
        "cpu"
    };
    vec![
        time.n_tokens.into(),
        rounded(time.distinct, 1).into(),
        ms(time.cpu_s).into(),
        ms(time.load_s).into(),
        ms(time.device_s).into(),
        ms(time.offload_min_s()).into(),
        ms(time.offload_max_s()).into(),
        faster.into(),
    ]
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
