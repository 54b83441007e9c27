//! Cache sizes on the command line.

use std::str::FromStr;

use moe_placement::plan::{MIB, mib_to_bytes};

use crate::option_values::ValueError;

/// Maximum number of sizes in a range.
const MAX_RANGE: usize = 10_000;

/// One size, or the sizes of a range, in MiB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Budgets(Vec<u64>);

impl FromStr for Budgets {
    type Err = ValueError;

    /// Parses `A`, `A..B` (doubling) or `A..B+STEP`. The range includes B.
    fn from_str(text: &str) -> Result<Budgets, ValueError> {
        let expected = ValueError::Expected("integers of MiB: A, A..B or A..B+STEP");
        let number = |text: &str| text.trim().parse::<u64>().map_err(|_| expected.clone());
        let Some((from, to)) = text.split_once("..") else {
            return Ok(Budgets(vec![number(text)?]));
        };
        let (to, step) = match to.split_once('+') {
            Some((to, step)) => (to, Some(number(step)?)),
            None => (to, None),
        };
        let (from, to) = (number(from)?, number(to)?);
        if step == Some(0) {
            return Err(ValueError::ZeroStep);
        }
        if from > to || (step.is_none() && from == 0) {
            return Err(ValueError::BadRange);
        }
        let next = |mib: &u64| match step {
            Some(step) => mib.checked_add(step),
            None => mib.checked_mul(2),
        };
        let below = std::iter::successors(Some(from), next).take_while(|&mib| mib < to);
        let mut mib: Vec<u64> = below.take(MAX_RANGE).collect();
        if mib.len() == MAX_RANGE {
            return Err(ValueError::LongRange { limit: MAX_RANGE });
        }
        mib.push(to);
        Ok(Budgets(mib))
    }
}

/// Returns the distinct sizes in bytes, ascending. Without sizes, returns eighths of `total` bytes, rounded up to MiB.
pub fn bytes(named: &[Budgets], total: u64) -> Vec<u64> {
    let named = named.iter().flat_map(|Budgets(mib)| mib);
    let mut bytes: Vec<u64> = named.map(|&mib| mib_to_bytes(mib)).collect();
    if bytes.is_empty() {
        let mib = total.div_ceil(MIB);
        bytes = (1..=8u64)
            .map(|part| mib_to_bytes((u128::from(mib) * u128::from(part)).div_ceil(8) as u64))
            .collect();
    }
    bytes.sort_unstable();
    bytes.dedup();
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_double_or_step_and_include_both_ends() {
        let mib = |text: &str| text.parse().map(|Budgets(mib)| mib);
        assert_eq!(mib("250"), Ok(vec![250]));
        assert_eq!(mib("1000..8000"), Ok(vec![1000, 2000, 4000, 8000]));
        assert_eq!(mib("1000..5000"), Ok(vec![1000, 2000, 4000, 5000]));
        assert_eq!(mib("0..5+2"), Ok(vec![0, 2, 4, 5]));
        assert_eq!(mib("7..7"), Ok(vec![7]));
        for wrong in [
            "",
            "a",
            "8..4",
            "0..4",
            "1..4+0",
            "1..",
            "..4",
            "0..99999999+1",
        ] {
            assert!(mib(wrong).is_err(), "{wrong}");
        }
        assert_eq!(mib("1..18446744073709551615").unwrap().len(), 65);
    }

    #[test]
    fn defaults_to_eighths_of_all_experts() {
        let named = [Budgets(vec![2, 1]), Budgets(vec![2])];
        assert_eq!(bytes(&named, 0), [MIB, 2 * MIB]);
        assert_eq!(
            bytes(&[], 16 * MIB),
            [2, 4, 6, 8, 10, 12, 14, 16].map(mib_to_bytes)
        );
        assert_eq!(bytes(&[], 1), [MIB]);
    }
}
