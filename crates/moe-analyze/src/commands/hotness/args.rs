//! The command line of `hotness`.

use anyhow::bail;
use moe_analysis::Phases;
use moe_analysis::hotness::Value;
use moe_analysis::survey::GroupBy;

use crate::counting::inputs::InputArgs;
use crate::files::OutputPath;
use crate::option_values::at_least;
use crate::output::Format;

/// Count how often each expert of each layer is selected
///
/// Reads runs, tables or traces of other tools and prints a summary with one row per layer. The first line states whether hotness
/// generalizes to other tokens; `stability` prints the details. -o alone prints one row per layer and expert, the hottest first.
/// --out writes a learn file for the hot expert cache (github.com/adrianhoehne/llama.cpp).
#[derive(Debug, clap::Args)]
#[command(
    group = clap::ArgGroup::new("of_values").args(["matrix", "plot"]).multiple(true),
    after_help = "Examples:\n  moe-analyze hotness runs/first\n  \
        moe-analyze hotness runs/first --out learn.json --plot heat.svg"
)]
pub struct Args {
    #[command(flatten)]
    pub inputs: InputArgs,
    /// Table to print instead of the summary
    #[arg(long, value_enum)]
    pub table: Option<TableChoice>,
    /// Format on stdout; without --table, prints the matrix in this format instead of the summary
    #[arg(short, long = "output", value_name = "FORMAT")]
    pub output: Option<Format>,
    /// Split the counts of the matrix by this key
    #[arg(long, value_enum, help_heading = "Matrix")]
    pub by: Option<ByChoice>,
    /// Number of tokens per window, at least 1; required with --by window
    #[arg(long, value_name = "N", value_parser = at_least(1u64), help_heading = "Matrix")]
    pub window: Option<u64>,
    /// Write the matrix of layers × experts; the extension selects the format: csv, json, jsonl, md, parquet, npy
    #[arg(long, value_name = "FILE", help_heading = "Matrix")]
    pub matrix: Option<OutputPath>,
    /// Values of the .npy array of --matrix and of the heat map of --plot; bytes need a run with gguf-map.parquet, or --model
    #[arg(long, value_enum, default_value_t = ValueChoice::Count, requires = "of_values", help_heading = "Matrix")]
    pub value: ValueChoice,
    /// Write the counts to a learn file for the hot expert cache
    #[arg(long, value_name = "FILE.json")]
    pub out: Option<OutputPath>,
    /// Write a plot; the extension selects the format: png, svg
    #[arg(long, value_name = "FILE.png|svg", help_heading = "Plot")]
    pub plot: Option<OutputPath>,
    /// Kind of the plot
    #[arg(long, alias = "picture", value_enum, default_value_t = PlotKind::HeatMap, requires = "plot", help_heading = "Plot")]
    pub plot_kind: PlotKind,
    /// Sort the experts of each layer in the heat map, the hottest first
    #[arg(long, requires = "plot", help_heading = "Plot")]
    pub sorted: bool,
    /// Print activations in the format of the expert usage tracer (ernestuz-b/llama-prefetch.cpp): its text report, or its JSON or CSV
    /// with -o
    #[arg(long, conflicts_with = "table")]
    pub usage: bool,
    /// Replace the files of --out, --matrix and --plot if they exist
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TableChoice {
    /// One row per layer and expert: activations
    Matrix,
    /// One row per layer and one for the model: coverage, entropy, Gini coefficient, overlap of consecutive tokens
    Measures,
    /// One row per measure: value for the model; mean, minimum and maximum over layers
    Overall,
    /// One row per layer and batch size: distinct experts in a batch of tokens, measured and expected
    Batches,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ByChoice {
    /// Prompt and generated tokens
    Phase,
    /// Sequences
    Sequence,
    /// Windows of --window tokens
    Window,
    /// Labels of --label or --labels
    Label,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ValueChoice {
    /// Number of activations
    Count,
    /// Sum of the router weights
    Mass,
    /// Size of the expert in bytes × number of activations
    Bytes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PlotKind {
    /// Activations of layers × experts
    HeatMap,
    /// Entropy and Gini coefficient of each layer
    Entropy,
}

impl Args {
    pub fn phases(&self) -> Phases {
        self.inputs.phases()
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

    /// The rows to print instead of the summary.
    pub fn rows(&self) -> Option<TableChoice> {
        self.table.or(self.output.map(|_| TableChoice::Matrix))
    }

    /// Returns whether the output needs the order, sequences or labels of tokens, in addition to sums.
    pub fn needs_survey(&self) -> bool {
        let prints_sums = self.usage || self.rows() == Some(TableChoice::Matrix);
        self.by.is_some() || !prints_sums
    }

    /// Rejects incompatible options, before anything is read.
    pub fn check(&self) -> anyhow::Result<()> {
        self.inputs
            .check_labels(self.by == Some(ByChoice::Label), "--by label")?;
        match (self.by, self.window) {
            (Some(ByChoice::Window), None) => {
                bail!("--by window needs the number of tokens per window; add --window N")
            }
            (by, Some(_)) if by != Some(ByChoice::Window) => {
                bail!("--window has no effect without --by window; add it, or omit --window")
            }
            _ => {}
        }
        let prints_matrix = !self.usage && self.rows() == Some(TableChoice::Matrix);
        if self.by.is_some() && self.matrix.is_none() && !prints_matrix {
            bail!("--by splits the matrix; add --matrix FILE or -o FORMAT, or omit --by");
        }
        Ok(())
    }
}
