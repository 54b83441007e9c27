//! Counts as a matrix, layers × experts: for SGLang and ktransformers, for EPLB, for NumPy.

use std::collections::BTreeMap;
use std::io::Write;

use moe_gguf::text::counted;
use moe_trace::LayerId;

use crate::binary::array::ElementType;
use crate::binary::npy;
use crate::{Export, ExportError, Exporter, LayerCounts};

use super::{losses_of_counts, note_n_expert, rows_for_servers};

/// Writes `{"logical_count": [[...], ...]}`.
pub struct Sglang;

impl Exporter for Sglang {
    fn name(&self) -> &'static str {
        "sglang"
    }

    fn description(&self) -> &'static str {
        "counts for --init-expert-location of SGLang and ktransformers (logical_count JSON)"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let matrix = Matrix::new(export);
        out.write_all(b"{\"logical_count\": ")?;
        matrix.write_json(out)?;
        out.write_all(b"}\n")?;
        Ok(matrix.losses(export))
    }
}

/// Writes the matrix that EPLB's `rebalance_experts` takes as `weight`, as JSON.
pub struct Eplb;

impl Exporter for Eplb {
    fn name(&self) -> &'static str {
        "eplb"
    }

    fn description(&self) -> &'static str {
        "matrix of counts, layers × experts, that EPLB balances (JSON)"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let matrix = Matrix::new(export);
        matrix.write_json(out)?;
        out.write_all(b"\n")?;
        Ok(matrix.losses(export))
    }
}

/// Writes the same matrix as numbers between commas, a line a layer.
pub struct EplbCsv;

impl Exporter for EplbCsv {
    fn name(&self) -> &'static str {
        "eplb-csv"
    }

    fn description(&self) -> &'static str {
        "matrix of counts, layers × experts, as CSV without a header"
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

/// Writes counts as a 64-bit array of NumPy.
pub struct NpyCounts;

impl Exporter for NpyCounts {
    fn name(&self) -> &'static str {
        "npy-counts"
    }

    fn description(&self) -> &'static str {
        "array of NumPy: counts [layers, experts], int64"
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

/// Counts of both phases, `[n_layer, n_expert]`; the number of a row is that of the hidden layer.
struct Matrix {
    n_layer: usize,
    n_expert: usize,
    layers: BTreeMap<LayerId, LayerCounts>,
    /// What the rows leave out.
    left_out: Vec<String>,
}

impl Matrix {
    fn new(export: &Export<'_>) -> Self {
        let (n_layer, left_out) = rows_for_servers(export);
        let mut layers = export.counts.layers();
        layers.retain(|layer, _| layer.index() < n_layer);
        Self {
            n_layer,
            n_expert: export.n_expert() as usize,
            layers,
            left_out,
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
        losses.extend_from_slice(&self.left_out);
        losses.extend(note_n_expert(export));
        let n_idle = self.n_layer - self.layers.len();
        if n_idle > 0 {
            losses.push(format!(
                "layers without experts: {} of zeros",
                counted(n_idle, "row")
            ));
        }
        losses
    }
}

fn joined(row: &[u64], between: &str) -> String {
    let numbers: Vec<String> = row.iter().map(u64::to_string).collect();
    numbers.join(between)
}
