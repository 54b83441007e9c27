//! Reports of how often each expert was used, by expert and by layer, in percent.
//!
//! Text and JSON have the format of the expert usage tracer in ernestuz-b/llama-prefetch.cpp. Its `total_tokens` of a layer is the
//! number of activations. Each (token, layer, expert) counts once, not once per projection.

use std::fmt::Write as _;
use std::io::{self, Write};

use moe_trace::{ExpertId, LayerId};
use serde_json::json;

use crate::output::{Format, Table};

/// Activations of each expert of a layer.
pub struct LayerUsage {
    /// Block number in the model.
    pub layer: LayerId,
    /// By expert id (`[n_expert]`).
    pub counts: Vec<u64>,
}

/// Returns the tracer's text: activations of each expert id over all layers and, with `per_layer`, in each layer. The most used
/// expert is first. Percentages are of all activations.
pub fn report(layers: &[LayerUsage], n_tokens: u64, per_layer: bool) -> String {
    let mut text = String::from("=== Expert Usage Statistics ===\n");
    let _ = writeln!(text, "Total tokens processed: {n_tokens}");
    let list = |text: &mut String, counts: &[u64]| {
        for (expert, n, percent) in ranked(counts) {
            let _ = writeln!(
                text,
                "  Expert {expert:3}: {n:8} activations ({percent:.2}%)"
            );
        }
    };
    text += "Expert activation counts:\n";
    list(&mut text, &over_layers(layers));
    if per_layer {
        for LayerUsage { layer, counts } in layers {
            let _ = writeln!(text, "Layer {layer}:");
            list(&mut text, counts);
        }
    }
    text
}

/// Returns the tracer's JSON.
pub fn json(layers: &[LayerUsage]) -> String {
    let layers = layers.iter().map(|LayerUsage { layer, counts }| {
        let experts = ranked(counts).into_iter().map(|(expert, n, percent)| {
            json!({"expert_id": expert, "activations": n, "percentage": percent})
        });
        let experts: Vec<_> = experts.collect();
        json!({"layer_id": layer, "total_tokens": counts.iter().sum::<u64>(), "experts": experts})
    });
    format!("{}\n", json!({"layers": layers.collect::<Vec<_>>()}))
}

/// Writes one row per used expert of each layer, the most used expert of a layer first.
pub fn write(out: &mut dyn Write, format: Format, layers: &[LayerUsage]) -> io::Result<()> {
    let rows = layers.iter().flat_map(|LayerUsage { layer, counts }| {
        let rows = ranked(counts).into_iter();
        rows.map(move |(expert, n, percent)| (*layer, expert, n, percent))
    });
    Table::of(rows)
        .column("layer_id", "layer", |&(layer, ..)| layer)
        .column("expert_id", "expert", |&(_, expert, ..)| expert)
        .column("activations", "activations", |&(_, _, n, _)| n)
        .column("percentage", "activations (%)", |&(.., percent)| percent)
        .write(out, format)
}

/// Returns the used experts with their counts and their percentage of all activations, the most used first.
fn ranked(counts: &[u64]) -> Vec<(ExpertId, u64, f64)> {
    let total: u64 = counts.iter().sum();
    let used = (0..)
        .map(ExpertId)
        .zip(counts.iter().copied())
        .filter(|&(_, n)| n > 0);
    let mut ranked: Vec<_> = used
        .map(|(expert, n)| (expert, n, 100.0 * n as f64 / total as f64))
        .collect();
    ranked.sort_by_key(|&(expert, n, _)| (std::cmp::Reverse(n), expert));
    ranked
}

/// Returns the activations of each expert id, summed over layers.
fn over_layers(layers: &[LayerUsage]) -> Vec<u64> {
    let n_expert = layers.iter().map(|layer| layer.counts.len()).max();
    let mut sums = vec![0; n_expert.unwrap_or(0)];
    for layer in layers {
        for (sum, count) in sums.iter_mut().zip(&layer.counts) {
            *sum += count;
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_csv_and_json_agree() {
        let layers = [(0, vec![0, 3, 1]), (1, vec![2, 0, 2])];
        let layers = layers.map(|(layer, counts)| LayerUsage {
            layer: LayerId(layer),
            counts,
        });
        let report = report(&layers, 4, true);
        assert!(report.contains("Total tokens processed: 4"));
        assert!(
            report.contains("  Expert   1:        3 activations (37.50%)\n"),
            "{report}"
        );
        assert!(
            report.contains("Layer 1:\n  Expert   0:        2 activations (50.00%)"),
            "{report}"
        );
        let mut csv = Vec::new();
        write(&mut csv, Format::Csv, &layers).unwrap();
        assert_eq!(
            String::from_utf8(csv).unwrap(),
            "layer_id,expert_id,activations,percentage\n0,1,3,75\n0,2,1,25\n1,0,2,50\n1,2,2,50\n"
        );
        let json: serde_json::Value = serde_json::from_str(&json(&layers)).unwrap();
        assert_eq!(json["layers"][0]["total_tokens"], 4);
        assert_eq!(json["layers"][0]["experts"][0]["expert_id"], 1);
        assert_eq!(json["layers"][1]["experts"][1]["percentage"], 50.0);
    }
}
