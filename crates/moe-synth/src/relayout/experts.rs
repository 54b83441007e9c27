//! Which expert comes to which place, and which parts of a tensor move with it.

use std::collections::BTreeMap;

use moe_gguf::map::n_stacked;
use moe_gguf::names::{Category, Role, is_chunked, split_layer};
use moe_gguf::text::counted;
use moe_gguf::{ExpertId, GgmlType, Gguf, LayerId, Tensor};

use super::Error;

/// For each layer whose experts move, the present number of the expert that comes to each place:
/// `[3, 0, 1, 2]` puts expert 3 first. Layers that are not there stay as they are.
pub type ExpertOrders = BTreeMap<LayerId, Vec<ExpertId>>;

/// Experts of each layer that has any, counted by their weights.
///
/// A count never exceeds what the header has room for, whatever the names and shapes in it say.
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
            None => n_stacked(tensor),
        };
        if let Some(n) = n.and_then(|n| u32::try_from(n).ok()) {
            let count = counts.entry(layer).or_insert(0);
            *count = n.max(*count);
        }
    }
    counts
}

/// Checks that every order names each expert of its layer once, and keeps groups whole where the
/// router chooses groups first (`expert_group_count`).
pub(super) fn check(gguf: &Gguf, orders: &ExpertOrders) -> Result<(), Error> {
    let (counts, n_group) = (n_experts(gguf), n_groups(gguf)?);
    for (&layer, order) in orders {
        let Some(&n_expert) = counts.get(&layer) else {
            return Err(Error::NoExperts { layer });
        };
        let problem = |problem: String| Error::NotAnOrder { layer, problem };
        if order.len() as u64 != u64::from(n_expert) {
            return Err(problem(format!(
                "it names {}, the layer has {n_expert}",
                counted(order.len(), "expert")
            )));
        }
        let mut seen = vec![false; order.len()];
        for &expert in order {
            match seen.get_mut(expert.index()) {
                Some(seen) if !*seen => *seen = true,
                Some(_) => return Err(problem(format!("it names expert {expert} twice"))),
                None => {
                    return Err(problem(format!(
                        "it names expert {expert}, the layer has {n_expert}"
                    )));
                }
            }
        }
        if n_group > 1 && n_expert.is_multiple_of(n_group) {
            let size = n_expert / n_group;
            let whole = |group: &[ExpertId]| group.iter().all(|e| e.0 / size == group[0].0 / size);
            if !order.chunks(size as usize).all(whole) {
                return Err(Error::Groups { layer, n_group });
            }
        }
        if order.is_sorted() {
            continue; // nothing moves
        }
        let router = format!("blk.{layer}.ffn_gate_inp.weight");
        let router = gguf.tensor(&router).ok_or(Error::NoRouter { layer })?;
        if n_group > 1 && router.ne[1] != u64::from(n_expert) {
            return Err(Error::Immovable {
                tensor: router.name.clone(),
                problem: "the router selects among groups, and has more rows than experts",
            });
        }
    }
    Ok(())
}

/// Groups of experts among which the router selects first (`expert_group_count`); 1 where it does not.
///
/// # Errors
/// The model's keys are of another type than they should be, or the number of groups differs between layers.
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

/// The same order with groups kept whole: groups in the order of their first experts.
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

/// What a move of its layer's experts means for a tensor.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Share {
    /// It stays as it is.
    None,
    /// It belongs to one expert alone, whose number is in its name.
    One(ExpertId),
    /// It is so many slices of equal size, of which the first `n_expert` are the experts'.
    Slices(u32),
}

/// In which dimension a tensor of a layer with experts has one entry for each expert.
///
/// The name decides, as llama.cpp's converters write it: `ffn_gate_inp.scale` of gemma4 scales the router's input and
/// belongs to no expert, even in a model that is as wide as it has experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpertDim {
    /// Nothing in it belongs to an expert.
    None,
    /// Exactly one entry for each expert.
    Experts(usize),
    /// One entry for each output of the router: the experts first, then experts without weights (LongCat-Flash).
    Router(usize),
    /// It cannot move; why not.
    Immovable(&'static str),
}

fn expert_dim(tensor: &Tensor, role: &Role) -> ExpertDim {
    let (_, part) = split_layer(&tensor.name);
    let (stem, kind) = part.split_once('.').unwrap_or((part, ""));
    match (role.category, stem, kind) {
        (Category::Expert | Category::ExpertBias, ..) if is_chunked(&tensor.name) => {
            ExpertDim::Immovable("it holds chunks that belong to several experts each")
        }
        (Category::Expert, ..) => ExpertDim::Experts(2),
        (Category::ExpertBias, _, "bias") => ExpertDim::Experts(1),
        (Category::ExpertBias, _, "scale" | "input_scale") => ExpertDim::Experts(0),
        (Category::Router, "ffn_gate_inp", "weight" | "") => ExpertDim::Router(1),
        (Category::Router, "ffn_gate_inp", "bias") => ExpertDim::Router(0),
        (Category::Router, "ffn_gate_inp", "scale" | "input_scale") => ExpertDim::None,
        (Category::Router, "exp_probs_b" | "exp_probs_b_vl", _) => ExpertDim::Router(0),
        (Category::Router, "ffn_gate_tid2eid", _) => {
            ExpertDim::Immovable("it holds the numbers of experts")
        }
        // Arctic: of the input that all experts share.
        (_, "ffn_norm_exps", "weight") => ExpertDim::None,
        (Category::ExpertBias | Category::Router, ..) => UNKNOWN,
        _ if is_named_after_experts(stem, kind) => UNKNOWN,
        _ => ExpertDim::None,
    }
}

const UNKNOWN: ExpertDim =
    ExpertDim::Immovable("its name is not known, so that it may belong to experts or not");

/// Whether the name of a tensor that is not known mentions experts or their selection, or numbers what it is of.
fn is_named_after_experts(stem: &str, kind: &str) -> bool {
    const WORDS: [&str; 7] = [
        "exp", "exps", "chexps", "expert", "experts", "moe", "router",
    ];
    let is_numbered = || kind.split('.').any(|piece| piece.parse::<u32>().is_ok());
    stem.split('_').any(|word| WORDS.contains(&word)) || stem.starts_with("ffn_") && is_numbered()
}

/// Most outputs of a router.
const MAX_OUTPUTS: u64 = 1 << 16;

/// What a move of the `n_expert` experts of its layer means for a tensor.
pub(super) fn share(tensor: &Tensor, role: &Role, n_expert: u32) -> Result<Share, Error> {
    if let Some(expert) = role.expert_id {
        return Ok(Share::One(expert));
    }
    let immovable = |problem| {
        Err(Error::Immovable {
            tensor: tensor.name.clone(),
            problem,
        })
    };
    let (dim, is_router) = match expert_dim(tensor, role) {
        ExpertDim::None => return Ok(Share::None),
        ExpertDim::Immovable(problem) => return immovable(problem),
        ExpertDim::Experts(dim) => (dim, false),
        ExpertDim::Router(dim) => (dim, true),
    };
    let n = tensor.ne[dim];
    if tensor.ne[dim + 1..].iter().any(|&n| n != 1) {
        return immovable("it has more dimensions than such tensors have");
    }
    if n != u64::from(n_expert) && !is_router {
        return immovable("it does not have one slice for each expert of its layer");
    }
    if n < u64::from(n_expert) || n > MAX_OUTPUTS {
        return immovable(
            "it has fewer rows than its layer has experts, or more than a router has",
        );
    }
    match dim {
        0 if tensor.ty.block_size() > 1 => immovable("its blocks span several experts"),
        1 if interleaves_rows(tensor.ty) => immovable("its type interleaves the rows of experts"),
        // At most MAX_OUTPUTS, or the number of experts.
        _ => Ok(Share::Slices(n as u32)),
    }
}

/// Rows of a tensor that selects experts, one for each of them and maybe more; `None` for other tensors.
pub(super) fn router_rows(tensor: &Tensor) -> Option<u64> {
    match expert_dim(tensor, &Role::of(&tensor.name)) {
        ExpertDim::Router(dim) => Some(tensor.ne[dim]),
        _ => None,
    }
}

/// Whether the type is one of ik_llama.cpp's that store several rows in common blocks.
fn interleaves_rows(ty: GgmlType) -> bool {
    let rows = ty.name().rsplit_once("_R").map(|(_, rows)| rows);
    rows.is_some_and(|rows| rows.parse::<u32>().is_ok())
}

/// The place that each expert comes to.
pub(super) fn places(order: &[ExpertId]) -> Vec<ExpertId> {
    let mut places = vec![ExpertId(0); order.len()];
    for (place, &expert) in (0..).map(ExpertId).zip(order) {
        if let Some(slot) = places.get_mut(expert.index()) {
            *slot = place;
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_stay_whole() {
        // Groups of two; the hottest expert, 5, brings its group first.
        let ids = |ids: &[u32]| ids.iter().copied().map(ExpertId).collect::<Vec<_>>();
        let kept = |order: &[u32], n_group| keep_groups(&ids(order), n_group);
        assert_eq!(kept(&[5, 0, 4, 2, 1, 3], 3), ids(&[5, 4, 0, 1, 2, 3]));
        assert_eq!(kept(&[2, 0, 1], 1), ids(&[2, 0, 1]));
        assert_eq!(kept(&[], 4), []);
    }

    #[test]
    fn places_invert_an_order() {
        assert_eq!(
            places(&[3, 0, 1, 2].map(ExpertId)),
            [1, 2, 3, 0].map(ExpertId)
        );
    }

    #[test]
    fn only_row_groups_interleave() {
        assert!(interleaves_rows(GgmlType::IQ4_KS_R4) && interleaves_rows(GgmlType::BF16_R16));
        assert!(!interleaves_rows(GgmlType::Q4_K) && !interleaves_rows(GgmlType::F32));
    }
}
