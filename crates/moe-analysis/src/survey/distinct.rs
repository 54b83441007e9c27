//! Measured numbers of distinct experts in batches of consecutive tokens, for several batch sizes in one pass.

use moe_trace::ExpertId;

/// Number of batch sizes: 2⁰ to 2¹⁰ tokens.
const N_LENGTHS: usize = 11;
/// Batch sizes in tokens.
pub const BATCHES: [u64; N_LENGTHS] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
/// Index in `Distinct.new` for first uses; lower indices are bits of a token number.
const NEVER: usize = u64::BITS as usize;

/// Numbers of distinct experts in aligned blocks of [`BATCHES`] tokens of a layer, in the order of the trace.
///
/// An expert selected at token n and before that at token m is new in the block of 2ʲ tokens if n and m differ in a bit ≥ j. One
/// counter per highest differing bit therefore serves all block sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct Distinct {
    /// `[n_expert]`: token of the last selection plus 1; 0 if the expert has not been selected.
    last: Vec<u64>,
    /// Number of selections by the highest bit in which the token differs from the last selection's token.
    new: [u64; NEVER + 1],
    /// For each batch size: number of complete blocks, and sum of their distinct experts.
    whole: [(u64, u64); N_LENGTHS],
}

impl Default for Distinct {
    fn default() -> Self {
        Distinct {
            last: Vec::new(),
            new: [0; NEVER + 1],
            whole: [(0, 0); N_LENGTHS],
        }
    }
}

impl Distinct {
    /// Adds the experts of the next token; tokens count from 0.
    pub(super) fn add(&mut self, token: u64, experts: &[(ExpertId, f64)]) {
        for &(expert, _) in experts {
            let expert = expert.index();
            if self.last.len() <= expert {
                self.last.resize(expert + 1, 0);
            }
            let last = std::mem::replace(&mut self.last[expert], token + 1);
            match last.checked_sub(1) {
                None => self.new[NEVER] += 1,
                Some(last) if last == token => {}
                Some(last) => self.new[(last ^ token).ilog2() as usize] += 1,
            }
        }
        let n_whole = ((token + 1).trailing_zeros() as usize + 1).min(N_LENGTHS);
        for (length, whole) in self.whole[..n_whole].iter_mut().enumerate() {
            let distinct = self.new[length..].iter().sum();
            *whole = ((token + 1) >> length, distinct);
        }
    }

    /// Batch size and mean number of distinct experts, for each of [`BATCHES`] with at least one complete block.
    pub fn means(&self) -> impl Iterator<Item = (u64, f64)> {
        let batches = BATCHES.into_iter().zip(self.whole);
        let filled = batches.filter(|(_, (blocks, _))| *blocks > 0);
        filled.map(|(batch, (blocks, distinct))| (batch, distinct as f64 / blocks as f64))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn matches_counting_with_sets() {
        // Two of 23 experts per token.
        let tokens: Vec<[(ExpertId, f64); 2]> = (0..150u32)
            .map(|token| [token * token % 23, (token * token + 1 + token % 5) % 23])
            .map(|experts| experts.map(|expert| (ExpertId(expert), 0.0)))
            .collect();
        let mut distinct = Distinct::default();
        for (token, experts) in (0..).zip(&tokens) {
            distinct.add(token, experts);
        }
        let means: Vec<(u64, f64)> = distinct.means().collect();
        assert_eq!(means.len(), 8, "128 tokens fit in the trace, 256 do not");
        for (batch, mean) in means {
            let blocks = tokens.chunks_exact(batch as usize);
            let n = blocks.len();
            let sizes = blocks.map(|block| {
                let experts = block.iter().flatten().map(|(expert, _)| expert);
                experts.collect::<BTreeSet<_>>().len()
            });
            assert_eq!(mean, sizes.sum::<usize>() as f64 / n as f64, "{batch}");
        }
    }

    #[test]
    fn repeated_expert_of_a_token_counts_once() {
        let mut distinct = Distinct::default();
        distinct.add(0, &[1, 2].map(|expert| (ExpertId(expert), 0.0)));
        distinct.add(1, &[(ExpertId(3), 0.0); 2]);
        assert_eq!(distinct.means().next(), Some((1, 1.5)));
    }
}
