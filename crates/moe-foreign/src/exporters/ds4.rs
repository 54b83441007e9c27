//! Hot list of [ds4](https://github.com/antirez/ds4): lines `layer expert hits weight`, hottest first.
//!
//! The layout is described in [`crate::importers::ds4_hotlist`]. The `weight` column is the sum of the router weights, or, if any
//! of them is unknown, the fraction of all hits: ds4 writes the former, a fork of llama.cpp the latter. Compared with our
//! records, the format lacks tokens, order, phases and layers of the MTP head.

use std::io::Write;

use crate::{Export, ExportError, Exporter};

use super::{counts_without_mtp, losses_of_counts, note_n_expert};

/// Exporter of hot lists.
pub struct Ds4;

impl Exporter for Ds4 {
    fn name(&self) -> &'static str {
        "ds4-hotlist"
    }

    fn description(&self) -> &'static str {
        "hot list for ds4's streaming expert cache: counts"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let (layers, skipped) = counts_without_mtp(export, 0);
        let mut ranked: Vec<_> = layers
            .iter()
            .flat_map(|(&layer, counts)| {
                let experts = counts.experts.iter();
                experts.map(move |(&expert, &tally)| (layer, expert, tally))
            })
            .filter(|(_, _, tally)| tally.count > 0)
            .collect();
        // A stable sort, so that the lower layer and expert come first among equals.
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
        let model_info = export.model_info();
        if let Some(model) = &model_info.model {
            writeln!(out, "# model {}", one_line(model))?;
        }
        if let Some(n_layer) = model_info.n_hidden_layer() {
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
                "router weights are unknown: the weight column is the fraction of all hits".into(),
            );
        }
        losses.extend(skipped);
        losses.extend(note_n_expert(export));
        Ok(losses)
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
