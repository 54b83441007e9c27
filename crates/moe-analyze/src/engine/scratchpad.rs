//! Whether a scratchpad of a size that was asked for has room for what a token needs.

use moe_executor::Model;
use moe_executor::cuda::post_fetch::Settings;

use crate::output::human_bytes;

/// What to say of a scratchpad that does not hold the down matrices of the experts that a token has in the model's largest
/// layer; none if it does, or if nothing is to travel.
pub fn too_small(model: &Model, settings: &Settings) -> Option<String> {
    let (hp, works) = (model.hparams(), settings.enable && !settings.force_cpu);
    let bytes = settings.scratchpad_bytes.filter(|_| works)? as u64;
    let tensors = model.gguf().tensors().iter();
    let stacks = tensors.filter(|tensor| tensor.name.ends_with(".ffn_down_exps.weight"));
    let largest = stacks.map(|stack| stack.size_bytes / (hp.n_expert as u64).max(1));
    let wanted = hp.n_expert_used.min(settings.max_transfers) as u64;
    verdict(bytes, largest.max()?, wanted)
}

/// As [`too_small`], for `wanted` matrices of `matrix` bytes.
fn verdict(bytes: u64, matrix: u64, wanted: u64) -> Option<String> {
    let room = bytes / matrix.max(1);
    if room >= wanted {
        return None;
    }
    let needed = (wanted * matrix).div_ceil(1 << 20);
    Some(format!(
        "the scratchpad of {} has room for {room} of the down matrices of a token's {wanted} experts in a layer, of {} each: the \
         processor computes the others; give --postfetch-scratchpad-mb {needed}, or 0 for what they need",
        human_bytes(bytes),
        human_bytes(matrix)
    ))
}

#[cfg(test)]
mod tests {
    use super::verdict;

    #[test]
    fn one_that_holds_all_is_passed_over() {
        assert_eq!(verdict(4 << 20, 1 << 20, 4), None);
        assert_eq!(verdict(1 << 20, 17_408, 4), None);
    }

    #[test]
    fn prints_a_size_that_would_fit() {
        let some = verdict((4 << 20) - 1, 1 << 20, 4).unwrap();
        assert!(
            some.contains("room for 3 of the down matrices of a token's 4 experts"),
            "{some}"
        );
        assert!(some.contains("--postfetch-scratchpad-mb 4,"), "{some}");
        let none = verdict(1 << 20, (17 << 20) + 1, 4).unwrap();
        assert!(none.contains("room for 0 of"), "{none}");
        assert!(none.contains("--postfetch-scratchpad-mb 69,"), "{none}");
    }
}
