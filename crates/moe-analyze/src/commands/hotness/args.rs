//! The command line of `hotness`.

use anyhow::bail;
use moe_analysis::hotness::{Phases, Value};
use moe_analysis::survey::GroupBy;

use crate::counting::inputs::InputArgs;
use crate::files::OutputPath;
use crate::option_values::at_least;
use crate::output::Format;

/// Count how often each expert of each layer is selected
///
/// Without -o and --table a summary of each layer is printed. Its first line says whether hotness generalizes; `stability` has the
/// details. With -o alone a row for each layer and expert, the hottest of a layer first.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("of_values").args(["matrix", "plot"]).multiple(true))]
pub struct Args {
    #[command(flatten)]
    pub inputs: InputArgs,
    /// Rows to print instead of the summary
    #[arg(long, value_enum)]
    pub table: Option<TableChoice>,
    /// Format on stdout; alone, of the whole matrix
    #[arg(short, long = "output", value_name = "FORMAT")]
    pub output: Option<Format>,
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
    /// Print how often each expert was used, over all layers and in each, in percent, as the expert usage tracer does;
    /// with -o json the tracer's JSON
    #[arg(long, conflicts_with = "table")]
    pub usage: bool,
    /// Replace the files of --out, --matrix and --plot if they exist
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TableChoice {
    /// A row a layer and expert
    Matrix,
    /// A row a layer: every measure of its spread and its order; the last row is of the whole model
    Measures,
    /// A row a measure: the whole model, mean, least and most of the layers
    Overall,
    /// Distinct experts of batches of tokens, compared with what chance would give
    Batches,
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
    /// How evenly each layer chooses
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

    /// Whether the order of the tokens, their sequences or their labels are needed, not only sums.
    pub fn needs_survey(&self) -> bool {
        let prints_sums = self.usage || self.rows() == Some(TableChoice::Matrix);
        self.by.is_some() || !prints_sums
    }

    /// Refuses what does not go together, before anything is read.
    pub fn check(&self) -> anyhow::Result<()> {
        self.inputs
            .check_labels(self.by == Some(ByChoice::Label), "--by label")?;
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
        Ok(())
    }
}
