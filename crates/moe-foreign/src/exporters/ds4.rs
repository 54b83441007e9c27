//! The hot list of ds4: `layer expert hits weight`, the hottest first.
//!
//! ds4 writes the sum of the router weights in the last column, its relative in llama.cpp the share of all hits. The sum is
//! written where it is known, else the share.

use std::io::Write;

use crate::{Export, ExportError, Exporter};

use super::{counts_without_mtp, losses_of_counts, note_n_expert};

/// Hot list.
pub struct Ds4;

impl Exporter for Ds4 {
    fn name(&self) -> &'static str {
        "ds4-hotlist"
    }

    fn description(&self) -> &'static str {
        "hot list of ds4, for its streaming expert cache"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let (layers, left_out) = counts_without_mtp(export, 0);
        let mut ranked: Vec<_> = layers
            .iter()
            .flat_map(|(&layer, counts)| {
                let experts = counts.experts.iter();
                experts.map(move |(&expert, &tally)| (layer, expert, tally))
            })
            .filter(|(_, _, tally)| tally.count > 0)
            .collect();
        // Stable, so that of equals the lower layer and expert come first.
        ranked.sort_by(|(_, _, a), (_, _, b)| {
            let mass = |mass: Option<f64>| mass.unwrap_or(0.0);
            b.count
                .cmp(&a.count)
                .then(mass(b.mass).total_cmp(&mass(a.mass)))
        });
        let selections = layers
            .values()
            .fold(0, |sum: u64, layer| sum.saturating_add(layer.total()));
        let has_masses = ranked.iter().all(|(_, _, tally)| tally.mass.is_some());

        writeln!(out, "# ds4 expert hotlist v1")?;
        let facts = export.facts();
        if let Some(model) = &facts.model {
            writeln!(out, "# model {}", one_line(model))?;
        }
        if let Some(n_layer) = facts.n_hidden_layer() {
            writeln!(out, "# layers {n_layer}")?;
        }
        writeln!(out, "# experts {}", export.n_expert())?;
        writeln!(out, "# layer_records {}", ranked.len())?;
        writeln!(out, "# selections {selections}")?;
        writeln!(out, "# columns: layer expert hits weight")?;
        for (layer, expert, tally) in ranked {
            let weight = match tally.mass {
                Some(mass) if has_masses => mass,
                _ => tally.count as f64 / selections.max(1) as f64,
            };
            writeln!(out, "{layer} {expert} {} {weight:.6}", tally.count)?;
        }
        let mut losses = losses_of_counts(export);
        if !has_masses {
            losses.push(
                "router weights are not known: the weight column is the share of the hits".into(),
            );
        }
        losses.extend(left_out);
        losses.extend(note_n_expert(export));
        Ok(losses)
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
