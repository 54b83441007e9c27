//! Usage history of [colibri](https://github.com/JustVugg/colibri), `.coli_usage`: lines `layer expert count`.
//!
//! The layout is described in [`crate::importers::coli_usage`]. The header `-1 n_layers n_experts` is written if both numbers are
//! known. Layer `n_layers` is the first layer of the MTP head; further MTP layers are skipped. The header with the engine id is
//! omitted: colibri accepts such files, and rejects those of another engine. Compared with our records, the format lacks tokens,
//! order, phases and router weights.

use std::io::Write;

use crate::{Export, ExportError, Exporter};

use super::{counts_without_mtp, losses_of_counts};

/// Exporter of `.coli_usage`.
pub struct ColiUsage;

impl Exporter for ColiUsage {
    fn name(&self) -> &'static str {
        "coli-usage"
    }

    fn description(&self) -> &'static str {
        "usage history for colibri's PIN=FILE (.coli_usage): counts"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let model_info = export.model_info();
        if let (Some(n_layer), Some(n_expert)) = (model_info.n_hidden_layer(), model_info.n_expert)
        {
            writeln!(out, "-1 {n_layer} {n_expert}")?;
        }
        let mut losses = losses_of_counts(export);
        let (layers, skipped) = counts_without_mtp(export, 1);
        losses.extend(skipped);
        for (layer, counts) in layers {
            for (expert, tally) in counts.experts {
                let count = u32::try_from(tally.count).unwrap_or(u32::MAX);
                if tally.count > count.into() {
                    losses.push(format!(
                        "the count {} of expert {expert} in layer {layer} is written as {count}, the maximum of the format",
                        tally.count
                    ));
                }
                writeln!(out, "{layer} {expert} {count}")?;
            }
        }
        Ok(losses)
    }
}
