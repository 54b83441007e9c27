//! How many bytes a lane may take.

/// Bytes of a MiB.
pub const MIB: u64 = 1 << 20;

/// A number of MiB in bytes; saturates.
pub fn mib_to_bytes(mib: u64) -> u64 {
    mib.saturating_mul(MIB)
}

/// What the runtime takes when it is left to choose: what is free less the keys and values of the context and a reserve, in
/// whole MiB; 0 where that is nothing.
pub fn auto_budget_bytes(free_bytes: u64, kv_bytes: u64, reserve_bytes: u64) -> u64 {
    let left = free_bytes.saturating_sub(kv_bytes.saturating_add(reserve_bytes));
    left / MIB * MIB
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_vector() {
        let free = 4096 * MIB + MIB / 2;
        assert_eq!(auto_budget_bytes(free, 1024 * MIB, 512 * MIB), 2560 * MIB);
    }

    #[test]
    fn nothing_is_left() {
        assert_eq!(auto_budget_bytes(1536 * MIB, 1024 * MIB, 512 * MIB), 0);
        assert_eq!(auto_budget_bytes(1537 * MIB - 1, 1024 * MIB, 512 * MIB), 0);
        assert_eq!(auto_budget_bytes(5, u64::MAX, u64::MAX), 0);
        assert_eq!(mib_to_bytes(u64::MAX), u64::MAX);
    }
}
