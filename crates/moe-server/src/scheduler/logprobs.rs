//! Log probabilities of tokens.

use crate::generation::TokenProbability;

/// The log-softmax of a row of logits.
pub(super) struct LogSoftmax<'a> {
    logits: &'a [f32],
    /// Logarithm of the sum of the exponentials of all logits.
    log_sum: f64,
}

impl<'a> LogSoftmax<'a> {
    pub fn new(logits: &'a [f32]) -> LogSoftmax<'a> {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let max = f64::from(max);
        let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
        LogSoftmax {
            logits,
            log_sum: max + sum.ln(),
        }
    }

    /// The natural logarithm of the probability of a token; negative infinity for a token outside the vocabulary.
    pub fn of(&self, token: u32) -> f32 {
        let logit = self.logits.get(token as usize);
        logit.map_or(f32::NEG_INFINITY, |&logit| {
            (f64::from(logit) - self.log_sum) as f32
        })
    }

    /// The `n` most probable tokens, best first. Tokens of the same probability are ordered by id.
    pub fn top(&self, n: usize) -> Vec<TokenProbability> {
        let order = |a: &u32, b: &u32| {
            let [x, y] = [a, b].map(|&token| self.logits[token as usize]);
            y.total_cmp(&x).then(a.cmp(b))
        };
        let mut tokens: Vec<u32> = (0u32..).take(self.logits.len()).collect();
        if n < tokens.len() {
            tokens.select_nth_unstable_by(n, order);
            tokens.truncate(n);
        }
        tokens.sort_unstable_by(order);
        let probability = |token| TokenProbability {
            token,
            logprob: self.of(token),
        };
        tokens.into_iter().map(probability).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logits `ln(1), ln(2), ln(1), ln(4)` have the probabilities 1/8, 2/8, 1/8 and 4/8.
    #[test]
    fn probabilities_are_those_of_a_softmax() {
        let logits = [1.0f32, 2.0, 1.0, 4.0].map(|x| x.ln() + 50.0);
        let softmax = LogSoftmax::new(&logits);
        for (token, p) in [(0, 0.125f32), (1, 0.25), (3, 0.5)] {
            assert!((softmax.of(token) - p.ln()).abs() < 1e-5, "{token}");
        }
        assert_eq!(softmax.of(4), f32::NEG_INFINITY);
        let tokens = |n| -> Vec<u32> { softmax.top(n).iter().map(|top| top.token).collect() };
        assert!(tokens(0).is_empty());
        assert_eq!(tokens(3), [3, 1, 0]);
        assert_eq!(tokens(9), [3, 1, 0, 2]);
    }
}
