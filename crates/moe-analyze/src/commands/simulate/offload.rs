//! The offload crossover: the batch size from which copying experts to the GPU is faster than the CPU.

use std::io::{self, Write};

use moe_analysis::simulate::{BatchTime, MAX_BATCH, Offload};
use moe_files::text::counted;

use crate::context::Context;
use crate::output::{Format, Table, rounded};

/// Largest batch of the table. llama.cpp's batches have 512 to 4096 tokens.
const MAX_ROW: u64 = 4096;

/// Prints one row per power of two.
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
        "gpu_if_overlapped"
    } else {
        "cpu"
    }
}

/// Prints the crossover and the setting of llama.cpp that uses it.
pub fn print_crossover(offload: &Offload, ctx: &Context) {
    let hidden = offload.crossover(BatchTime::offload_min_s);
    let serial = offload.crossover(BatchTime::offload_max_s);
    match (hidden, serial) {
        (_, Some(serial)) => {
            let hidden = match hidden {
                Some(hidden) if hidden < serial => {
                    format!(" ({} if copies are hidden)", counted(hidden, "token"))
                }
                _ => String::new(),
            };
            ctx.note(format_args!(
                "copying experts to the GPU is faster than computing on the CPU for batches of at least {}{hidden}; \
                 set GGML_OP_OFFLOAD_MIN_BATCH={serial} for llama.cpp, whose default is 32",
                counted(serial, "token")
            ));
        }
        (Some(hidden), None) => ctx.note(format_args!(
            "copying experts to the GPU is faster than computing on the CPU only if copies are hidden, for batches of at least \
             {}; llama.cpp copies for at least 32 (GGML_OP_OFFLOAD_MIN_BATCH)",
            counted(hidden, "token")
        )),
        (None, None) => ctx.note(format_args!(
            "copying experts to the GPU is not faster than computing on the CPU for any batch of up to {MAX_BATCH} tokens; \
             llama.cpp copies for at least 32 (GGML_OP_OFFLOAD_MIN_BATCH)"
        )),
    }
}
