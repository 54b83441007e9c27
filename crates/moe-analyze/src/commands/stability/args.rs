//! The command line of `stability`.

use anyhow::bail;

use crate::counting::inputs::InputArgs;
use crate::files::OutputPath;
use crate::option_values::{ValueError, integer_in, number};
use crate::output::Format;

/// Check whether the hottest experts of one part of a trace are the hottest experts of another part
///
/// Counts the experts of a training split and measures how much of a held-out split the hottest experts cover. Prints a verdict and the
/// coverage by size of the hot set. -o alone prints the rows of --table split.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  moe-analyze stability runs/first\n  \
        moe-analyze stability runs/code runs/chat --label code --label chat --split by-label")]
pub struct Args {
    #[command(flatten)]
    pub inputs: InputArgs,
    /// Table to print instead of the summary
    #[arg(long, value_enum)]
    pub table: Option<TableChoice>,
    /// Format of the rows on stdout; without --table, prints the rows of split instead of the summary
    #[arg(short, long = "output", value_name = "FORMAT")]
    pub output: Option<Format>,
    /// How to split the tokens: FRACTION (above 0, below 1) trains on the first FRACTION of the tokens; by-sequence or by-label holds
    /// out each sequence or label in turn [default: 0.5]
    #[arg(long, value_name = "FRACTION|by-sequence|by-label", value_parser = parse_split)]
    split: Option<SplitChoice>,
    /// Number of bootstrap resamples for --table bootstrap, 1 to 100000
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = integer_in(1..=100_000u32))]
    pub resamples: u32,
    /// Random seed for --table bootstrap
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Plot the coverage of the hottest experts, in-sample and out-of-sample; the extension selects the format: png, svg
    #[arg(long, value_name = "FILE.png|svg")]
    pub plot: Option<OutputPath>,
    /// Replace the file of --plot if it exists
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TableChoice {
    /// One row per held-out split and size of the hot set: in-sample and out-of-sample coverage
    Split,
    /// One row per layer and eighth of the tokens: change of hotness since the previous eighth; one more from the first to the last
    Drift,
    /// One row per layer: number of tokens after which the set of hot experts stops changing
    Convergence,
    /// One row per measure: value with a 95 % confidence interval
    Bootstrap,
    /// One row per layer and domain: how different the domain's experts are
    Domains,
}

/// The training split.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SplitChoice {
    /// The first fraction of the tokens.
    Time(f64),
    /// All sequences except one.
    BySequence,
    /// All labels except one.
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
    /// Returns the table to print. The summary contains the default table.
    pub fn table(&self) -> TableChoice {
        self.table.unwrap_or(TableChoice::Split)
    }

    pub fn split(&self) -> SplitChoice {
        self.split.unwrap_or(SplitChoice::Time(0.5))
    }

    /// Returns the option that needs the order of tokens in addition to counts, if there is one.
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

    /// Rejects incompatible options, before anything is read.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.split.is_some() && self.table() != TableChoice::Split {
            bail!(
                "--split applies only to the summary and to --table split; omit --split or --table"
            );
        }
        let (uses_labels, used_by) = match (self.split(), self.table()) {
            (SplitChoice::ByLabel, _) => (true, "--split by-label"),
            (_, TableChoice::Domains) => (true, "--table domains"),
            _ => (false, "--split by-label or --table domains"),
        };
        self.inputs.check_labels(uses_labels, used_by)
    }
}
