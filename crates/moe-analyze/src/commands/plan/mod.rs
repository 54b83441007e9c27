//! `plan`: which experts a hot-expert cache should hold, and what a running one should exchange.

mod budget;
mod command_line;
mod report;
mod update;

use std::path::PathBuf;

use anyhow::bail;
use moe_gguf::text::counted;
use moe_placement::learn::{LearnFile, is_usable};
use moe_placement::plan::{
    Entry, Explanation, LayerCurve, Plan, PlanVerdict, Strategy, Weighting, rank,
};
use moe_trace::{ExpertId, Facts, LayerId};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::experts::Experts;
use crate::files::{self, OutputPath};
use crate::learn_files;
use crate::option_values::{ValueError, number};
use crate::output::Format;
use crate::traces::ImportArgs;

use budget::Budget;

/// Plan which experts a hot-expert cache holds, exactly as the runtime that reads the file
///
/// The rules are those of llama.cpp's hot-cache fork: weighting, packing with an empty expert for each layer, up to three
/// lanes. Without -o a row for each layer is printed, and command lines; with it, a row for each expert in the cache, or one
/// JSON object. With --update it is told instead what the runtime would exchange after a request.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Learn files of one model, the oldest first; runs, traces and tables are counted. With --update, a live report
    #[arg(required = true, value_name = "FILE")]
    paths: Vec<PathBuf>,
    /// The model, by which bytes are counted
    #[arg(long, value_name = "MODEL.gguf", required_unless_present_any = ["sizes", "update"], conflicts_with = "sizes")]
    model: Option<PathBuf>,
    /// Bytes of each expert instead of a model: layer,expert,bytes
    #[arg(long, value_name = "FILE.csv")]
    sizes: Option<PathBuf>,
    #[command(flatten)]
    import: ImportArgs,
    /// MiB of the cache; auto (or -1, as in the runtime) takes what the GPU has left; for several lanes a list
    #[arg(
        long,
        value_name = "N|auto[,…]",
        value_delimiter = ',',
        required_unless_present_any = ["budget_bytes", "update"],
        conflicts_with = "budget_bytes"
    )]
    budget_mib: Vec<Budget>,
    /// Bytes of the cache; for several lanes a list
    #[arg(long, value_name = "N[,…]", value_delimiter = ',')]
    budget_bytes: Vec<u64>,
    #[command(flatten)]
    room: budget::Room,
    /// How hits become scores: flat, pressure, smooth, time, balanced [default: flat; of gpt-oss, time]
    #[arg(long, value_name = "MODE")]
    weighting: Option<Weighting>,
    /// How strongly the times of a layer weigh, 0 to 1 [default: 0.5; of gpt-oss, 1]
    #[arg(long, value_name = "C")]
    layer_curve: Option<f64>,
    /// How several lanes are filled: warm, hot-even, even-split
    #[arg(long, alias = "device-strategy", value_name = "NAME", default_value_t)]
    strategy: Strategy,
    /// Halve the counts of a file with every N files that come after it
    #[arg(long, value_name = "N", value_parser = half_life)]
    half_life: Option<f64>,
    /// Fill the room that is left with experts that were never chosen, in a random order that the seed gives
    #[arg(long, value_name = "SEED", num_args = 0..=1, require_equals = true, default_missing_value = "7171941")]
    fill_random: Option<u64>,
    /// Say why an expert is in the cache or not; may be repeated
    #[arg(long, value_name = "LAYER:EXPERT", value_parser = layer_expert)]
    explain: Vec<(LayerId, ExpertId)>,
    /// Plan an update of a running cache, given what it holds: a plan (-o json), a learn file cut to one, or a live report
    #[arg(long, value_name = "CURRENT.json", conflicts_with_all = ["explain", "fill_random", "out"])]
    update: Option<PathBuf>,
    /// Share of the cached experts that an update may exchange, 0 to 1
    #[arg(long, value_name = "R", default_value_t = 1.0, requires = "update")]
    update_rate: f64,
    /// Print the experts in the cache instead of the summary; json holds all
    #[arg(short, long = "output", value_name = "FORMAT")]
    output: Option<Format>,
    /// Write the learn file, cut to the experts in the cache
    #[arg(long, value_name = "FILE.json")]
    out: Option<OutputPath>,
    /// Replace the file of --out if it exists
    #[arg(long)]
    force: bool,
}

fn half_life(text: &str) -> Result<f64, ValueError> {
    number(text, "a number of files above 0", |&value| value > 0.0)
}

fn layer_expert(text: &str) -> Result<(LayerId, ExpertId), ValueError> {
    let parts = text.split_once(':');
    let parsed =
        parts.and_then(|(layer, expert)| Some((layer.parse().ok()?, expert.parse().ok()?)));
    parsed.ok_or(ValueError::Expected("a layer and an expert as in 3:17"))
}

/// How experts are weighed, and what is told of it.
struct Weighing {
    weighting: Weighting,
    curve: LayerCurve,
}

impl Weighing {
    /// What was asked for, or the runtime's defaults for the model.
    fn new(args: &Args, experts: Option<&Experts>, ctx: &Context) -> Weighing {
        let is_gpt_oss = experts.is_some_and(Experts::is_gpt_oss);
        let weighting = args.weighting.unwrap_or(if is_gpt_oss {
            Weighting::Time
        } else {
            Weighting::default()
        });
        let curve = match args.layer_curve {
            Some(value) => {
                if !LayerCurve::is_valid(value) {
                    ctx.remark(format_args!(
                        "warning: --layer-curve {value} is not from 0 to 1; as in the runtime, 0.5 is taken"
                    ));
                }
                LayerCurve::new(value)
            }
            None if is_gpt_oss => LayerCurve::new(1.0),
            None => LayerCurve::DEFAULT,
        };
        Weighing { weighting, curve }
    }

    fn rank(&self, learn: &LearnFile) -> anyhow::Result<Vec<Entry>> {
        let observations = learn.observations()?;
        if !is_usable(&observations) {
            bail!(
                "the learn file counts no choice of an expert, so there is nothing to plan with; record a longer run"
            );
        }
        Ok(rank(&observations, self.weighting, self.curve))
    }
}

/// Everything that is told of a plan.
struct Planned<'a> {
    args: &'a Args,
    /// The learn file that holds what the plan was made from.
    learn_file: Option<PathBuf>,
    weighing: Weighing,
    experts: Experts,
    ranking: Vec<Entry>,
    plan: Plan,
    explanations: Vec<Explanation>,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    if let Some(out) = &args.out {
        files::require_extension(out, "json")?;
        files::check_output(out, args.force)?;
    }
    learn_files::check_import_args(&args.import, &args.paths)?;
    let experts = Experts::read(args.model.as_deref(), args.sizes.as_deref(), ctx)?;
    let weighing = Weighing::new(&args, experts.as_ref(), ctx);
    let model = experts.as_ref().and_then(|experts| experts.facts.clone());
    let options = args.import.options(model)?;
    let learn = learn_files::read_learn_files(&args.paths, args.half_life, &options, ctx)?;
    let mut ranking = weighing.rank(&learn)?;
    leave_out_mtp_head(&mut ranking, options.model.as_ref(), ctx);
    if let Some(current) = &args.update {
        update::run(&args, current, &learn, &ranking, ctx)?;
        return Ok(ExitStatus::Done);
    }
    let Some(experts) = experts else {
        bail!("neither a model nor sizes; pass --model or --sizes");
    };

    let budgets = budget::lanes(&args.budget_mib, &args.budget_bytes, &args.room, ctx)?;
    let plan = Plan::new(
        &ranking,
        &experts.sizes,
        &budgets,
        args.strategy,
        args.fill_random,
    )?;
    remark_on(&plan, ctx);
    if let Some(out) = &args.out {
        write_cut(&plan, &learn, out, args.force, ctx)?;
    }
    let explain =
        |&(layer, expert)| Explanation::new(&plan, &ranking, &experts.sizes, layer, expert);
    let planned = Planned {
        explanations: args.explain.iter().map(explain).collect(),
        learn_file: command_line::learn_file(&args)?,
        args: &args,
        weighing,
        experts,
        ranking,
        plan,
    };
    report::print(&planned)?;
    Ok(ExitStatus::Done)
}

/// Leaves out experts of an MTP head, which the runtime does not cache.
fn leave_out_mtp_head(ranking: &mut Vec<Entry>, model: Option<&Facts>, ctx: &Context) {
    let Some(mtp_head) = model.and_then(Facts::mtp_head) else {
        return;
    };
    let n = ranking.len();
    ranking.retain(|entry| !mtp_head.contains(&entry.layer.0.into()));
    let left_out = (n - ranking.len()) as u64;
    if left_out > 0 {
        ctx.remark(format_args!(
            "left out: {} of the MTP head, which the runtime does not cache",
            counted(left_out, "expert")
        ));
    }
}

/// What a person should know of a plan that is not as it may seem.
fn remark_on(plan: &Plan, ctx: &Context) {
    let n = |wanted: PlanVerdict| {
        plan.decisions
            .iter()
            .filter(|d| d.verdict == wanted)
            .count() as u64
    };
    let unknown = n(PlanVerdict::UnknownSize);
    if unknown > 0 {
        ctx.remark(format_args!(
            "warning: {} not in the model; is it another model's?",
            if unknown == 1 {
                "1 expert of the learn file is".into()
            } else {
                format!("{unknown} experts of the learn file are")
            }
        ));
    }
    if n(PlanVerdict::Repeated) > 0 {
        ctx.remark("warning: the learn file has a layer twice; of experts that are in both, the better score counts");
    }
    if plan.is_empty() {
        ctx.remark("warning: no expert fits the budget, and each layer needs room for an empty one too; the runtime would switch the cache off");
    }
}

/// Writes the learn file with only the experts in the cache.
fn write_cut(
    plan: &Plan,
    learn: &LearnFile,
    out: &std::path::Path,
    force: bool,
    ctx: &Context,
) -> anyhow::Result<()> {
    use std::io::Write as _;

    let chosen: std::collections::BTreeSet<(LayerId, ExpertId)> = plan
        .selected()
        .map(|(_, selected)| (selected.entry.layer, selected.entry.expert))
        .collect();
    let cut = learn.filter(|layer, expert| chosen.contains(&(layer, expert)));
    files::write_whole(out, force, |file| {
        Ok(file.write_all(cut.to_json().as_bytes())?)
    })?;
    ctx.remark(format_args!("wrote {}", out.display()));
    let filled = plan
        .selected()
        .filter(|(_, selected)| selected.entry.hits == 0)
        .count() as u64;
    if filled > 0 {
        ctx.remark(format_args!(
            "{} that fill room have no counts, so the file does not name them",
            counted(filled, "expert")
        ));
    }
    Ok(())
}
