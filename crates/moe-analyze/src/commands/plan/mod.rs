//! `plan`: the contents of a hot expert cache, and updates of a running cache.

mod auto_budget;
mod command_line;
mod memory;
mod memory_report;
mod report;
mod update;

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use moe_files::text::counted;
use moe_placement::learn::{LearnFile, is_usable};
use moe_placement::plan::{Entry, Explanation, LayerCurve, Plan, Strategy, Weighting, rank};
use moe_trace::{ExpertId, LayerId, ModelInfo};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::experts::Experts;
use crate::files::{self, OutputPath};
use crate::lane_budget::LaneBudget;
use crate::learn_files;
use crate::model_memory::Memory;
use crate::option_values::{ValueError, number};
use crate::output::Format;
use crate::plan_warnings::plan_warnings;
use crate::traces::ImportArgs;

/// Plan which experts a hot expert cache contains
///
/// The hot expert cache is a fork of llama.cpp (github.com/adrianhoehne/llama.cpp) that keeps the hottest experts of a learn file in GPU
/// memory. Plans the same cache as the fork: with the same scores, and with an empty expert (filled with zeros) per layer, on up to three
/// lanes (GPUs). Prints one row per layer, the memory of the model and its context, and the commands that use the plan; with -o, one row
/// per cached expert. With -o json, prints one JSON object. With --update, prints the experts that the fork exchanges after a request.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  moe-analyze plan learn.json --model model.gguf --budget-mib 4096"
)]
pub struct Args {
    /// Learn files of one model, the oldest first. Runs, traces and tables are converted to learn files. With --update, the counts
    /// of the latest request: the perf.json of a run, or the response of the fork's server to /moe-layer-perf (a live report)
    #[arg(required = true, value_name = "FILE")]
    paths: Vec<PathBuf>,
    /// Model, a GGUF file: provides the size of each expert; --model or --sizes is required without --update
    #[arg(long, value_name = "MODEL.gguf", conflicts_with = "sizes")]
    model: Option<PathBuf>,
    /// CSV file with the size of each expert, and the header layer,expert,bytes; replaces --model
    #[arg(long, value_name = "FILE.csv")]
    sizes: Option<PathBuf>,
    #[command(flatten)]
    import: ImportArgs,
    /// Cache size in MiB, one value per lane, each 0 or more; auto (or -1, as in the fork) uses the free memory of the GPU, minus the
    /// memory of the model, its context and a reserve. --budget-mib or --budget-bytes is required without --update
    #[arg(
        long,
        value_name = "N|auto[,…]",
        value_delimiter = ',',
        conflicts_with = "budget_bytes",
        help_heading = "Budget"
    )]
    budget_mib: Vec<LaneBudget>,
    /// Cache size in bytes, one value per lane, each 0 or more
    #[arg(
        long,
        value_name = "N[,…]",
        value_delimiter = ',',
        help_heading = "Budget"
    )]
    budget_bytes: Vec<u64>,
    #[command(flatten)]
    auto_budget: auto_budget::AutoBudgetArgs,
    #[command(flatten)]
    memory: memory::MemoryArgs,
    /// Function that computes scores from activations: flat and balanced (rank in the layer), pressure, smooth and
    /// time (activations × weight of the layer) [default: flat; for gpt-oss, time]
    #[arg(long, value_name = "MODE", help_heading = "Ranking")]
    weighting: Option<Weighting>,
    /// Strength of the layer weights with --weighting pressure, smooth or time, 0 to 1; 0 weights all layers equally; a value
    /// outside 0 to 1 is replaced by 0.5, as in the fork [default: 0.5; for gpt-oss, 1]
    #[arg(long, value_name = "C", help_heading = "Ranking")]
    layer_curve: Option<f64>,
    /// Distribution over several lanes: warm (first lane with free memory), hot-even (lane with the fewest experts of the layer),
    /// even-split (contiguous layers per lane)
    #[arg(
        long,
        alias = "device-strategy",
        value_name = "NAME",
        default_value_t,
        help_heading = "Ranking"
    )]
    strategy: Strategy,
    /// Halve the weight of a file's counts for every N newer files; N is above 0 [default: no decay]
    #[arg(long, value_name = "N", value_parser = half_life, help_heading = "Ranking")]
    half_life: Option<f64>,
    /// Fill the rest of the cache with experts that were never selected, in random order; SEED is the random seed [default: do not fill;
    /// seed 7171941]
    #[arg(long, value_name = "SEED", num_args = 0..=1, require_equals = true, default_missing_value = "7171941", help_heading = "Ranking")]
    fill_random: Option<u64>,
    /// Explain why an expert is in the cache or not; can be repeated
    #[arg(long, value_name = "LAYER:EXPERT", value_parser = layer_expert)]
    explain: Vec<(LayerId, ExpertId)>,
    /// Plan an update of a running cache instead of a new cache. The file contains the experts in the cache: a plan (-o json), the learn
    /// file of --out, or a live report
    #[arg(long, value_name = "CURRENT.json", conflicts_with_all = ["explain", "fill_random", "out"], help_heading = "Update")]
    update: Option<PathBuf>,
    /// Maximum fraction of the cached experts that an update exchanges, 0 to 1; other values are clamped, as in the fork
    #[arg(
        long,
        value_name = "R",
        default_value_t = 1.0,
        value_parser = update_rate,
        requires = "update",
        help_heading = "Update"
    )]
    update_rate: f64,
    /// Print the experts in the cache in this format, instead of the summary; json contains the entire plan
    #[arg(short, long = "output", value_name = "FORMAT")]
    output: Option<Format>,
    /// Write a learn file with only the experts in the cache
    #[arg(long, value_name = "FILE.json")]
    out: Option<OutputPath>,
    /// Replace the file of --out if it exists
    #[arg(long)]
    force: bool,
}

fn half_life(text: &str) -> Result<f64, ValueError> {
    number(text, "a number of files above 0", |&value| value > 0.0)
}

fn update_rate(text: &str) -> Result<f64, ValueError> {
    number(text, "a number", |rate: &f64| !rate.is_nan())
}

fn layer_expert(text: &str) -> Result<(LayerId, ExpertId), ValueError> {
    let parts = text.split_once(':');
    let parsed =
        parts.and_then(|(layer, expert)| Some((layer.parse().ok()?, expert.parse().ok()?)));
    parsed.ok_or(ValueError::Expected("LAYER:EXPERT, such as 3:17"))
}

/// The function that computes scores of experts.
struct Weighing {
    weighting: Weighting,
    curve: LayerCurve,
}

impl Weighing {
    /// Returns the weighting of the options, or the fork's default for the model.
    fn new(args: &Args, experts: Option<&Experts>, ctx: &Context) -> Weighing {
        let arch = experts.and_then(Experts::arch);
        let weighting = args.weighting.unwrap_or(Weighting::default_for(arch));
        let curve = match args.layer_curve {
            Some(value) => {
                if !LayerCurve::is_valid(value) {
                    ctx.note(format_args!(
                        "warning: --layer-curve {value} is out of range (0..=1); 0.5 is used instead, as in the fork"
                    ));
                }
                LayerCurve::new(value)
            }
            None => LayerCurve::default_for(arch),
        };
        Weighing { weighting, curve }
    }

    fn rank(&self, learn: &LearnFile) -> anyhow::Result<Vec<Entry>> {
        let observations = learn.observations()?;
        if !is_usable(&observations) {
            bail!("the learn file contains no activations; record a longer run");
        }
        Ok(rank(&observations, self.weighting, self.curve))
    }
}

/// A plan with its inputs.
struct Planned<'a> {
    args: &'a Args,
    /// The learn file that contains the counts of the plan.
    learn_file: Option<PathBuf>,
    weighing: Weighing,
    experts: Experts,
    ranking: Vec<Entry>,
    plan: Plan,
    /// Memory of the model and its context, if the model is known.
    memory: Option<Memory>,
    explanations: Vec<Explanation>,
}

impl Planned<'_> {
    /// The influence of the layer on scores if no option sets it.
    fn default_curve(&self) -> LayerCurve {
        LayerCurve::default_for(self.experts.arch())
    }
}

/// Rejects a new plan without sizes of experts or without a budget.
fn check_required(args: &Args) -> anyhow::Result<()> {
    if args.update.is_some() {
        return Ok(());
    }
    let has_sizes = args.model.is_some() || args.sizes.is_some();
    let has_budget = !args.budget_mib.is_empty() || !args.budget_bytes.is_empty();
    let missing: Vec<&str> = [
        (!has_sizes).then_some("--model or --sizes"),
        (!has_budget).then_some("--budget-mib or --budget-bytes"),
    ]
    .into_iter()
    .flatten()
    .collect();
    if !missing.is_empty() {
        bail!(
            "the following required arguments were not provided: {}; see --help",
            missing.join(", ")
        );
    }
    Ok(())
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    check_required(&args)?;
    if let Some(out) = &args.out {
        files::require_extension(out, "json")?;
        files::check_output(out, args.force)?;
    }
    learn_files::check_import_args(&args.import, &args.paths)?;
    let experts = Experts::read(args.model.as_deref(), args.sizes.as_deref(), ctx)?;
    let weighing = Weighing::new(&args, experts.as_ref(), ctx);
    let model = experts
        .as_ref()
        .and_then(|experts| experts.model_info.clone());
    let options = args.import.options(model)?;
    let learn = learn_files::read_learn_files(&args.paths, args.half_life, &options, ctx)?;
    let ranking = weighing.rank(&learn);
    let mut ranking = ranking.with_context(|| learn_files::names(&args.paths))?;
    remove_mtp_head(&mut ranking, options.model.as_ref(), ctx);
    if let Some(current) = &args.update {
        update::run(&args, current, &learn, &ranking, ctx)?;
        return Ok(ExitStatus::Done);
    }
    let Some(experts) = experts else {
        bail!("expert sizes are missing; pass --model or --sizes");
    };

    let (mib, bytes) = (&args.budget_mib, &args.budget_bytes);
    let free = auto_budget::free_mib(mib, bytes, &args.auto_budget)?;
    let split = auto_budget::layer_split(&free);
    let memory = args.model.as_ref();
    let memory = memory.map(|path| args.memory.memory(path, &split));
    let memory = memory.transpose()?;
    let budgets = auto_budget::lanes(mib, bytes, &free, &args.auto_budget, memory.as_ref(), ctx)?;
    let plan = Plan::new(
        &ranking,
        &experts.sizes,
        &budgets,
        args.strategy,
        args.fill_random,
    )?;
    for warning in plan_warnings(&plan, args.sizes.as_deref()) {
        ctx.note(warning);
    }
    warn_of_experts_without_gate(&plan, &experts, ctx);
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
        memory,
    };
    report::print(&planned)?;
    Ok(ExitStatus::Done)
}

/// Removes experts of an MTP head, which the fork does not cache.
fn remove_mtp_head(ranking: &mut Vec<Entry>, model: Option<&ModelInfo>, ctx: &Context) {
    let Some(mtp_head) = model.and_then(ModelInfo::mtp_head) else {
        return;
    };
    let n = ranking.len();
    ranking.retain(|entry| !mtp_head.contains(&entry.layer.0.into()));
    let left_out = (n - ranking.len()) as u64;
    if left_out > 0 {
        ctx.note(format_args!(
            "omitted {} of the MTP head, which the fork does not cache",
            counted(left_out, "expert")
        ));
    }
}

/// Warns if the plan contains experts that the executor does not cache.
fn warn_of_experts_without_gate(plan: &Plan, experts: &Experts, ctx: &Context) {
    let layers = plan.selected().map(|(_, selected)| selected.entry.layer);
    let without_gate: BTreeSet<LayerId> = layers
        .filter(|layer| experts.without_gate.contains(layer))
        .collect();
    if !without_gate.is_empty() {
        ctx.note(format_args!(
            "warning: the plan contains {} whose experts have no gate projection; `record --policy hot-cache` cannot cache them",
            counted(without_gate.len() as u64, "layer")
        ));
    }
}

/// Writes a learn file with only the experts in the cache.
fn write_cut(
    plan: &Plan,
    learn: &LearnFile,
    out: &std::path::Path,
    force: bool,
    ctx: &Context,
) -> anyhow::Result<()> {
    use std::io::Write as _;

    let cached: BTreeSet<(LayerId, ExpertId)> = plan
        .selected()
        .map(|(_, selected)| (selected.entry.layer, selected.entry.expert))
        .collect();
    let cut = learn.filter(|layer, expert| cached.contains(&(layer, expert)));
    files::write(out, force, |file| {
        Ok(file.write_all(cut.to_json().as_bytes())?)
    })?;
    ctx.note(format_args!("wrote {}", out.display()));
    let filled = plan
        .selected()
        .filter(|(_, selected)| selected.entry.hits == 0)
        .count() as u64;
    if filled > 0 {
        ctx.note(format_args!(
            "the learn file does not contain {} that only fill free space, because they have no counts",
            counted(filled, "expert")
        ));
    }
    Ok(())
}
