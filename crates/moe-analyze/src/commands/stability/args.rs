//! The command line of `stability`.

use anyhow::bail;

use crate::counting::inputs::InputArgs;
use crate::files::OutputPath;
use crate::option_values::{ValueError, number, whole};
use crate::output::Format;

/// Report whether the hottest experts of one part of a trace are the hottest of another
///
/// Without -o and --table a verdict is printed, and how much of the held-out split the hottest experts of the training split cover.
/// With -o alone the rows of --table split.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub inputs: InputArgs,
    /// Rows to print instead of the summary
    #[arg(long, value_enum)]
    pub table: Option<TableChoice>,
    /// Format on stdout
    #[arg(short, long = "output", value_name = "FORMAT")]
    pub output: Option<Format>,
    /// Training split: a fraction of the tokens, from the first on, or all sequences or labels but one [default: 0.5]
    #[arg(long, value_name = "0.5|by-sequence|by-label", value_parser = parse_split)]
    split: Option<SplitChoice>,
    /// Resamples of --table bootstrap
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = whole(1..=100_000u32))]
    pub resamples: u32,
    /// Random seed of the resamples
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Plot the coverage of the hottest experts, in-sample and held out; the extension selects the format: png, svg
    #[arg(long, value_name = "FILE.png|svg")]
    pub plot: Option<OutputPath>,
    /// Replace the file of --plot if it exists
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TableChoice {
    /// Coverage of the hottest experts, in-sample and held out
    Split,
    /// Change of hotness from one eighth of the tokens to the next
    Drift,
    /// Tokens after which the set of hot experts stops changing
    Convergence,
    /// Measures with 95 % intervals
    Bootstrap,
    /// Experts and the labelled domains that select them
    Domains,
}

/// What is trained on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SplitChoice {
    /// The first part of the tokens.
    Time(f64),
    /// All sequences but one.
    BySequence,
    /// All labels but one.
    ByLabel,
}

fn parse_split(text: &str) -> Result<SplitChoice, ValueError> {
    match text {
        "by-sequence" => Ok(SplitChoice::BySequence),
        "by-label" => Ok(SplitChoice::ByLabel),
        _ => {
            let expected = "a fraction between 0 and 1, by-sequence or by-label";
            let is_valid = |&fraction: &f64| fraction > 0.0 && fraction < 1.0;
            number(text, expected, is_valid).map(SplitChoice::Time)
        }
    }
}

impl Args {
    /// The rows that are printed, in the summary too.
    pub fn table(&self) -> TableChoice {
        self.table.unwrap_or(TableChoice::Split)
    }

    pub fn split(&self) -> SplitChoice {
        self.split.unwrap_or(SplitChoice::Time(0.5))
    }

    /// The option that needs the order of the tokens, not only counts.
    pub fn needs_order(&self) -> Option<&'static str> {
        match (self.table(), self.split()) {
            (TableChoice::Split, SplitChoice::Time(_)) => Some("a split by time"),
            (TableChoice::Split, SplitChoice::BySequence) => Some("--split by-sequence"),
            (TableChoice::Drift, _) => Some("--table drift"),
            (TableChoice::Convergence, _) => Some("--table convergence"),
            (TableChoice::Bootstrap, _) => Some("--table bootstrap"),
            (TableChoice::Split, SplitChoice::ByLabel) | (TableChoice::Domains, _) => None,
        }
    }

    /// Refuses what does not go together, before anything is read.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.split.is_some() && self.table() != TableChoice::Split {
            bail!("--split goes with --table split");
        }
        let uses_labels =
            self.split() == SplitChoice::ByLabel || self.table() == TableChoice::Domains;
        self.inputs
            .check_labels(uses_labels, "--split by-label and --table domains")
    }
}
