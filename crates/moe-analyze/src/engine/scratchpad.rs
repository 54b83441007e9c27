//! Checks whether the scratchpad of `--postfetch-scratchpad-mb` is large enough for a token.

use moe_executor::Model;
use moe_executor::cuda::post_fetch::Settings;

use crate::output::human_bytes;

/// Returns a warning if the scratchpad is too small for the down matrices of a token's experts in the model's largest layer. Returns
/// `None` if it is large enough, or if nothing is copied.
pub fn too_small(model: &Model, settings: &Settings) -> Option<String> {
    let hp = model.hparams();
    let copies = settings.enable && !settings.force_cpu;
    let bytes = settings.scratchpad_bytes.filter(|_| copies)? as u64;
    let tensors = model.gguf().tensors().iter();
    let stacks = tensors.filter(|tensor| tensor.name.ends_with(".ffn_down_exps.weight"));
    let largest = stacks.map(|stack| stack.size_bytes / (hp.n_expert as u64).max(1));
    let wanted = hp.n_expert_used.min(settings.max_transfers) as u64;
    warning(bytes, largest.max()?, wanted)
}

/// Like [`too_small`], for `wanted` matrices of `matrix` bytes.
fn warning(bytes: u64, matrix: u64, wanted: u64) -> Option<String> {
    let room = bytes / matrix.max(1);
    if room >= wanted {
        return None;
    }
    let needed = (wanted * matrix).div_ceil(1 << 20);
    Some(format!(
        "warning: the scratchpad of {} is too small: {room} of a token's {wanted} down matrices in a layer fit, {} each, and \
         the CPU computes the other experts; pass --postfetch-scratchpad-mb {needed}, or 0 for the size that they need",
        human_bytes(bytes),
        human_bytes(matrix)
    ))
}

#[cfg(test)]
mod tests {
    use super::warning;

    #[test]
    fn accepts_a_scratchpad_that_is_large_enough() {
        assert_eq!(warning(4 << 20, 1 << 20, 4), None);
        assert_eq!(warning(1 << 20, 17_408, 4), None);
    }

    #[test]
    fn suggests_a_size_that_is_large_enough() {
        let some = warning((4 << 20) - 1, 1 << 20, 4).unwrap();
        assert!(some.contains("3 of a token's 4 down matrices"), "{some}");
        assert!(some.contains("--postfetch-scratchpad-mb 4,"), "{some}");
        let none = warning(1 << 20, (17 << 20) + 1, 4).unwrap();
        assert!(none.contains(": 0 of"), "{none}");
        assert!(none.contains("--postfetch-scratchpad-mb 69,"), "{none}");
    }
}
