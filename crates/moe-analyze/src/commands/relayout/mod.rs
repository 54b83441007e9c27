//! `relayout`: a model in a new file, its tensors and experts in another order.

mod experts;
mod verify;

use std::path::{Path, PathBuf};

use anyhow::bail;
use moe_gguf::Gguf;
use moe_gguf::layers::{LayerOrder, layer_order};
use moe_gguf::text::counted;
use moe_synth::relayout::{ExpertOrders, Layout, TensorOrder};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::files::{self, OutputPath};
use crate::large_output;
use crate::output::human_bytes;

/// Write a model anew with its tensors, and the experts inside them, in another order
///
/// Every tensor and every key-value stays byte for byte as it was, and the tensor table lists the tensors in the order
/// of the data, so that llama.cpp loads the new file. A model in several files becomes one.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model, a GGUF file (any shard of a model in several files)
    model: PathBuf,
    /// Order of the tensors
    #[arg(long, value_enum, default_value_t = OrderChoice::Numeric)]
    order: OrderChoice,
    /// How hot each expert is: what `hotness --out` wrote [with --order hot-first]
    #[arg(long, value_name = "FILE.json")]
    hotness: Option<PathBuf>,
    /// Put the experts of each layer in another order, with all that belongs to them. FILE is a learn file (hottest
    /// first) or {"LAYER": [expert, …]}; `coactivation` sets experts side by side that --trace chose together
    #[arg(long, value_name = "FILE|coactivation", conflicts_with = "hotness")]
    permute_experts: Option<PathBuf>,
    /// A run of the model, for `--permute-experts coactivation`
    #[arg(long, value_name = "RUN")]
    trace: Option<PathBuf>,
    /// The new file
    #[arg(long, value_name = "FILE.gguf")]
    out: OutputPath,
    /// Replace the new file if it exists
    #[arg(long)]
    force: bool,
    /// Read both files back and compare them, and run both and compare their logits; exit 1 if anything differs
    #[arg(long)]
    verify: bool,
    /// Text on which both are run
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
    /// As they are read: embeddings, layers by number in order of execution, output
    Numeric,
    /// What every token reads, then the experts, each layer's hottest first
    HotFirst,
    /// As they are
    File,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    match (args.order, &args.hotness) {
        (OrderChoice::HotFirst, None) => {
            bail!("--order hot-first needs --hotness FILE.json, which `hotness --out` writes")
        }
        (OrderChoice::Numeric | OrderChoice::File, Some(_)) => bail!(
            "--hotness goes with --order hot-first; to move experts alone give the file to --permute-experts"
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
    let layout = Layout::new(&gguf, order, &orders)?;
    let size = layout.file_size();
    if gguf.files().len() > 1 {
        ctx.remark(format_args!(
            "{} files become one; the split.* keys are left out",
            gguf.files().len()
        ));
    }
    large_output::write(ctx, &args.out, args.force, size, |out| {
        layout.write(&gguf, out).map(drop)
    })?;

    let new = Gguf::open(&args.out)?;
    ctx.remark(format_args!(
        "wrote {}: {}, {}; experts changed places in {}",
        args.out.display(),
        counted(new.tensors().len(), "tensor"),
        human_bytes(size),
        counted(layout.n_permuted(), "tensor")
    ));
    if layout.n_permuted() > 0 {
        ctx.remark(
            "experts have other numbers in the new file: learn files, plans and traces of the old one no longer fit; record it anew",
        );
    }
    ctx.remark(format_args!(
        "the layers, read in order: {} before, {} now",
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
            bail!("--permute-experts coactivation needs --trace RUN, a run of the model")
        }
        (Some(_), false) => bail!("--trace is of use with --permute-experts coactivation alone"),
        (None, false) => {}
    }
    match args.hotness.as_ref().or(args.permute_experts.as_ref()) {
        Some(path) => experts::from_file(path, gguf),
        None => Ok(ExpertOrders::new()),
    }
}

fn seeks(order: &LayerOrder) -> String {
    format!(
        "{} over {}",
        counted(order.seeks, "seek"),
        human_bytes(order.seek_bytes)
    )
}
