//! Counts as a matrix `[layers, experts]`, in four formats:
//!
//! - `sglang`: JSON `{"logical_count": [[...], ...]}` for `--init-expert-location` of
//!   [SGLang](https://github.com/sgl-project/sglang) and [ktransformers](https://github.com/kvcache-ai/ktransformers).
//! - `eplb`, `eplb-csv`: the `weight` argument of `rebalance_experts` in [EPLB](https://github.com/deepseek-ai/EPLB), as JSON or as
//!   CSV without a header.
//! - `npy-counts`: a [NumPy](https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html) array of 64-bit integers.
//!
//! Row i is hidden layer i; rows of dense layers are 0. Compared with our records, the formats lack tokens, order, phases, router
//! weights and layers of the MTP head.

use std::collections::BTreeMap;
use std::io::Write;

use moe_files::text::counted;
use moe_trace::LayerId;

use crate::binary::array::ElementType;
use crate::binary::npy;
use crate::{Export, ExportError, Exporter, LayerCounts};

use super::{losses_of_counts, note_n_expert, rows_for_servers};

/// Exporter of `{"logical_count": [[...], ...]}`.
pub struct Sglang;

impl Exporter for Sglang {
    fn name(&self) -> &'static str {
        "sglang"
    }

    fn description(&self) -> &'static str {
        "JSON for --init-expert-location of SGLang and ktransformers (logical_count): counts"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let matrix = Matrix::new(export);
        out.write_all(b"{\"logical_count\": ")?;
        matrix.write_json(out)?;
        out.write_all(b"}\n")?;
        Ok(matrix.losses(export))
    }
}

/// Exporter of the matrix as JSON, for EPLB.
pub struct Eplb;

impl Exporter for Eplb {
    fn name(&self) -> &'static str {
        "eplb"
    }

    fn description(&self) -> &'static str {
        "JSON matrix for EPLB, [layers, experts]: counts"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let matrix = Matrix::new(export);
        matrix.write_json(out)?;
        out.write_all(b"\n")?;
        Ok(matrix.losses(export))
    }
}

/// Exporter of the matrix as CSV without a header, one line per layer.
pub struct EplbCsv;

impl Exporter for EplbCsv {
    fn name(&self) -> &'static str {
        "eplb-csv"
    }

    fn description(&self) -> &'static str {
        "CSV matrix without a header for EPLB, [layers, experts]: counts"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let matrix = Matrix::new(export);
        for row in matrix.rows() {
            out.write_all(joined(&row, ",").as_bytes())?;
            out.write_all(b"\n")?;
        }
        Ok(matrix.losses(export))
    }
}

/// Exporter of the matrix as a NumPy array.
pub struct NpyCounts;

impl Exporter for NpyCounts {
    fn name(&self) -> &'static str {
        "npy-counts"
    }

    fn description(&self) -> &'static str {
        "NumPy array [layers, experts], int64: counts"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let matrix = Matrix::new(export);
        let shape = [matrix.n_layer, matrix.n_expert];
        out.write_all(&npy::header(ElementType::I64, &shape))?;
        for count in matrix.rows().flatten() {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            out.write_all(&count.to_le_bytes())?;
        }
        Ok(matrix.losses(export))
    }
}

/// Counts `[n_layer, n_expert]`, summed over the phases. Row i is hidden layer i.
struct Matrix {
    n_layer: usize,
    n_expert: usize,
    layers: BTreeMap<LayerId, LayerCounts>,
    /// Notes about skipped layers.
    skipped: Vec<String>,
}

impl Matrix {
    fn new(export: &Export<'_>) -> Self {
        let (n_layer, skipped) = rows_for_servers(export);
        let mut layers = export.counts.layers();
        layers.retain(|layer, _| layer.index() < n_layer);
        Self {
            n_layer,
            n_expert: export.n_expert() as usize,
            layers,
            skipped,
        }
    }

    fn rows(&self) -> impl Iterator<Item = Vec<u64>> {
        (0..self.n_layer).map(|layer| {
            let mut row = vec![0; self.n_expert];
            let counts = LayerId::try_from(layer)
                .ok()
                .and_then(|layer| self.layers.get(&layer));
            for (&expert, tally) in counts.iter().flat_map(|counts| &counts.experts) {
                if let Some(place) = row.get_mut(expert.index()) {
                    *place = tally.count;
                }
            }
            row
        })
    }

    fn write_json(&self, out: &mut dyn Write) -> Result<(), ExportError> {
        out.write_all(b"[")?;
        for (layer, row) in self.rows().enumerate() {
            let comma = if layer == 0 { "" } else { ", " };
            write!(out, "{comma}[{}]", joined(&row, ", "))?;
        }
        Ok(out.write_all(b"]")?)
    }

    fn losses(&self, export: &Export<'_>) -> Vec<String> {
        let mut losses = losses_of_counts(export);
        losses.extend_from_slice(&self.skipped);
        losses.extend(note_n_expert(export));
        let n_empty = self.n_layer - self.layers.len();
        if n_empty > 0 {
            losses.push(format!(
                "{} of zeros for layers without routed tokens",
                counted(n_empty, "row")
            ));
        }
        losses
    }
}

fn joined(row: &[u64], separator: &str) -> String {
    let numbers: Vec<String> = row.iter().map(u64::to_string).collect();
    numbers.join(separator)
}
