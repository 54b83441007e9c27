//! The usage history of colibri, `.coli_usage`: `layer expert count`.
//!
//! A header `-1 n_layers n_experts` comes first where both are known. Layer `n_layers` is that of the multi-token predictor, which
//! has one at most. Which engine wrote a history is not said: colibri takes
//! one that does not say so, and refuses that of another engine.

use std::io::Write;

use crate::{Export, ExportError, Exporter};

use super::{counts_without_mtp, losses_of_counts};

/// Usage history.
pub struct ColiUsage;

impl Exporter for ColiUsage {
    fn name(&self) -> &'static str {
        "coli-usage"
    }

    fn description(&self) -> &'static str {
        "usage history of colibri (.coli_usage), for PIN=FILE"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let facts = export.facts();
        if let (Some(n_layer), Some(n_expert)) = (facts.n_hidden_layer(), facts.n_expert) {
            writeln!(out, "-1 {n_layer} {n_expert}")?;
        }
        let mut losses = losses_of_counts(export);
        let (layers, left_out) = counts_without_mtp(export, 1);
        losses.extend(left_out);
        for (layer, counts) in layers {
            for (expert, tally) in counts.experts {
                let count = u32::try_from(tally.count).unwrap_or(u32::MAX);
                if tally.count > count.into() {
                    losses.push(format!(
                        "{} choices of expert {expert} in layer {layer} were written as {count}, the most that colibri reads",
                        tally.count
                    ));
                }
                writeln!(out, "{layer} {expert} {count}")?;
            }
        }
        Ok(losses)
    }
}
