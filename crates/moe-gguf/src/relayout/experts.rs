//! Which expert comes to which place, and which parts of a tensor move with it.

use std::collections::BTreeMap;

use crate::gguf::{Gguf, Tensor};
use crate::map::n_stacked;
use crate::names::{Category, Role, is_chunked};
use crate::text::counted;
use crate::types::GgmlType;

use super::Error;

/// For each layer whose experts move, the present number of the expert that comes to each place:
/// `[3, 0, 1, 2]` puts expert 3 first. Layers that are not there stay as they are.
pub type ExpertOrders = BTreeMap<u16, Vec<u32>>;

/// Experts of each layer that has any, counted by their weights.
///
/// A count never exceeds what the header has room for, whatever the names and shapes in it say.
pub fn n_experts(gguf: &Gguf) -> BTreeMap<u16, u32> {
    let mut counts = BTreeMap::new();
    let n_tensors = gguf.tensors().len() as u64;
    for tensor in gguf.tensors() {
        let role = Role::of(&tensor.name);
        let Some(layer) = role.layer_id.filter(|_| role.category == Category::Expert) else {
            continue;
        };
        let n = match role.expert_id {
            Some(expert) => Some(u64::from(expert) + 1).filter(|&n| n <= n_tensors),
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
            match seen.get_mut(expert as usize) {
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
            let whole = |group: &[u32]| group.iter().all(|e| e / size == group[0] / size);
            if !order.chunks(size as usize).all(whole) {
                return Err(Error::Groups { layer, n_group });
            }
        }
    }
    Ok(())
}

/// Groups of experts among which the router chooses first (`expert_group_count`); 1 where it does not.
///
/// # Errors
/// The model's keys are of another type than they should be.
pub fn n_groups(gguf: &Gguf) -> Result<u32, crate::Error> {
    let arch = gguf.metadata().str("general.architecture")?.unwrap_or("");
    let n_group = gguf.metadata().u32(&format!("{arch}.expert_group_count"))?;
    Ok(n_group.unwrap_or(1).max(1))
}

/// The same order with groups kept whole: groups in the order of their first experts.
pub fn keep_groups(order: &[u32], n_group: u32) -> Vec<u32> {
    let size = (order.len() as u32)
        .checked_div(n_group)
        .unwrap_or(0)
        .max(1);
    let mut groups: Vec<u32> = Vec::new();
    for group in order.iter().map(|expert| expert / size) {
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    groups
        .iter()
        .flat_map(|group| order.iter().copied().filter(move |e| e / size == *group))
        .collect()
}

/// What a move of its layer's experts means for a tensor.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Share {
    /// It stays as it is.
    None,
    /// It belongs to one expert alone, whose number is in its name.
    One(u32),
    /// It is one slice an expert, one behind the other.
    All,
}

/// What a move of the `n_expert` experts of its layer means for a tensor.
pub(super) fn share(tensor: &Tensor, role: &Role, n_expert: u32) -> Result<Share, Error> {
    if let Some(expert) = role.expert_id {
        return Ok(Share::One(expert));
    }
    let of_experts = matches!(
        role.category,
        Category::Expert | Category::ExpertBias | Category::Router
    );
    if !of_experts {
        return Ok(Share::None);
    }
    let immovable = |problem| {
        Err(Error::Immovable {
            tensor: tensor.name.clone(),
            problem,
        })
    };
    if is_chunked(&tensor.name) {
        return immovable("it holds chunks that belong to several experts each");
    }
    if tensor.name.contains("tid2eid") {
        return immovable("it holds the numbers of experts");
    }
    let n_dims = (tensor.n_dims as usize).clamp(1, 4);
    if tensor.ne[n_dims - 1] != u64::from(n_expert) {
        // Of one router's tensors, such as a scale of its input, no part belongs to an expert.
        return match role.category {
            Category::Router => Ok(Share::None),
            _ => immovable("its last dimension is not the number of experts"),
        };
    }
    match n_dims {
        1 if tensor.ty.block_size() > 1 => immovable("its blocks span several experts"),
        2 if interleaves_rows(tensor.ty) => immovable("its type interleaves the rows of experts"),
        _ => Ok(Share::All),
    }
}

/// Whether the type is one of ik_llama.cpp's that store several rows in common blocks.
fn interleaves_rows(ty: GgmlType) -> bool {
    let rows = ty.name().rsplit_once("_R").map(|(_, rows)| rows);
    rows.is_some_and(|rows| rows.parse::<u32>().is_ok())
}

/// The place that each expert comes to.
pub(super) fn places(order: &[u32]) -> Vec<u32> {
    let mut places = vec![0; order.len()];
    for (place, &expert) in (0u32..).zip(order) {
        if let Some(slot) = places.get_mut(expert as usize) {
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
        assert_eq!(keep_groups(&[5, 0, 4, 2, 1, 3], 3), [5, 4, 0, 1, 2, 3]);
        assert_eq!(keep_groups(&[2, 0, 1], 1), [2, 0, 1]);
        assert_eq!(keep_groups(&[], 4), [0; 0]);
    }

    #[test]
    fn places_invert_an_order() {
        assert_eq!(places(&[3, 0, 1, 2]), [1, 2, 3, 0]);
    }

    #[test]
    fn only_row_groups_interleave() {
        assert!(interleaves_rows(GgmlType::IQ4_KS_R4) && interleaves_rows(GgmlType::BF16_R16));
        assert!(!interleaves_rows(GgmlType::Q4_K) && !interleaves_rows(GgmlType::F32));
    }
}
