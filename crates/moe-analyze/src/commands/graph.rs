//! `graph`: the computation graph of a forward pass, as Graphviz DOT or as JSON.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use moe_files::text::counted;
use moe_trace::bounded::is_present;
use moe_trace::graph::{self, Graph};
use moe_trace::{Manifest, Phase};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::files::{self, OutputPath};
use crate::output;
use crate::phase_choice::one_phase;
use crate::progress::Progress;
use crate::traces::{self, OpsArgs};

/// Print the computation graph of a forward pass as Graphviz DOT or JSON
///
/// Reads the graph that the recorder wrote to the run directory. For a trace without graphs, reconstructs the graph from the records.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  moe-analyze graph runs/first --out decode.dot && dot -Tsvg decode.dot > decode.svg"
)]
pub struct Args {
    /// Run directory, or a trace.bin
    run: PathBuf,
    /// Forward pass to print: the first prompt pass, or the first decode pass (generate)
    #[arg(long, value_parser = one_phase(), default_value = "generate")]
    phase: Phase,
    /// Format of the graph; overrides the extension of --out [default: dot]
    #[arg(short, long = "output", value_enum, value_name = "FORMAT")]
    output: Option<GraphFormat>,
    /// Write the graph to a file; the extension selects the format: dot, gv, json
    #[arg(long, value_name = "FILE")]
    out: Option<OutputPath>,
    /// Reconstruct the graph from the records, even if the run contains a graph
    #[arg(long)]
    from_records: bool,
    /// Replace the file of --out if it exists
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    ops: OpsArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum GraphFormat {
    /// Graphviz DOT
    Dot,
    /// Graph JSON of the TensorAccessLog viewers (github.com/ErsjanKeri/BSC)
    Json,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    let format = format(&args)?;
    if let Some(out) = &args.out {
        files::check_output(out, args.force)?;
    }
    let graph = read(&args, ctx)?;
    let write = |out: &mut dyn Write| match format {
        GraphFormat::Dot => graph.write_dot(out),
        GraphFormat::Json => {
            serde_json::to_writer(&mut *out, &graph)?;
            writeln!(out)
        }
    };
    match &args.out {
        Some(path) => {
            files::write(path, args.force, |file| Ok(write(file)?))?;
            ctx.note(format_args!(
                "wrote {}: {}, {}, {}",
                path.display(),
                counted(graph.metadata.total_nodes, "node"),
                counted(graph.metadata.total_edges, "edge"),
                counted(graph.metadata.layers, "layer")
            ));
        }
        None => output::data_to_stdout(write)?,
    }
    Ok(ExitStatus::Done)
}

/// Returns the format of `-o`, else that of the extension of `--out`.
fn format(args: &Args) -> anyhow::Result<GraphFormat> {
    let extension = args.out.as_deref().and_then(Path::extension);
    match (args.output, extension.and_then(|e| e.to_str())) {
        (Some(format), _) => Ok(format),
        (None, Some("json")) => Ok(GraphFormat::Json),
        (None, Some("dot" | "gv")) => Ok(GraphFormat::Dot),
        (None, _) => match &args.out {
            None => Ok(GraphFormat::Dot),
            Some(out) => bail!(
                "{}: the extension must be .dot, .gv or .json, or pass -o",
                out.display()
            ),
        },
    }
}

fn read(args: &Args, ctx: &Context) -> anyhow::Result<Graph> {
    let phase = args.phase;
    traces::check_run(&args.run)?;
    Manifest::of_run(&args.run)?;
    let recorded = graph::path(&args.run, phase);
    if !args.from_records && !args.ops.is_given() && is_present(&recorded) {
        return Ok(Graph::read(&recorded)?);
    }
    let run = args.ops.open(&args.run, ctx)?;
    args.ops.check(&[&run])?;
    ctx.note(format_args!(
        "the graph is reconstructed from the records of {}, which contain at most four sources of an operation",
        run.trace.path().display()
    ));
    let _progress = Progress::of_run(ctx, &run);
    graph::reconstruct(&run, phase).with_context(|| {
        let pass = match args.phase {
            Phase::Prompt => "prompt",
            Phase::Generate => "decode",
        };
        format!(
            "{} has no {pass} pass; pass the other --phase, or record more tokens",
            args.run.display()
        )
    })
}
