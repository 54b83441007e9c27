//! The value of a budget option: a number of MiB or `auto`, and the arithmetic of automatic budgets.

use std::fmt;
use std::str::FromStr;

use moe_placement::plan::{MIB, auto_budget_bytes, mib_to_bytes};

use crate::option_values::{ValueError, number};

/// MiB that the fork leaves free on the GPU of the first lane, and on the GPUs of the other lanes.
const RESERVE_MIB: [f64; 2] = [1024.0, 512.0];

/// Largest budget in MiB.
const MAX_MIB: u64 = 1_000_000_000_000;

/// The budget of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneBudget {
    /// A number of MiB; 0 keeps the lane empty.
    Mib(u64),
    /// The free memory of the lane's device, without the memory of the model, its context, and a reserve.
    Auto,
}

impl FromStr for LaneBudget {
    type Err = ValueError;

    /// Parses a number, or `auto`, which is -1 in the fork.
    fn from_str(text: &str) -> Result<LaneBudget, ValueError> {
        match text {
            "auto" | "-1" => Ok(LaneBudget::Auto),
            _ => {
                let expected = "an integer number of MiB from 0 to 1e12, or auto";
                number(text, expected, |&mib| mib <= MAX_MIB).map(LaneBudget::Mib)
            }
        }
    }
}

impl LaneBudget {
    /// Returns the bytes of a number; `None` for [`LaneBudget::Auto`].
    pub fn fixed_bytes(self) -> Option<u64> {
        match self {
            LaneBudget::Mib(mib) => Some(mib_to_bytes(mib)),
            LaneBudget::Auto => None,
        }
    }
}

/// Parses a size in MiB.
pub fn mib(text: &str) -> Result<f64, ValueError> {
    number(text, "a number of MiB from 0 to 1e12", |value| {
        (0.0..=1e12).contains(value)
    })
}

/// Returns the bytes of a size that [`mib`] has parsed.
pub fn bytes_of_mib(mib: f64) -> u64 {
    (mib * MIB as f64) as u64
}

/// What an automatic budget is computed from. Its text is a note for the user.
#[derive(Debug, Clone, Copy)]
pub struct AutoBudget {
    lane: usize,
    free: u64,
    needed: u64,
    reserve: u64,
}

impl AutoBudget {
    /// The budget of lane number `lane`. `free` is the free memory of its device, `needed` the memory that the model and its context
    /// will allocate there, both in bytes. `reserve_mib` remains free; the default is 1024 MiB for the first lane, 512 MiB for others.
    pub fn new(lane: usize, free: u64, needed: u64, reserve_mib: Option<f64>) -> AutoBudget {
        AutoBudget {
            lane,
            free,
            needed,
            reserve: bytes_of_mib(reserve_mib.unwrap_or(RESERVE_MIB[lane.min(1)])),
        }
    }

    /// The budget in bytes, a multiple of 1 MiB.
    pub fn bytes(&self) -> u64 {
        auto_budget_bytes(self.free, self.needed, self.reserve)
    }
}

impl fmt::Display for AutoBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // With at most two decimals.
        let mib = |bytes: u64| (bytes as f64 / MIB as f64 * 100.0).round() / 100.0;
        write!(
            f,
            "lane {}: budget {} MiB ({} MiB free - {} MiB model and context - {} MiB reserve)",
            self.lane,
            self.bytes() / MIB,
            mib(self.free),
            mib(self.needed),
            mib(self.reserve)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_integer_mib_or_auto() {
        assert_eq!("auto".parse(), Ok(LaneBudget::Auto));
        assert_eq!("-1".parse(), Ok(LaneBudget::Auto));
        assert_eq!("0".parse(), Ok(LaneBudget::Mib(0)));
        for text in ["1.5", "-2", "", "1000000000001"] {
            assert!(text.parse::<LaneBudget>().is_err(), "{text}");
        }
    }

    #[test]
    fn automatic_budget_leaves_the_reserve_free() {
        let (free, needed) = (4096 * MIB + MIB / 2, 1024 * MIB);
        let auto = |lane, reserve| AutoBudget::new(lane, free, needed, reserve).bytes();
        assert_eq!(auto(0, Some(512.0)), 2560 * MIB);
        assert_eq!(auto(0, None), 2048 * MIB);
        assert_eq!(auto(2, None), 2560 * MIB);
        let text = AutoBudget::new(1, free, needed, None).to_string();
        assert_eq!(
            text,
            "lane 1: budget 2560 MiB (4096.5 MiB free - 1024 MiB model and context - 512 MiB reserve)"
        );
    }
}
