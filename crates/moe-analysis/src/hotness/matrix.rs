//! Matrices of counts (layers × experts), for the complete trace or for each group, and their Parquet files.

use std::io::Write;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array, RecordBatch, StringArray, UInt32Array, UInt64Array};
use moe_trace::{ExpertId, LayerId};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;

use super::{Error, ExpertBytes, Hotness};
use crate::phases::Phases;
use crate::survey::Groups;
use crate::tally::ExpertTally;

/// Number of rows per record batch.
const BATCH_ROWS: usize = 1 << 14;
/// Schema name and version in the metadata of a table.
const SCHEMA: &str = "moe-analyze.hotness.v1";

/// Quantity in the cells of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Value {
    /// Number of selections.
    #[default]
    Count,
    /// Sum of the router weights of the selections.
    Mass,
    /// Size of the expert × number of selections: bytes read without any cache.
    Bytes,
}

/// One cell of a matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatrixRow<'a> {
    /// Name of the group, if the matrix is divided into groups.
    pub group: Option<&'a str>,
    /// Block number.
    pub layer: LayerId,
    /// Expert id within the layer.
    pub expert: ExpertId,
    /// Number of selections.
    pub count: u64,
    /// Sum of the router weights of the selections, if all weights are known.
    pub mass: Option<f64>,
    /// Size of the expert × number of selections, if the size is known.
    pub bytes: Option<u64>,
}

/// Counts, mass and bytes by layer and expert, for the complete trace or for each group.
#[derive(Debug, Clone)]
pub struct Matrix<'a> {
    parts: Parts<'a>,
    layers: Vec<LayerId>,
    n_expert: u32,
    has_mass: bool,
    bytes: &'a ExpertBytes,
}

#[derive(Debug, Clone)]
enum Parts<'a> {
    /// `[layer][n_expert]`
    Ungrouped(Vec<Vec<ExpertTally>>),
    /// Kind of group, and the groups.
    ByGroup(&'static str, &'a Groups),
}

impl<'a> Matrix<'a> {
    /// Matrix of the complete trace for the tokens of `phases`.
    pub fn ungrouped(hotness: &Hotness, phases: Phases, bytes: &'a ExpertBytes) -> Matrix<'a> {
        let layers = hotness.layers(phases);
        let experts = layers.iter().map(|&layer| hotness.experts(layer, phases));
        Matrix {
            parts: Parts::Ungrouped(experts.collect()),
            n_expert: hotness.n_expert(),
            has_mass: hotness.has_mass(),
            layers,
            bytes,
        }
    }

    /// One matrix per group; `by` is the kind of group.
    pub fn by_group(
        hotness: &Hotness,
        phases: Phases,
        by: &'static str,
        groups: &'a Groups,
        bytes: &'a ExpertBytes,
    ) -> Matrix<'a> {
        Matrix {
            parts: Parts::ByGroup(by, groups),
            layers: hotness.layers(phases),
            n_expert: hotness.n_expert(),
            has_mass: hotness.has_mass(),
            bytes,
        }
    }

    /// Layers in ascending order.
    pub fn layers(&self) -> &[LayerId] {
        &self.layers
    }

    /// Kind of group; `None` if the matrix is not divided into groups.
    pub fn group_by(&self) -> Option<&'static str> {
        match self.parts {
            Parts::Ungrouped(_) => None,
            Parts::ByGroup(by, _) => Some(by),
        }
    }

    /// Names of the groups.
    pub fn groups(&self) -> &[String] {
        match self.parts {
            Parts::Ungrouped(_) => &[],
            Parts::ByGroup(_, groups) => groups.names(),
        }
    }

    /// All cells: groups in the order of the trace, layers and experts in ascending order, including experts without
    /// selections.
    pub fn rows(&self) -> impl Iterator<Item = MatrixRow<'_>> + Clone {
        let n_part = match self.parts {
            Parts::Ungrouped(_) => 1,
            Parts::ByGroup(_, groups) => groups.names().len(),
        };
        let places = (0..n_part).flat_map(|part| (0..self.layers.len()).map(move |l| (part, l)));
        places.flat_map(move |(part, at)| {
            let layer = self.layers[at];
            let (group, tallies) = match &self.parts {
                Parts::Ungrouped(experts) => (None, &experts[at][..]),
                Parts::ByGroup(_, groups) => (
                    groups.names().get(part).map(String::as_str),
                    groups.experts(part, layer),
                ),
            };
            (0..self.n_expert).map(ExpertId).map(move |expert| {
                let tally = tallies.get(expert.index()).copied().unwrap_or_default();
                let bytes = self.bytes.get(layer, expert);
                MatrixRow {
                    group,
                    layer,
                    expert,
                    count: tally.count,
                    mass: self.has_mass.then_some(tally.mass),
                    bytes: bytes.map(|bytes| bytes.saturating_mul(tally.count)),
                }
            })
        })
    }

    /// Shape of [`rows`](Self::rows) as an array: `[n_layer, n_expert]`, or `[n_group, n_layer, n_expert]` with groups.
    pub fn shape(&self) -> Vec<usize> {
        let mut shape = vec![self.layers.len(), self.n_expert as usize];
        if self.group_by().is_some() {
            shape.insert(0, self.groups().len());
        }
        shape
    }

    /// Writes a Parquet table with the columns group (named by [`Self::group_by`], only with groups), `layer_id`,
    /// `expert_id`, `count`, `mass` and `bytes`. `mass` and `bytes` are null if they are unknown.
    ///
    /// # Errors
    /// [`Error::Parquet`] if the table cannot be written.
    pub fn write_parquet(&self, out: &mut (dyn Write + Send)) -> Result<(), Error> {
        let metadata = KeyValue::new("moe-analyze.schema".to_owned(), SCHEMA.to_owned());
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_created_by(concat!("moe-analyze ", env!("CARGO_PKG_VERSION")).to_owned())
            .set_key_value_metadata(Some(vec![metadata]))
            .build();
        let mut rows = self.rows();
        let first = self.batch(&mut rows)?;
        let mut writer = ArrowWriter::try_new(out, first.schema(), Some(properties))?;
        writer.write(&first)?;
        loop {
            let batch = self.batch(&mut rows)?;
            if batch.num_rows() == 0 {
                break;
            }
            writer.write(&batch)?;
        }
        writer.close()?;
        Ok(())
    }

    fn batch<'b>(
        &'b self,
        rows: &mut impl Iterator<Item = MatrixRow<'b>>,
    ) -> Result<RecordBatch, ParquetError> {
        let rows: Vec<MatrixRow> = rows.take(BATCH_ROWS).collect();
        let numbers = |number: fn(&MatrixRow) -> u32| -> ArrayRef {
            Arc::new(rows.iter().map(number).map(Some).collect::<UInt32Array>())
        };
        let counts: UInt64Array = rows.iter().map(|row| Some(row.count)).collect();
        let mass: Float64Array = rows.iter().map(|row| row.mass).collect();
        let bytes: UInt64Array = rows.iter().map(|row| row.bytes).collect();
        let mut columns: Vec<(&str, ArrayRef, bool)> = vec![
            ("layer_id", numbers(|row| row.layer.0.into()), false),
            ("expert_id", numbers(|row| row.expert.0), false),
            ("count", Arc::new(counts), false),
            ("mass", Arc::new(mass), true),
            ("bytes", Arc::new(bytes), true),
        ];
        if let Some(by) = self.group_by() {
            let groups: StringArray = rows.iter().map(|row| row.group).collect();
            columns.insert(0, (by, Arc::new(groups), true));
        }
        Ok(RecordBatch::try_from_iter_with_nullable(columns)?)
    }
}
