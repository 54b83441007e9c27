//! Reading what is counted.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use moe_analysis::hotness::{ExpertBytes, Hotness, RowCounter};
use moe_analysis::survey::{self, Labels, Survey};
use moe_foreign::{ForeignError, Input, Options, import};
use moe_gguf::map::OffsetMap;
use moe_gguf::text::counted;
use moe_trace::bounded;

use super::args::{Args, Split};
use crate::cli::Context;
use crate::traces;

/// Everything that was read.
pub struct Counted {
    pub hotness: Hotness,
    /// Empty if nothing that is asked for needs it.
    pub survey: Survey,
    /// Empty if nothing tells them.
    pub bytes: ExpertBytes,
}

/// Reads all inputs, once.
pub fn read_all(args: &Args, ctx: &Context) -> anyhow::Result<Counted> {
    let paths: Vec<&Path> = args.paths.iter().map(PathBuf::as_path).collect();
    args.trace.check(&paths)?;
    let labels = match &args.labels {
        Some(path) => {
            let text = bounded::read_text(path)?;
            Labels::parse(&text).with_context(|| path.display().to_string())?
        }
        None => Labels::of_inputs(args.label.clone()),
    };
    let mut survey = Survey::new(survey::Options {
        phases: args.phases(),
        group_by: args.group_by(),
        folds: args.split == Some(Split::BySequence),
        labels,
    });
    let mut bytes = match args.trace.gguf()? {
        Some((_, gguf)) => ExpertBytes::of_map(&OffsetMap::new(&gguf)),
        None => ExpertBytes::default(),
    };
    let options = args.trace.options()?;
    let mut total: Option<Hotness> = None;
    for path in &args.paths {
        survey.begin_input();
        let wanted = args.needs_survey().then_some(&mut survey);
        let hotness = read_one(path, &options, wanted, &mut bytes, ctx)?;
        match &mut total {
            None => total = Some(hotness),
            Some(total) => total
                .merge(&hotness)
                .with_context(|| path.display().to_string())?,
        }
    }
    survey.finish()?;
    let strangers = survey.unused_labels();
    if let (Some(labels), Some(first), true) =
        (&args.labels, strangers.first(), args.needs_survey())
    {
        ctx.remark(format_args!(
            "warning: {} labels {} that {} has no token of, the first is {first}",
            labels.display(),
            counted(strangers.len(), "sequence"),
            args.source()
        ));
    }
    let hotness = total.context("no input; name a run")?;
    if hotness.n_repeated() > 0 {
        ctx.remark(format_args!(
            "{} an expert twice, which no router does: {} is damaged, or not what it seems",
            match hotness.n_repeated() {
                1 => "1 choice of a token names".into(),
                n => format!("{} of tokens name", counted(n, "choice")),
            },
            args.source()
        ));
    }
    Ok(Counted {
        hotness,
        survey,
        bytes,
    })
}

/// Counts one input, a trace of another tool with what the user tells about it.
pub fn read(path: &Path, options: &Options, ctx: &Context) -> anyhow::Result<Hotness> {
    read_one(path, options, None, &mut ExpertBytes::default(), ctx)
}

fn read_one(
    path: &Path,
    options: &Options,
    survey: Option<&mut Survey>,
    bytes: &mut ExpertBytes,
    ctx: &Context,
) -> anyhow::Result<Hotness> {
    let hotness = match traces::open(path, options)? {
        Input::Run(run) => {
            traces::remark(&run, ctx)?;
            if let Some(map) = run.map.as_ref().filter(|_| bytes.is_empty()) {
                *bytes = ExpertBytes::of_map(map);
            }
            Hotness::from_run(&run, survey)?
        }
        Input::Tables(path) => Hotness::from_routing_table(&path, survey)?,
        Input::Foreign(trace) => {
            let mut counter = RowCounter::new(path, survey);
            let summary = import(trace.importer, &trace.source, options, &mut counter)?;
            let hotness = counter.finish(&summary.facts)?;
            traces::tell(ctx, path, &summary);
            if bytes.is_empty() {
                let layers = summary.facts.expert_bytes.into_iter();
                *bytes = ExpertBytes::of_layers(layers.map(|(layer, n)| (layer.into(), n)));
            }
            hotness
        }
    };
    let model = options.model.as_ref();
    if let Some(contradiction) = model.and_then(|model| hotness.contradiction(model)) {
        bail!(ForeignError::OtherModel {
            path: path.to_owned(),
            contradiction
        });
    }
    Ok(hotness)
}
