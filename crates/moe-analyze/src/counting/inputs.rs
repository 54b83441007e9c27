//! The inputs that `hotness` and `stability` count: options, and reading.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use moe_analysis::Phases;
use moe_analysis::hotness::{ExpertBytes, Hotness};
use moe_analysis::survey::{self, Labels, Survey};
use moe_files::text::counted;
use moe_gguf::map::OffsetMap;
use moe_trace::bounded;

use super::read_with;
use crate::context::Context;
use crate::phase_choice::PhaseChoice;
use crate::traces::TraceArgs;

/// Options of the inputs to count.
#[derive(Debug, clap::Args)]
pub struct InputArgs {
    /// Run directories, trace.bin files, directories of tables, or traces of other tools, all of one model
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// Phase of the tokens to count
    #[arg(long, value_enum, default_value_t = PhaseChoice::All)]
    pub phase: PhaseChoice,
    /// Domain label of an input, such as code or chat, by which counts are split; one --label for each PATH, in the same order
    #[arg(long, value_name = "NAME", conflicts_with = "labels")]
    pub label: Vec<String>,
    /// Domain labels of the sequences of a single input, as CSV lines `sequence,label`
    #[arg(long, value_name = "FILE.csv")]
    pub labels: Option<PathBuf>,
    #[command(flatten)]
    pub trace: TraceArgs,
}

impl InputArgs {
    pub fn phases(&self) -> Phases {
        self.phase.phases()
    }

    /// Returns the name of the inputs for messages and plots.
    pub fn source(&self) -> String {
        match &self.paths[..] {
            [path] => path
                .file_name()
                .unwrap_or(path.as_os_str())
                .to_string_lossy()
                .into_owned(),
            paths => format!("{} inputs", paths.len()),
        }
    }

    /// Rejects labels that do not match the inputs. Labels must be given if and only if the options in `used_by` use them.
    pub fn check_labels(&self, are_used: bool, used_by: &str) -> anyhow::Result<()> {
        if !self.label.is_empty() && self.label.len() != self.paths.len() {
            bail!(
                "{} for {}; pass one --label for each input, in the same order, or --labels FILE.csv for the sequences of one input",
                counted(self.label.len(), "--label option"),
                counted(self.paths.len(), "input")
            );
        }
        if self.labels.is_some() && self.paths.len() != 1 {
            bail!(
                "--labels labels the sequences of one input; for several inputs, pass one --label for each"
            );
        }
        match (are_used, self.label.is_empty() && self.labels.is_none()) {
            (true, true) => {
                bail!(
                    "{used_by} needs domain labels; add --label NAME for each input, or --labels FILE.csv"
                )
            }
            (false, false) => {
                bail!(
                    "--label and --labels have no effect without {used_by}; add it, or omit the labels"
                )
            }
            _ => Ok(()),
        }
    }

    /// Returns the options of a survey of the tokens of this phase with these labels.
    ///
    /// # Errors
    /// The file of `--labels` cannot be read.
    pub fn survey(&self) -> anyhow::Result<survey::SurveyOptions> {
        let labels = match &self.labels {
            Some(path) => {
                let text = bounded::read_text(path)?;
                Labels::parse(&text).with_context(|| path.display().to_string())?
            }
            None => Labels::from_inputs(self.label.clone()),
        };
        Ok(survey::SurveyOptions {
            phases: self.phases(),
            labels,
            ..survey::SurveyOptions::default()
        })
    }

    /// Reads all inputs once. Without `survey`, only sums are counted.
    ///
    /// # Errors
    /// An input cannot be read or is of another model, or no token of the phase is routed.
    pub fn read(
        &self,
        survey: Option<survey::SurveyOptions>,
        ctx: &Context,
    ) -> anyhow::Result<Counted> {
        let paths: Vec<&Path> = self.paths.iter().map(PathBuf::as_path).collect();
        self.trace.check(&paths)?;
        let is_surveyed = survey.is_some();
        let mut survey = Survey::new(survey.unwrap_or_default());
        let mut bytes = match self.trace.gguf()? {
            Some((_, gguf)) => ExpertBytes::from_map(&OffsetMap::new(&gguf)),
            None => ExpertBytes::default(),
        };
        let options = self.trace.options()?;
        let mut total: Option<Hotness> = None;
        for path in &self.paths {
            survey.begin_input();
            let survey = is_surveyed.then_some(&mut survey);
            let hotness = read_with(path, &options, survey, &mut bytes, ctx)?;
            match &mut total {
                None => total = Some(hotness),
                Some(total) => total
                    .merge(&hotness)
                    .with_context(|| path.display().to_string())?,
            }
        }
        survey.finish()?;
        let counted = Counted {
            hotness: total.context("no input; pass a run")?,
            survey,
            bytes,
        };
        self.warn(&counted, ctx);
        counted
            .hotness
            .check_routed(self.phases())
            .with_context(|| format!("{} tokens", self.phase.describe()))?;
        Ok(counted)
    }

    /// Prints warnings about the inputs.
    fn warn(&self, read: &Counted, ctx: &Context) {
        let unused = read.survey.unused_labels();
        if let (Some(labels), Some(first)) = (&self.labels, unused.first()) {
            ctx.note(format_args!(
                "warning: {} labels {} that {} does not contain; the first is sequence {first}",
                labels.display(),
                counted(unused.len(), "sequence"),
                self.source()
            ));
        }
        let hotness = &read.hotness;
        if hotness.n_repeated() > 0 {
            ctx.note(format_args!(
                "warning: {}: {} with the same expert twice, which no router produces; the input is damaged or misread",
                self.source(),
                counted(hotness.n_repeated(), "routing decision"),
            ));
        }
        if hotness.n_backward() > 0 {
            ctx.note(format_args!(
                "warning: {}: rows are not in the order of time ({} of a layer before the preceding pass), so tokens may be counted more than once; sort the rows by timestamp_ns, sequence_id, token_id and slot",
                self.source(),
                counted(hotness.n_backward(), "pass"),
            ));
        }
        if let (2.., unknown @ 1..) = hotness.n_runs() {
            ctx.note(format_args!(
                "warning: the model of {} is unknown; inputs were compared only by the numbers of experts that they contain",
                counted(unknown, "input")
            ));
        }
    }
}

/// Counts of the inputs.
pub struct Counted {
    pub hotness: Hotness,
    /// Empty if only sums were counted.
    pub survey: Survey,
    /// Expert sizes; empty if no input contains them.
    pub bytes: ExpertBytes,
}
