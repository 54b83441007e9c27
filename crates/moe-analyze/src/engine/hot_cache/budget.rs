//! The budget of a lane: a number, or the free memory of its device.

use std::str::FromStr;

use moe_placement::plan::{MIB, auto_budget_bytes, mib_to_bytes};

use crate::option_values::{ValueError, number};

/// MiB that a lane leaves free by default: the first lane, and other lanes.
const RESERVE_MIB: [u64; 2] = [1024, 512];

/// The budget of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneBudget {
    /// A number of MiB; 0 keeps the lane empty.
    Mib(u64),
    /// The free memory of the lane's device minus a reserve.
    Auto,
}

impl FromStr for LaneBudget {
    type Err = ValueError;

    /// Parses a number, or `auto`, which is -1 in the fork.
    fn from_str(text: &str) -> Result<LaneBudget, ValueError> {
        match text {
            "auto" | "-1" => Ok(LaneBudget::Auto),
            _ => number(text, "an integer number of MiB, or auto", |_| true).map(LaneBudget::Mib),
        }
    }
}

impl LaneBudget {
    /// The budget of lane number `lane` in bytes. `free` is the free memory of its device, `needed` the memory that the model and
    /// its KV cache will allocate there, both in bytes.
    pub fn bytes(self, lane: usize, reserve_mib: Option<u64>, free: u64, needed: u64) -> u64 {
        match self {
            LaneBudget::Mib(mib) => mib_to_bytes(mib),
            LaneBudget::Auto => {
                let reserve = reserve_mib.unwrap_or(RESERVE_MIB[lane.min(1)]);
                auto_budget_bytes(free, needed, reserve.saturating_mul(MIB))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_mib_or_auto() {
        assert_eq!("auto".parse(), Ok(LaneBudget::Auto));
        assert_eq!("-1".parse(), Ok(LaneBudget::Auto));
        assert_eq!("0".parse(), Ok(LaneBudget::Mib(0)));
        for text in ["1.5", "-2", ""] {
            assert!(text.parse::<LaneBudget>().is_err(), "{text}");
        }
    }

    #[test]
    fn automatic_budget_leaves_the_reserve_free() {
        let (free, needed) = (4096 * MIB + MIB / 2, 1024 * MIB);
        let auto = |lane, reserve| LaneBudget::Auto.bytes(lane, reserve, free, needed);
        assert_eq!(auto(0, Some(512)), 2560 * MIB);
        assert_eq!(auto(0, None), 2048 * MIB);
        assert_eq!(auto(2, None), 2560 * MIB);
        assert_eq!(LaneBudget::Mib(3).bytes(0, None, 0, 0), 3 * MIB);
    }
}
