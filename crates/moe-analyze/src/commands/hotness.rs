//! `hotness`: which experts are hot, as a summary, a matrix, a picture, and a learn file for the hot-cache runtime.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use moe_analysis::hotness::{Hotness, Phases};
use moe_trace::foreign::{Input, Options};

use crate::cli::{Context, ExitStatus};
use crate::expert_usage::{self, LayerUsage};
use crate::files;
use crate::output::{self, Cell, Format, count, write_rows};
use crate::plot::{self, HeatMap};
use crate::traces::{self, TraceArgs};

/// Experts that the summary names in each layer.
const N_TOP: usize = 4;

/// Count how often each expert of each layer was chosen
///
/// Without -o a summary of each layer is printed; with it, a row for each layer and expert, the hottest of a layer first.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Runs, traces, directories of tables, or traces of other tools, all of one model
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Tokens to count
    #[arg(long, value_enum, default_value_t = PhaseChoice::All)]
    phase: PhaseChoice,
    /// Write a learn file for the hot-cache runtime
    #[arg(long, value_name = "FILE.json")]
    out: Option<PathBuf>,
    /// Draw the layer × expert matrix; the extension chooses: png, svg
    #[arg(long, value_name = "FILE.png|svg")]
    plot: Option<PathBuf>,
    /// Print the whole matrix instead of the summary
    #[arg(short, long = "output", value_name = "FORMAT")]
    output: Option<Format>,
    /// Print how often each expert was used, over all layers and in each, in percent, as the expert usage tracer does;
    /// with -o json the tracer's JSON
    #[arg(long)]
    usage: bool,
    /// Replace the files of --out and --plot if they exist
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    trace: TraceArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum PhaseChoice {
    All,
    Prompt,
    Generate,
}

impl PhaseChoice {
    fn phases(self) -> Phases {
        match self {
            PhaseChoice::All => Phases::All,
            PhaseChoice::Prompt => Phases::Prompt,
            PhaseChoice::Generate => Phases::Generate,
        }
    }

    /// What `n` tokens of the phase are called.
    fn tokens(self, n: u64) -> String {
        let tokens = if n == 1 { "token" } else { "tokens" };
        format!("{} {tokens}", self.describe())
    }

    fn describe(self) -> &'static str {
        match self {
            PhaseChoice::All => "prompt and generated",
            PhaseChoice::Prompt => "prompt",
            PhaseChoice::Generate => "generated",
        }
    }
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    if let Some(plot) = &args.plot {
        plot::check_extension(plot)?;
    }
    if let Some(out) = &args.out {
        files::require_extension(out, "json")?;
    }
    for out in args.out.iter().chain(&args.plot) {
        files::check_output(out, args.force)?;
    }

    let hotness = read_all(&args.paths, &args.trace.options()?, ctx)?;
    if let (2.., unknown @ 1..) = hotness.n_runs() {
        ctx.remark(format_args!(
            "{} not tell the model; that all are of one was judged by their numbers of experts alone",
            if unknown == 1 { "1 input does".into() } else { format!("{unknown} inputs do") }
        ));
    }
    let phases = args.phase.phases();
    let learn = hotness
        .learn_file(phases)
        .with_context(|| format!("{} tokens", args.phase.describe()))?;
    if let Some(out) = &args.out {
        files::write_whole(out, args.force, |file| {
            Ok(file.write_all(learn.to_json().as_bytes())?)
        })?;
        ctx.remark(format_args!("wrote {}", out.display()));
    }
    if let Some(plot) = &args.plot {
        heat_map(&hotness, args.phase, &args.paths).write(plot, args.force)?;
        ctx.remark(format_args!("drew {}", plot.display()));
    }
    match args.output {
        format if args.usage => print_usage(&hotness, phases, format)?,
        None => output::to_stdout(|stdout| print_summary(stdout, &hotness, args.phase))?,
        Some(format) => print_matrix(&hotness, phases, format)?,
    }
    Ok(ExitStatus::Done)
}

fn read_all(paths: &[PathBuf], options: &Options, ctx: &Context) -> anyhow::Result<Hotness> {
    let mut total: Option<Hotness> = None;
    for path in paths {
        let hotness = read(path, options, ctx)?;
        match &mut total {
            None => total = Some(hotness),
            Some(total) => total
                .merge(&hotness)
                .with_context(|| path.display().to_string())?,
        }
    }
    total.context("no input; name a run")
}

/// Counts one input, a trace of another tool with what the user tells about it.
pub fn read(path: &Path, options: &Options, ctx: &Context) -> anyhow::Result<Hotness> {
    Ok(match traces::open(path)? {
        Input::Run(run) => {
            run.remarks()?.iter().for_each(|remark| ctx.remark(remark));
            Hotness::from_run(&run)?
        }
        Input::Tables(path) => Hotness::from_routing_table(&path)?,
        Input::Foreign(trace) => {
            let (hotness, summary) = Hotness::from_foreign(&trace, options)?;
            traces::tell(ctx, path, &summary);
            hotness
        }
    })
}

/// How much was counted: `73 prompt and generated tokens in 6 layers, 4 of 32 experts for a token`.
fn counted(hotness: &Hotness, phase: PhaseChoice) -> String {
    let phases = phase.phases();
    let layers = hotness.layers(phases);
    let experts = count(hotness.n_expert().into(), "expert");
    let tokens = hotness.tokens(phases);
    let place = count(layers.len() as u64, "layer");
    if tokens == 0 {
        let choices = layers.iter().map(|&layer| hotness.choices(layer, phases));
        let choices = choices.fold(0u64, u64::saturating_add);
        return format!("{} in {place} of {experts}", count(choices, "choice"));
    }
    format!(
        "{tokens} {} in {place}, {} of {experts} for a token",
        phase.tokens(tokens),
        hotness.n_expert_used(),
    )
}

fn print_summary(
    out: &mut dyn Write,
    hotness: &Hotness,
    phase: PhaseChoice,
) -> std::io::Result<()> {
    let phases = phase.phases();
    let layers = hotness.summary(phases, N_TOP);
    writeln!(out, "{}\n", counted(hotness, phase))?;
    let columns = [
        "layer",
        "rows",
        "active",
        "hottest experts (share %)",
        "top 10 %",
        "top 25 %",
        "entropy",
        "max/mean",
    ];
    let width = hotness.n_expert().saturating_sub(1).to_string().len();
    let rows = layers.into_iter().map(|layer| {
        let top: Vec<String> = layer
            .top
            .iter()
            .map(|&(expert, share)| format!("{expert:>width$} ({:4.1})", 100.0 * share))
            .collect();
        vec![
            layer.layer.into(),
            Some(layer.rows).filter(|&rows| rows > 0).into(),
            layer.n_active.into(),
            top.join("  ").into(),
            format!("{:5.1} %", 100.0 * layer.share_top_10).into(),
            format!("{:5.1} %", 100.0 * layer.share_top_25).into(),
            format!("{:.3}", layer.entropy).into(),
            format!("{:5.2}", layer.max_over_mean).into(),
        ]
    });
    write_rows(out, Format::Table, &columns, rows)
}

fn print_usage(hotness: &Hotness, phases: Phases, format: Option<Format>) -> anyhow::Result<()> {
    let layers = hotness.layers(phases).into_iter().map(|layer| LayerUsage {
        layer,
        counts: hotness
            .experts(layer, phases)
            .iter()
            .map(|tally| tally.count)
            .collect(),
    });
    let layers: Vec<LayerUsage> = layers.collect();
    let n_tokens = hotness.tokens(phases);
    output::to_stdout(|stdout| match format {
        None => stdout.write_all(expert_usage::report(&layers, n_tokens, true).as_bytes()),
        Some(Format::Json) => stdout.write_all(expert_usage::json(&layers).as_bytes()),
        Some(format) => expert_usage::write(stdout, format, &layers),
    })
}

fn print_matrix(hotness: &Hotness, phases: Phases, format: Format) -> anyhow::Result<()> {
    let ranked = hotness.ranked(phases)?;
    let columns = ["layer_id", "expert_id", "count", "share", "mass"];
    let layer_id = ranked.column("layer_id")?.u32()?;
    let expert_id = ranked.column("expert_id")?.u32()?;
    let counts = ranked.column("count")?.u64()?;
    let share = ranked.column("share")?.f64()?;
    let mass = ranked.column("mass")?.f64()?;
    let rows = (0..ranked.height()).map(|row| -> Vec<Cell> {
        vec![
            layer_id.get(row).into(),
            expert_id.get(row).into(),
            counts.get(row).into(),
            share.get(row).into(),
            mass.get(row).into(),
        ]
    });
    output::to_stdout(|stdout| write_rows(stdout, format, &columns, rows))
}

fn heat_map(hotness: &Hotness, phase: PhaseChoice, paths: &[PathBuf]) -> HeatMap {
    let phases = phase.phases();
    let layers = hotness.layers(phases);
    let n_expert = f64::from(hotness.n_expert());
    let values = layers.iter().map(|&layer| {
        let experts = hotness.experts(layer, phases);
        let total: u64 = experts.iter().map(|tally| tally.count).sum();
        experts
            .iter()
            .map(|tally| tally.count as f64 / total.max(1) as f64 * n_expert)
            .collect()
    });
    let source = match paths {
        [path] => path
            .file_name()
            .unwrap_or(path.as_os_str())
            .to_string_lossy()
            .into_owned(),
        _ => format!("{} inputs", paths.len()),
    };
    HeatMap {
        title: "How often each expert is chosen".into(),
        subtitle: format!("{source}: {}", counted(hotness, phase)),
        values: values.collect(),
        layers,
    }
}
