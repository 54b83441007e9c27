//! Reading what is counted.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use moe_analysis::hotness::{ExpertBytes, Hotness};
use moe_analysis::survey::{self, Labels, Survey};
use moe_gguf::map::OffsetMap;
use moe_gguf::text::counted;
use moe_trace::bounded;

use super::args::{Args, Split};
use crate::context::Context;
use crate::counting;

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
    let mut survey = Survey::new(survey::SurveyOptions {
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
        let hotness = counting::read_with(path, &options, wanted, &mut bytes, ctx)?;
        match &mut total {
            None => total = Some(hotness),
            Some(total) => total
                .merge(&hotness)
                .with_context(|| path.display().to_string())?,
        }
    }
    survey.finish()?;
    let unused = survey.unused_labels();
    if let (Some(labels), Some(first), true) = (&args.labels, unused.first(), args.needs_survey()) {
        ctx.remark(format_args!(
            "warning: {} labels {} that {} has no token of, the first is {first}",
            labels.display(),
            counted(unused.len(), "sequence"),
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
