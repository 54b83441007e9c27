//! `graph`: the computation graph of a pass, as Graphviz's DOT or as JSON.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use moe_gguf::text::counted;
use moe_trace::graph::{self, Graph};
use moe_trace::{Manifest, Phase};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::files::{self, OutputPath};
use crate::output;
use crate::phase_choice::one_phase;
use crate::progress::Progress;
use crate::traces::{self, OpsArgs};

/// Write the computation graph of a prompt or of a decode pass, as DOT or as JSON
///
/// A run has the graphs that its recorder wrote; for a trace without them the graph is made from the records.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A run directory, or a trace
    run: PathBuf,
    /// Which pass: the prompt's, or one of a generated token
    #[arg(long, value_parser = one_phase(), default_value = "generate")]
    phase: Phase,
    /// Format on stdout, or of --out where its extension is another [default: dot]
    #[arg(short, long = "output", value_enum, value_name = "FORMAT")]
    output: Option<GraphFormat>,
    /// Write to a file; its extension chooses: dot, gv, json
    #[arg(long, value_name = "FILE")]
    out: Option<OutputPath>,
    /// Make the graph from the records even where the run has one
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
    /// Graphviz
    Dot,
    /// The graph JSON of the thesis's viewers
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
            files::write_whole(path, args.force, |file| Ok(write(file)?))?;
            ctx.remark(format_args!(
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

/// As `-o` says, else as the extension of `--out` says.
fn format(args: &Args) -> anyhow::Result<GraphFormat> {
    let extension = args.out.as_deref().and_then(Path::extension);
    match (args.output, extension.and_then(|e| e.to_str())) {
        (Some(format), _) => Ok(format),
        (None, Some("json")) => Ok(GraphFormat::Json),
        (None, Some("dot" | "gv")) => Ok(GraphFormat::Dot),
        (None, _) => match &args.out {
            None => Ok(GraphFormat::Dot),
            Some(out) => bail!(
                "{}: no graph format has that extension; name a .dot, .gv or .json file, or pass -o",
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
    if !args.from_records && !args.ops.are_named() && recorded.is_file() {
        return Ok(Graph::read(&recorded)?);
    }
    let run = args.ops.open(&args.run, ctx)?;
    args.ops.check(&[&run])?;
    ctx.remark(format_args!(
        "the graph is made from the records of {}: of what an operation reads they name four tensors at most",
        run.trace.path().display()
    ));
    let _progress = Progress::of_run(ctx, &run);
    graph::reconstruct(&run, phase).with_context(|| {
        let pass = match args.phase {
            Phase::Prompt => "prompt",
            Phase::Generate => "decode",
        };
        format!(
            "{} has no {pass} pass; choose the other --phase, or record more tokens",
            args.run.display()
        )
    })
}
