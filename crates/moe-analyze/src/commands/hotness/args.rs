//! The command line of `hotness`.

use std::path::PathBuf;

use anyhow::bail;
use moe_analysis::hotness::{Phases, Value};
use moe_analysis::survey::GroupBy;

use crate::files::OutputPath;
use crate::option_values::{ValueError, at_least, number, whole};
use crate::output::Format;
use crate::phase_choice::PhaseChoice;
use crate::traces::TraceArgs;

/// Count how often each expert of each layer was chosen, and tell whether that will hold
///
/// Without -o and --table a summary of each layer is printed, whose first line says how far to trust it. With -o alone a row for
/// each layer and expert, the hottest of a layer first; with -o and --split the rows of --table split.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("of_values").args(["matrix", "plot"]).multiple(true))]
pub struct Args {
    /// Runs, traces, directories of tables, or traces of other tools, all of one model
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// Tokens to count
    #[arg(long, value_enum, default_value_t = PhaseChoice::All)]
    pub phase: PhaseChoice,
    /// Rows to print instead of the summary
    #[arg(long, value_enum)]
    pub table: Option<TableChoice>,
    /// Format on stdout; alone, of the whole matrix
    #[arg(short, long = "output", value_name = "FORMAT")]
    pub output: Option<Format>,
    /// Learn on one part of the trace and test on another: the first 0.5 of the tokens, or all sequences or labels but one
    #[arg(long, value_name = "0.5|by-sequence|by-label", value_parser = parse_split)]
    pub split: Option<Split>,
    /// Domain of an input; once for each PATH, in their order
    #[arg(long, value_name = "NAME", conflicts_with = "labels")]
    pub label: Vec<String>,
    /// Domains of the sequences of one input: lines `sequence,label`
    #[arg(long, value_name = "FILE.csv")]
    pub labels: Option<PathBuf>,
    /// Split the matrix
    #[arg(long, value_enum)]
    pub by: Option<ByChoice>,
    /// Tokens in a window of --by window
    #[arg(long, value_name = "N", value_parser = at_least(1u64))]
    pub window: Option<u64>,
    /// Write the matrix; the extension chooses: csv, json, jsonl, md, parquet, npy
    #[arg(long, value_name = "FILE")]
    pub matrix: Option<OutputPath>,
    /// What an array (.npy) and a heat map hold; bytes need the run's map of its model, or --model
    #[arg(long, value_enum, default_value_t = ValueChoice::Count, requires = "of_values")]
    pub value: ValueChoice,
    /// Write a learn file for the hot-cache runtime
    #[arg(long, value_name = "FILE.json")]
    pub out: Option<OutputPath>,
    /// Draw a picture; the extension chooses: png, svg
    #[arg(long, value_name = "FILE.png|svg")]
    pub plot: Option<OutputPath>,
    /// What --plot draws
    #[arg(long, value_enum, default_value_t = PictureChoice::HeatMap, requires = "plot")]
    pub picture: PictureChoice,
    /// In the heat map, put each layer's hottest experts first
    #[arg(long, requires = "plot")]
    pub sorted: bool,
    /// Resamples of --table bootstrap
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = whole(1..=100_000u32))]
    pub resamples: u32,
    /// Seed of the resamples
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Print how often each expert was used, over all layers and in each, in percent, as the expert usage tracer does;
    /// with -o json the tracer's JSON
    #[arg(long, conflicts_with = "table")]
    pub usage: bool,
    /// Replace the files of --out, --matrix and --plot if they exist
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub trace: TraceArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TableChoice {
    /// A row a layer and expert
    Matrix,
    /// A row a layer: every measure of its spread and its order; the last row is of the whole model
    Measures,
    /// A row a measure: the whole model, mean, least and most of the layers
    Overall,
    /// What sets of the hottest experts cover of tokens that they were not learned on
    Split,
    /// How far hotness moves from one eighth of the tokens to the next
    Drift,
    /// Tokens after which the hot set stops changing
    Settling,
    /// Distinct experts of batches of tokens, beside what chance would need
    Batches,
    /// How experts of a layer belong to the labelled domains
    Domains,
    /// Figures with 95 % intervals
    Bootstrap,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ByChoice {
    Phase,
    Sequence,
    /// Of --window tokens
    Window,
    Label,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ValueChoice {
    /// Times chosen
    Count,
    /// Sum of the router weights
    Mass,
    /// Bytes of the expert × times chosen
    Bytes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PictureChoice {
    /// Layers × experts
    HeatMap,
    /// Share of the choices that the hottest experts cover, also of tokens that they were not learned on
    Coverage,
    /// How evenly each layer chooses
    Entropy,
}

/// Where to cut a trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Split {
    Time(f64),
    BySequence,
    ByLabel,
}

fn parse_split(text: &str) -> Result<Split, ValueError> {
    match text {
        "by-sequence" => Ok(Split::BySequence),
        "by-label" => Ok(Split::ByLabel),
        _ => {
            let expected = "a fraction between 0 and 1, by-sequence or by-label";
            let is_valid = |&fraction: &f64| fraction > 0.0 && fraction < 1.0;
            number(text, expected, is_valid).map(Split::Time)
        }
    }
}

impl Args {
    pub fn phases(&self) -> Phases {
        self.phase.phases()
    }

    pub fn value(&self) -> Value {
        match self.value {
            ValueChoice::Count => Value::Count,
            ValueChoice::Mass => Value::Mass,
            ValueChoice::Bytes => Value::Bytes,
        }
    }

    pub fn group_by(&self) -> Option<GroupBy> {
        Some(match self.by? {
            ByChoice::Phase => GroupBy::Phase,
            ByChoice::Sequence => GroupBy::Sequence,
            ByChoice::Window => GroupBy::Window(self.window.unwrap_or(1)),
            ByChoice::Label => GroupBy::Label,
        })
    }

    /// The rows to print instead of the summary: of the table that is named, else of what -o is for.
    pub fn rows(&self) -> Option<TableChoice> {
        let of_output = || {
            Some(match (self.by, self.split) {
                (None, Some(_)) => TableChoice::Split,
                _ => TableChoice::Matrix,
            })
        };
        self.table.or_else(|| self.output.and_then(|_| of_output()))
    }

    /// Whether something that is asked for needs more than sums: the order of the tokens, their sequences or labels.
    pub fn needs_survey(&self) -> bool {
        let prints_sums = self.usage || self.rows() == Some(TableChoice::Matrix);
        let draws_sums = self.plot.is_none() || self.picture != PictureChoice::Coverage;
        !prints_sums || !draws_sums || self.by.is_some() || self.split.is_some()
    }

    /// What was read, for messages and pictures.
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

    /// Refuses what cannot go together, before anything is read.
    pub fn check(&self) -> anyhow::Result<()> {
        if !self.label.is_empty() && self.label.len() != self.paths.len() {
            bail!(
                "{} --label for {} inputs; give one for each, in their order, or --labels FILE.csv for the sequences of one",
                self.label.len(),
                self.paths.len()
            );
        }
        if self.labels.is_some() && self.paths.len() != 1 {
            bail!("--labels names sequences of one input; for several give --label for each");
        }
        let has_labels = !self.label.is_empty() || self.labels.is_some();
        let needs_labels = self.by == Some(ByChoice::Label)
            || self.split == Some(Split::ByLabel)
            || self.table == Some(TableChoice::Domains);
        if needs_labels && !has_labels {
            bail!("no domain is told; give --label NAME for each input, or --labels FILE.csv");
        }
        match (self.by, self.window) {
            (Some(ByChoice::Window), None) => {
                bail!("--by window needs the tokens in a window; give --window N")
            }
            (by, Some(_)) if by != Some(ByChoice::Window) => {
                bail!("--window goes with --by window")
            }
            _ => {}
        }
        let prints_matrix = !self.usage && self.rows() == Some(TableChoice::Matrix);
        if self.by.is_some() && self.matrix.is_none() && !prints_matrix {
            bail!("--by splits the matrix; give --matrix FILE or -o FORMAT, or leave it out");
        }
        let prints_split = !self.usage && matches!(self.rows(), None | Some(TableChoice::Split));
        if self.split.is_some() && !prints_split {
            bail!(
                "--split is for the summary and --table split; leave out what is printed instead of them"
            );
        }
        Ok(())
    }
}
