//! `relayout`: writes a model with its tensors and experts in another order.

mod experts;
mod verify;

use std::path::{Path, PathBuf};

use anyhow::bail;
use moe_files::text::counted;
use moe_gguf::Gguf;
use moe_gguf::layers::{LayerOrder, layer_order};
use moe_synth::relayout::{Error, ExpertOrders, Layout, TensorOrder};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::files::{self, OutputPath};
use crate::large_output;
use crate::output::human_bytes;

/// Write a GGUF model with its tensors, or the experts inside them, in another order
///
/// The new file has the same tensors and key-values, and llama.cpp loads it. A split model becomes one file. Use it to measure how the
/// order of tensors in the file affects reading.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  moe-analyze relayout model.gguf --order hot-first --hotness learn.json --out hot.gguf --verify"
)]
pub struct Args {
    /// Model, a GGUF file (any file of a split model)
    model: PathBuf,
    /// Order of the tensors in the file
    #[arg(long, value_enum, default_value_t = OrderChoice::Numeric)]
    order: OrderChoice,
    /// Learn file for --order hot-first, which sorts the experts of each layer by its counts; `hotness --out` writes it
    #[arg(long, value_name = "FILE.json")]
    hotness: Option<PathBuf>,
    /// Reorder the experts of each layer and the rows of its router. FILE is a learn file (hottest expert first), or JSON with the
    /// order of each layer: {"LAYER": [expert, …]}. `coactivation` places experts that the tokens of --trace select together next to
    /// each other
    #[arg(long, value_name = "FILE|coactivation", conflicts_with = "hotness")]
    permute_experts: Option<PathBuf>,
    /// Run directory or trace.bin of the model, for --permute-experts coactivation
    #[arg(long, value_name = "RUN")]
    trace: Option<PathBuf>,
    /// File to write
    #[arg(long, value_name = "FILE.gguf")]
    out: OutputPath,
    /// Replace the file of --out if it exists
    #[arg(long)]
    force: bool,
    /// Compare the tensors of both files, run both models and compare their logits; exit with 1 if anything differs
    #[arg(long)]
    verify: bool,
    /// Prompt text for --verify
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "The kernel driver is responsible for",
        requires = "verify"
    )]
    prompt: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum OrderChoice {
    /// Order of execution: embeddings, layers by number, output
    Numeric,
    /// Tensors that every token reads, then the experts, the hottest of each layer first; experts get new ids
    HotFirst,
    /// Unchanged order
    File,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    match (args.order, &args.hotness) {
        (OrderChoice::HotFirst, None) => {
            bail!("--order hot-first needs --hotness FILE.json, which `hotness --out` writes")
        }
        (OrderChoice::Numeric | OrderChoice::File, Some(_)) => bail!(
            "--hotness has no effect without --order hot-first; to reorder only experts, pass the file to --permute-experts"
        ),
        _ => {}
    }
    files::require_extension(&args.out, "gguf")?;
    files::check_output(&args.out, args.force)?;
    let gguf = Gguf::open(&args.model)?;
    let orders = expert_orders(ctx, &args, &gguf)?;
    let order = match args.order {
        OrderChoice::Numeric => TensorOrder::Numeric,
        OrderChoice::HotFirst => TensorOrder::HotFirst,
        OrderChoice::File => TensorOrder::File,
    };
    let layout = Layout::new(&gguf, order, &orders).map_err(|error| {
        match (&error, &args.permute_experts) {
            (
                Error::NoExperts { .. } | Error::InvalidOrder { .. } | Error::Groups { .. },
                Some(file),
            ) => {
                let file = file.display().to_string();
                anyhow::Error::new(error).context(file)
            }
            _ => error.into(),
        }
    })?;
    let size = layout.file_size();
    if gguf.files().len() > 1 {
        ctx.note(format_args!(
            "merging {} files into one; omitting the split.* keys",
            gguf.files().len()
        ));
    }
    large_output::write(ctx, &args.out, args.force, size, |out| {
        layout.write(&gguf, out).map(drop)
    })?;

    let new = Gguf::open(&args.out)?;
    ctx.note(format_args!(
        "wrote {}: {}, {}; experts reordered in {}",
        args.out.display(),
        counted(new.tensors().len(), "tensor"),
        human_bytes(size),
        counted(layout.n_permuted(), "tensor")
    ));
    if layout.n_permuted() > 0 {
        ctx.note(
            "experts have different ids in the new file: learn files, plans and traces of the old file do not match it; record them again",
        );
    }
    ctx.note(format_args!(
        "seeks per forward pass: {} before, {} after",
        seeks(&layer_order(&gguf)),
        seeks(&layer_order(&new))
    ));
    if args.verify {
        let permuted = layout.n_permuted() > 0;
        return verify::verify(ctx, &layout, permuted, [&gguf, &new], &args.prompt);
    }
    Ok(ExitStatus::Done)
}

fn expert_orders(ctx: &Context, args: &Args, gguf: &Gguf) -> anyhow::Result<ExpertOrders> {
    let coactivation = args.permute_experts.as_deref() == Some(Path::new("coactivation"));
    match (&args.trace, coactivation) {
        (Some(trace), true) => return experts::by_coactivation(ctx, trace, gguf),
        (None, true) => {
            bail!("--permute-experts coactivation needs a run of the model; add --trace RUN")
        }
        (Some(_), false) => bail!(
            "--trace has no effect without --permute-experts coactivation; add it, or omit --trace"
        ),
        (None, false) => {}
    }
    match args.hotness.as_ref().or(args.permute_experts.as_ref()) {
        Some(path) => experts::from_file(path, gguf),
        None => Ok(ExpertOrders::new()),
    }
}

fn seeks(order: &LayerOrder) -> String {
    format!(
        "{} (distance {})",
        order.seeks,
        human_bytes(order.seek_bytes)
    )
}
