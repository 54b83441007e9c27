//! The order of each layer's experts: by activations, from a list, or by coactivation.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;

use anyhow::{Context as _, anyhow, bail};
use moe_gguf::{ExpertId, Gguf, LayerId};
use moe_placement::learn;
use moe_synth::relayout::{ExpertOrders, keep_groups, n_experts, n_groups};
use moe_trace::{Run, bounded};

use crate::context::Context;
use crate::json_input;
use crate::progress::Progress;
use crate::traces;

/// Accepted formats of an order of experts.
const FORMATS: &str = "pass a learn file, which `hotness --out` writes, or a list of experts for each layer, {\"0\": [3, 1, …], …}";

/// Reads the order from a learn file (hottest first) or from lists of experts by layer.
pub fn from_file(path: &Path, gguf: &Gguf) -> anyhow::Result<ExpertOrders> {
    let text = bounded::read_json(path).map_err(|error| anyhow!("{error}; {FORMATS}"))?;
    if matches!(learn::has_schema(&text), Ok(true)) {
        let orders = learn::parse_observations(&text).map_err(anyhow::Error::from);
        return orders
            .and_then(|observations| by_hotness(&observations, gguf))
            .with_context(|| path.display().to_string());
    }
    json_input::parse(&text).map_err(|error| anyhow!("{}: {error}; {FORMATS}", path.display()))
}

/// Returns each layer's experts by descending activations; unused experts are last.
fn by_hotness(layers: &[learn::LayerObservation], gguf: &Gguf) -> anyhow::Result<ExpertOrders> {
    let n_experts = n_experts(gguf);
    let mut counts: BTreeMap<LayerId, Vec<u64>> = BTreeMap::new();
    for observed in layers {
        let layer = observed.layer;
        let counts = layer_counts(&mut counts, &n_experts, layer)?;
        for expert in &observed.experts {
            let count = expert
                .raw
                .saturating_add(expert.hot)
                .saturating_add(expert.cold);
            let slot = counts.get_mut(expert.expert.index());
            let slot = slot.with_context(|| unknown_expert(layer, expert.expert))?;
            *slot = slot.saturating_add(count);
        }
    }
    let hottest_first = |counts: &Vec<u64>| {
        let mut order: Vec<ExpertId> = (0..).map(ExpertId).take(counts.len()).collect();
        order.sort_by_key(|expert| std::cmp::Reverse(counts[expert.index()]));
        order
    };
    grouped(
        gguf,
        counts
            .iter()
            .map(|(&layer, counts)| (layer, hottest_first(counts))),
    )
}

/// Activations and coactivations of the experts of a layer.
struct Coactivation {
    /// Activations, `[n_expert]`.
    counts: Vec<u64>,
    /// Tokens that selected both experts, `[n_expert][n_expert]`.
    pairs: Vec<u32>,
}

/// Maximum number of pairs of experts in all layers: 512 MiB. 128 layers with 1024 experts reach the limit.
const MAX_PAIRS: usize = 1 << 27;

/// Returns each layer's experts as a chain that starts with the hottest. The next expert is, of the remaining ones, the one that most
/// tokens selected together with the previous one.
pub fn by_coactivation(ctx: &Context, trace: &Path, gguf: &Gguf) -> anyhow::Result<ExpertOrders> {
    let n_experts = n_experts(gguf);
    traces::check_run(trace)?;
    let run = Run::open(trace)?;
    check_model(ctx, &run, gguf)?;
    let mut layers: BTreeMap<LayerId, Coactivation> = BTreeMap::new();
    let mut n_pairs = 0usize;
    let _progress = Progress::of_run(ctx, &run);
    for operation in run.routing() {
        let head = operation.head();
        let known = head
            .layer()
            .and_then(|layer| Some((layer, *n_experts.get(&layer)?)));
        let (layer, n) = known
            .with_context(|| format!("{}: {}", trace.display(), unknown_layer(head.layer_id)))?;
        let n = n as usize;
        let coactivation = match layers.entry(layer) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                n_pairs = n_pairs.saturating_add(n.saturating_mul(n));
                if n_pairs > MAX_PAIRS {
                    bail!(
                        "layer {layer} has {n} experts: an order by coactivation is limited to {MAX_PAIRS} pairs of experts in all layers; pass a learn file to order by activations"
                    );
                }
                entry.insert(Coactivation {
                    counts: vec![0; n],
                    pairs: vec![0; n * n],
                })
            }
        };
        for token in operation.tokens() {
            let selected: Vec<usize> = token.experts().map(|e| e.expert_id.index()).collect();
            if let Some(&expert) = selected.iter().find(|&&expert| expert >= n) {
                bail!("{}: {}", trace.display(), unknown_expert(layer, expert));
            }
            for &a in &selected {
                coactivation.counts[a] += 1;
                for &b in selected.iter().filter(|&&b| b != a) {
                    let pair = &mut coactivation.pairs[a * n + b];
                    *pair = pair.saturating_add(1);
                }
            }
        }
    }
    if layers.is_empty() {
        bail!(
            "{} contains no routing; record a run with the model",
            trace.display()
        );
    }
    grouped(
        gguf,
        layers
            .iter()
            .map(|(&layer, coactivation)| (layer, coactivation.chain())),
    )
}

/// Rejects a run of another model.
fn check_model(ctx: &Context, run: &Run, gguf: &Gguf) -> anyhow::Result<()> {
    let path = run.path.display();
    let header = run.manifest.as_ref().map(|m| m.model.header_xxh3.as_str());
    let Some(found) = header.filter(|header| !header.is_empty()) else {
        ctx.note(format_args!(
            "warning: {path} contains no header hash of its model, so a run of another model cannot be detected"
        ));
        return Ok(());
    };
    let own = format!("{:016x}", gguf.header_xxh3());
    if !found.eq_ignore_ascii_case(&own) {
        bail!(
            "{path} is a run of another model (header hash {found}, this model has {own}); record a run of this model"
        );
    }
    Ok(())
}

impl Coactivation {
    fn chain(&self) -> Vec<ExpertId> {
        let n = self.counts.len();
        let mut left: Vec<usize> = (0..n).collect();
        let mut chain: Vec<ExpertId> = Vec::with_capacity(n);
        while !left.is_empty() {
            let last = chain.last().map(|last| last.index());
            let with_last = |expert: usize| last.map_or(0, |last| self.pairs[last * n + expert]);
            // Of equal experts, the hotter one, then the lower id.
            let next = left.iter().enumerate().max_by_key(|&(_, &expert)| {
                (
                    with_last(expert),
                    self.counts[expert],
                    std::cmp::Reverse(expert),
                )
            });
            let next = next.map_or(0, |(at, _)| at);
            chain.push(ExpertId(left.remove(next) as u32));
        }
        chain
    }
}

/// Returns the orders with groups kept together, for models whose router selects groups first.
fn grouped(
    gguf: &Gguf,
    orders: impl Iterator<Item = (LayerId, Vec<ExpertId>)>,
) -> anyhow::Result<ExpertOrders> {
    let n_group = n_groups(gguf)?;
    Ok(orders
        .map(|(layer, order)| (layer, keep_groups(&order, n_group)))
        .collect())
}

/// Returns the counts of a layer.
///
/// # Errors
/// The model has no such layer.
fn layer_counts<'a>(
    counts: &'a mut BTreeMap<LayerId, Vec<u64>>,
    n_experts: &BTreeMap<LayerId, u32>,
    layer: LayerId,
) -> anyhow::Result<&'a mut Vec<u64>> {
    let n = n_experts
        .get(&layer)
        .with_context(|| unknown_layer(layer))?;
    Ok(counts.entry(layer).or_insert_with(|| vec![0; *n as usize]))
}

fn unknown_layer(layer: impl std::fmt::Display) -> String {
    format!(
        "it contains experts of layer {layer}, in which the model has no experts; pass a file of this model"
    )
}

fn unknown_expert(layer: LayerId, expert: impl std::fmt::Display) -> String {
    format!(
        "it contains expert {expert} of layer {layer}, which the model does not have; pass a file of this model"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_follows_coactivation() {
        let mut coactivation = Coactivation {
            counts: vec![5, 9, 4, 6],
            pairs: vec![0; 16],
        };
        for (a, b, n) in [(1, 2, 3), (2, 0, 2), (1, 3, 1)] {
            coactivation.pairs[a * 4 + b] = n;
            coactivation.pairs[b * 4 + a] = n;
        }
        assert_eq!(coactivation.chain(), [1, 2, 0, 3].map(ExpertId));
    }
}
