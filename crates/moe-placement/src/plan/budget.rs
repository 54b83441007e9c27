//! Memory budgets of lanes.

/// Bytes per MiB.
pub const MIB: u64 = 1 << 20;

/// Converts MiB to bytes; saturates.
pub fn mib_to_bytes(mib: u64) -> u64 {
    mib.saturating_mul(MIB)
}

/// Automatic budget of the fork in bytes: free GPU memory minus KV cache minus reserve. Rounded down to MiB, at least 0.
pub fn auto_budget_bytes(free_bytes: u64, kv_bytes: u64, reserve_bytes: u64) -> u64 {
    let left = free_bytes.saturating_sub(kv_bytes.saturating_add(reserve_bytes));
    left / MIB * MIB
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_published_vector() {
        let free = 4096 * MIB + MIB / 2;
        assert_eq!(auto_budget_bytes(free, 1024 * MIB, 512 * MIB), 2560 * MIB);
    }

    #[test]
    fn is_zero_if_nothing_is_left() {
        assert_eq!(auto_budget_bytes(1536 * MIB, 1024 * MIB, 512 * MIB), 0);
        assert_eq!(auto_budget_bytes(1537 * MIB - 1, 1024 * MIB, 512 * MIB), 0);
        assert_eq!(auto_budget_bytes(5, u64::MAX, u64::MAX), 0);
        assert_eq!(mib_to_bytes(u64::MAX), u64::MAX);
    }
}
