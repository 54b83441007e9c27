//! The order of experts, and the parts of each tensor that move with them.

use std::collections::BTreeMap;

use moe_gguf::names::{Category, Role, is_chunked, split_layer};
use moe_gguf::{ExpertId, GgmlType, Gguf, LayerId, Tensor};

use super::error::{Error, ImmovableReason, OrderFault};

/// For each layer to permute, the old ids of its experts in the new order: `[3, 0, 1, 2]` moves expert 3 to the first position.
///
/// Layers without an entry are unchanged.
pub type ExpertOrders = BTreeMap<LayerId, Vec<ExpertId>>;

/// Returns the number of experts of each layer with experts, counted by their weights.
///
/// Names and shapes are not trusted: a count from names of single experts is at most the number of tensors.
pub fn n_experts(gguf: &Gguf) -> BTreeMap<LayerId, u32> {
    let mut counts = BTreeMap::new();
    let n_tensors = gguf.tensors().len() as u64;
    for tensor in gguf.tensors() {
        let role = Role::of(&tensor.name);
        let Some(layer) = role.layer_id.filter(|_| role.category == Category::Expert) else {
            continue;
        };
        let n = match role.expert_id {
            Some(expert) => Some(u64::from(expert.0) + 1).filter(|&n| n <= n_tensors),
            None if is_chunked(&tensor.name) => None,
            None => tensor.n_stacked(),
        };
        if let Some(n) = n.and_then(|n| u32::try_from(n).ok()) {
            let count = counts.entry(layer).or_insert(0);
            *count = n.max(*count);
        }
    }
    counts
}

/// Checks that each order is a permutation of the experts of its layer, and preserves groups if the router selects groups
/// first (`expert_group_count`).
pub(super) fn check(gguf: &Gguf, orders: &ExpertOrders) -> Result<(), Error> {
    let (counts, n_group) = (n_experts(gguf), n_groups(gguf)?);
    for (&layer, order) in orders {
        let Some(&n_expert) = counts.get(&layer) else {
            return Err(Error::NoExperts { layer });
        };
        let invalid = |fault| Error::InvalidOrder {
            layer,
            n_expert,
            fault,
        };
        if order.len() as u64 != u64::from(n_expert) {
            let found = order.len();
            return Err(invalid(OrderFault::Length { found, n_expert }));
        }
        let mut seen = vec![false; order.len()];
        for &expert in order {
            match seen.get_mut(expert.index()) {
                Some(seen) if !*seen => *seen = true,
                Some(_) => return Err(invalid(OrderFault::Repeated { expert })),
                None => return Err(invalid(OrderFault::OutOfRange { expert, n_expert })),
            }
        }
        if n_group > 1 && n_expert.is_multiple_of(n_group) {
            let size = n_expert / n_group;
            let is_group =
                |chunk: &[ExpertId]| chunk.iter().all(|e| e.0 / size == chunk[0].0 / size);
            if !order.chunks(size as usize).all(is_group) {
                return Err(Error::Groups { layer, n_group });
            }
        }
        if order.is_sorted() {
            continue; // No expert moves.
        }
        let router = format!("blk.{layer}.ffn_gate_inp.weight");
        let router = gguf.tensor(&router).ok_or(Error::NoRouter { layer })?;
        if n_group > 1 && router.ne[1] != u64::from(n_expert) {
            return Err(Error::Immovable {
                tensor: router.name.clone(),
                reason: ImmovableReason::GroupedRouter,
            });
        }
    }
    Ok(())
}

/// Returns the number of expert groups from which the router selects first (`expert_group_count`), or 1 without groups.
///
/// # Errors
/// A key of the model has another type; the number of groups differs between layers.
pub fn n_groups(gguf: &Gguf) -> Result<u32, Error> {
    let arch = gguf.metadata().str("general.architecture")?.unwrap_or("");
    let key = format!("{arch}.expert_group_count");
    let Some(values) = gguf.metadata().per_layer(&key)? else {
        return Ok(1);
    };
    let n_group = values.uniform().and_then(|n| u32::try_from(n).ok());
    let n_group = n_group.ok_or_else(|| Error::GroupCount {
        key,
        values: values.to_string(),
    })?;
    Ok(n_group.max(1))
}

/// Returns the order with the experts of each group next to each other. Groups are ordered by their first expert.
pub fn keep_groups(order: &[ExpertId], n_group: u32) -> Vec<ExpertId> {
    let size = (order.len() as u32)
        .checked_div(n_group)
        .unwrap_or(0)
        .max(1);
    let mut groups: Vec<u32> = Vec::new();
    for group in order.iter().map(|expert| expert.0 / size) {
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    groups
        .iter()
        .flat_map(|group| order.iter().copied().filter(move |e| e.0 / size == *group))
        .collect()
}

/// The parts of a tensor that belong to experts of its layer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Share {
    /// No part belongs to an expert.
    None,
    /// The tensor belongs to one expert, whose id is in its name.
    One(ExpertId),
    /// The tensor has this number of slices of equal size. The first `n_expert` belong to experts.
    Slices(u32),
}

/// The dimension of a tensor in which each expert has an entry.
///
/// The name decides, by the convention of llama.cpp's converters, and not the shape: `ffn_gate_inp.scale` of gemma4 scales the
/// input of the router, also in a model with `n_embd == n_expert`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpertDim {
    /// No entry belongs to an expert.
    None,
    /// This dimension has exactly one entry for each expert.
    Experts(usize),
    /// This dimension has one entry for each output of the router: experts first, then experts without weights (LongCat-Flash).
    Router(usize),
    /// The tensor cannot be permuted.
    Immovable(ImmovableReason),
}

fn expert_dim(tensor: &Tensor, role: &Role) -> ExpertDim {
    let (_, part) = split_layer(&tensor.name);
    let (stem, kind) = part.split_once('.').unwrap_or((part, ""));
    match (role.category, stem, kind) {
        (Category::Expert | Category::ExpertBias, ..) if is_chunked(&tensor.name) => {
            ExpertDim::Immovable(ImmovableReason::ChunkExperts)
        }
        (Category::Expert, ..) => ExpertDim::Experts(2),
        (Category::ExpertBias, _, "bias") => ExpertDim::Experts(1),
        (Category::ExpertBias, _, "scale" | "input_scale") => ExpertDim::Experts(0),
        (Category::Router, "ffn_gate_inp", "weight" | "") => ExpertDim::Router(1),
        (Category::Router, "ffn_gate_inp", "bias") => ExpertDim::Router(0),
        (Category::Router, "ffn_gate_inp", "scale" | "input_scale") => ExpertDim::None,
        (Category::Router, "exp_probs_b" | "exp_probs_b_vl", _) => ExpertDim::Router(0),
        (Category::Router, "ffn_gate_tid2eid", _) => {
            ExpertDim::Immovable(ImmovableReason::ExpertIds)
        }
        // Arctic: a norm of the common input of all experts.
        (_, "ffn_norm_exps", "weight") => ExpertDim::None,
        (Category::ExpertBias | Category::Router, ..) => UNKNOWN,
        _ if is_named_after_experts(stem, kind) => UNKNOWN,
        _ => ExpertDim::None,
    }
}

const UNKNOWN: ExpertDim = ExpertDim::Immovable(ImmovableReason::UnknownName);

/// Whether an unknown name contains a word for experts or routers, or a number.
fn is_named_after_experts(stem: &str, kind: &str) -> bool {
    const WORDS: [&str; 7] = [
        "exp", "exps", "chexps", "expert", "experts", "moe", "router",
    ];
    let is_numbered = || kind.split('.').any(|piece| piece.parse::<u32>().is_ok());
    stem.split('_').any(|word| WORDS.contains(&word)) || stem.starts_with("ffn_") && is_numbered()
}

/// Maximum number of outputs of a router.
const MAX_OUTPUTS: u64 = 1 << 16;

/// Returns the parts of a tensor that belong to the `n_expert` experts of its layer.
pub(super) fn share(tensor: &Tensor, role: &Role, n_expert: u32) -> Result<Share, Error> {
    if let Some(expert) = role.expert_id {
        return Ok(Share::One(expert));
    }
    let immovable = |reason| {
        Err(Error::Immovable {
            tensor: tensor.name.clone(),
            reason,
        })
    };
    let (dim, is_router) = match expert_dim(tensor, role) {
        ExpertDim::None => return Ok(Share::None),
        ExpertDim::Immovable(reason) => return immovable(reason),
        ExpertDim::Experts(dim) => (dim, false),
        ExpertDim::Router(dim) => (dim, true),
    };
    let n = tensor.ne[dim];
    if tensor.ne[dim + 1..].iter().any(|&n| n != 1) {
        return immovable(ImmovableReason::Dimensions);
    }
    if n != u64::from(n_expert) && !is_router {
        return immovable(ImmovableReason::SliceCount);
    }
    if n < u64::from(n_expert) || n > MAX_OUTPUTS {
        return immovable(ImmovableReason::RouterRows);
    }
    match dim {
        0 if tensor.ty.block_size() > 1 => immovable(ImmovableReason::SharedBlocks),
        1 if interleaves_rows(tensor.ty) => immovable(ImmovableReason::InterleavedRows),
        // The cast is exact: `n` is at most MAX_OUTPUTS or equal to `n_expert`.
        _ => Ok(Share::Slices(n as u32)),
    }
}

/// Returns the number of rows of a router or of its biases, or `None` for other tensors.
pub(super) fn router_rows(tensor: &Tensor) -> Option<u64> {
    match expert_dim(tensor, &Role::of(&tensor.name)) {
        ExpertDim::Router(dim) => Some(tensor.ne[dim]),
        _ => None,
    }
}

/// Whether blocks of the type contain several rows: the interleaved types of ik_llama.cpp.
fn interleaves_rows(ty: GgmlType) -> bool {
    let rows = ty.name().rsplit_once("_R").map(|(_, rows)| rows);
    rows.is_some_and(|rows| rows.parse::<u32>().is_ok())
}

/// Returns the new id of each expert: the inverse permutation.
pub(super) fn new_ids(order: &[ExpertId]) -> Vec<ExpertId> {
    let mut new_ids = vec![ExpertId(0); order.len()];
    for (new_id, &expert) in (0..).map(ExpertId).zip(order) {
        if let Some(id) = new_ids.get_mut(expert.index()) {
            *id = new_id;
        }
    }
    new_ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keep_groups_orders_groups_by_their_first_expert() {
        // Groups of two. Expert 5 is first, so its group is first.
        let ids = |ids: &[u32]| ids.iter().copied().map(ExpertId).collect::<Vec<_>>();
        let kept = |order: &[u32], n_group| keep_groups(&ids(order), n_group);
        assert_eq!(kept(&[5, 0, 4, 2, 1, 3], 3), ids(&[5, 4, 0, 1, 2, 3]));
        assert_eq!(kept(&[2, 0, 1], 1), ids(&[2, 0, 1]));
        assert_eq!(kept(&[], 4), []);
    }

    #[test]
    fn new_ids_invert_an_order() {
        assert_eq!(
            new_ids(&[3, 0, 1, 2].map(ExpertId)),
            [1, 2, 3, 0].map(ExpertId)
        );
    }

    #[test]
    fn recognizes_types_with_interleaved_rows() {
        assert!(interleaves_rows(GgmlType::IQ4_KS_R4) && interleaves_rows(GgmlType::BF16_R16));
        assert!(!interleaves_rows(GgmlType::Q4_K) && !interleaves_rows(GgmlType::F32));
    }
}
