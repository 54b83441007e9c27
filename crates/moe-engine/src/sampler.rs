//! Sampling of the next token from logits.
//!
//! The filters run in llama.cpp's default order: top-k, top-p, min-p, temperature; then a random draw.
//! The filters keep the same candidates as llama.cpp. The random generator differs (SplitMix64): a
//! seed yields the same tokens on every machine, but not the same tokens as in llama.cpp.

use std::cmp::Ordering;

use crate::random::SplitMix64;

/// Sampling parameters. The default is greedy sampling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerParams {
    /// Divisor of the logits before the draw. 0 or less: greedy, the highest logit.
    pub temperature: f32,
    /// Keep the `top_k` highest logits only; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of most probable tokens whose probabilities (before the temperature) sum
    /// to at least `top_p`; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens that are at least `min_p` times as probable as the best; 0 keeps all.
    pub min_p: f32,
    /// Random seed.
    pub seed: u64,
}

impl Default for SamplerParams {
    fn default() -> SamplerParams {
        SamplerParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
        }
    }
}

/// Samples a token with each call. The buffer of candidates is reused.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplerParams,
    random: SplitMix64,
    candidates: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    logit: f32,
}

impl Candidate {
    /// Orders by descending logit, then ascending id. No logit is NaN.
    fn order(&self, other: &Candidate) -> Ordering {
        other
            .logit
            .total_cmp(&self.logit)
            .then(self.id.cmp(&other.id))
    }
}

impl Sampler {
    /// A sampler at the start of its random sequence.
    pub fn new(params: SamplerParams) -> Sampler {
        Sampler {
            params,
            random: SplitMix64::new(params.seed),
            candidates: Vec::new(),
        }
    }

    /// Returns the id of the sampled token. `logits` has one value for each token of the vocabulary.
    /// NaN is never selected. If all values are NaN, the result is 0.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        if self.params.temperature > 0.0 {
            self.draw(logits)
        } else {
            greedy(logits)
        }
    }

    fn draw(&mut self, logits: &[f32]) -> u32 {
        let params = self.params;
        let candidates = &mut self.candidates;
        candidates.clear();
        candidates.extend(
            (0u32..)
                .zip(logits)
                .filter(|(_, logit)| !logit.is_nan())
                // Adding zero makes -0 equal to 0 in the total order.
                .map(|(id, logit)| Candidate {
                    id,
                    logit: logit + 0.0,
                }),
        );
        if params.top_k > 0 && params.top_k < candidates.len() {
            candidates.select_nth_unstable_by(params.top_k, Candidate::order);
            candidates.truncate(params.top_k);
        }
        candidates.sort_unstable_by(Candidate::order);
        let Some(best) = candidates.first().map(|c| c.logit) else {
            return 0;
        };

        if params.top_p < 1.0 {
            let total: f64 = candidates.iter().map(|c| weight(c.logit, best, 1.0)).sum();
            let wanted = f64::from(params.top_p) * total;
            let mut sum = 0.0;
            let below = candidates
                .iter()
                .take_while(|c| {
                    sum += weight(c.logit, best, 1.0);
                    sum < wanted
                })
                .count();
            candidates.truncate(below + 1);
        }
        if params.min_p > 0.0 {
            let least = best + params.min_p.ln();
            let kept = candidates.partition_point(|c| c.logit >= least);
            candidates.truncate(kept.max(1));
        }

        let temperature = params.temperature;
        let total: f64 = candidates
            .iter()
            .map(|c| weight(c.logit, best, temperature))
            .sum();
        let mut left = self.random.unit() * total;
        for candidate in candidates.iter() {
            left -= weight(candidate.logit, best, temperature);
            if left < 0.0 {
                return candidate.id;
            }
        }
        candidates[0].id // reached only through rounding errors
    }
}

/// The lowest id of the highest logit; 0 if all logits are NaN.
fn greedy(logits: &[f32]) -> u32 {
    let highest = maximum(logits);
    // Within a chunk, several logits are compared at a time, because the comparison does not end early.
    const CHUNK: usize = 1024;
    let is_highest = |&logit: &f32| logit == highest;
    let has_highest = |chunk: &[f32]| {
        chunk
            .iter()
            .fold(false, |found, logit| found | is_highest(logit))
    };
    let chunk = logits.chunks(CHUNK).position(has_highest).unwrap_or(0);
    let first = logits.iter().skip(chunk * CHUNK).position(is_highest);
    first.map_or(0, |id| (chunk * CHUNK + id) as u32)
}

/// The highest value that is not NaN; negative infinity without one. A vocabulary has up to 10^6 values, so the maxima of several lanes
/// are compared at a time.
fn maximum(values: &[f32]) -> f32 {
    let higher = |highest: f32, value: f32| if value > highest { value } else { highest };
    let (chunks, rest) = values.as_chunks::<32>();
    let mut lanes = [f32::NEG_INFINITY; 32];
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = higher(*lane, value);
        }
    }
    let lanes = lanes.into_iter().chain(rest.iter().copied());
    lanes.fold(f32::NEG_INFINITY, higher)
}

/// The numerator of the softmax at `temperature`. It is 1 for a logit equal to `best`, also if both are infinite.
fn weight(logit: f32, best: f32, temperature: f32) -> f64 {
    if logit == best {
        1.0
    } else {
        (f64::from(logit - best) / f64::from(temperature)).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [0.0, 2.0, -1.0, 2.0, 1.0];

    fn params(temperature: f32, seed: u64) -> SamplerParams {
        SamplerParams {
            temperature,
            seed,
            ..SamplerParams::default()
        }
    }

    /// The relative frequency of each token in many draws.
    fn shares(params: SamplerParams, logits: &[f32]) -> Vec<f64> {
        const DRAWS: usize = 200_000;
        let mut sampler = Sampler::new(params);
        let mut shares = vec![0.0; logits.len()];
        for _ in 0..DRAWS {
            shares[sampler.sample(logits) as usize] += 1.0 / DRAWS as f64;
        }
        shares
    }

    fn assert_close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (f, e) in found.iter().zip(expected) {
            // More than four standard deviations of a frequency in 200,000 draws.
            assert!((f - e).abs() < 0.005, "{found:?} is not {expected:?}");
        }
    }

    #[test]
    fn greedy_selects_highest_logit_and_lowest_id_of_a_tie() {
        let mut sampler = Sampler::new(SamplerParams::default());
        assert_eq!(sampler.sample(&LOGITS), 1);
        assert_eq!(sampler.sample(&[-3.0, -2.0, -2.5]), 1);
        assert_eq!(sampler.sample(&[-0.0, 0.0]), 0);
    }

    #[test]
    fn greedy_compares_all_logits() {
        let mut sampler = Sampler::new(SamplerParams::default());
        for n in [1, 31, 32, 33, 64, 100, 1025] {
            for highest in 0..n {
                let mut logits: Vec<f32> = (0..n).map(|id| (id % 7) as f32).collect();
                logits[highest] = 7.5;
                logits[(highest + 5) % n] = f32::NAN;
                if n > 1 {
                    assert_eq!(sampler.sample(&logits), highest as u32, "{n}");
                }
                logits[n - 1] = 7.5;
                let first = logits.iter().position(|&logit| logit == 7.5);
                assert_eq!(Some(sampler.sample(&logits) as usize), first, "{n}");
            }
        }
    }

    #[test]
    fn accepts_infinite_and_nan_logits() {
        let nan = f32::NAN;
        let inf = f32::INFINITY;
        for temperature in [0.0, 1.0, f32::NAN, -1.0] {
            let mut sampler = Sampler::new(SamplerParams {
                top_k: 2,
                top_p: 0.9,
                min_p: 0.1,
                ..params(temperature, 1)
            });
            assert_eq!(sampler.sample(&[]), 0);
            assert_eq!(sampler.sample(&[nan, nan]), 0);
            assert_eq!(sampler.sample(&[nan, -5.0, nan]), 1);
            assert_eq!(sampler.sample(&[1.0, inf, nan]), 1);
            assert_eq!(sampler.sample(&[-inf, 3.0, -inf]), 1);
            assert!(sampler.sample(&[-inf, -inf]) < 2);
        }
    }

    #[test]
    fn equal_seeds_yield_equal_tokens() {
        let draw = |seed| {
            let mut sampler = Sampler::new(params(1.0, seed));
            (0..64).map(|_| sampler.sample(&LOGITS)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn reuses_the_buffer() {
        let mut sampler = Sampler::new(params(1.0, 3));
        sampler.sample(&LOGITS);
        let buffer = sampler.candidates.as_ptr();
        sampler.sample(&LOGITS);
        assert_eq!(sampler.candidates.as_ptr(), buffer);
    }

    #[test]
    fn draws_follow_the_softmax_at_the_temperature() {
        // Probabilities 1/8, 2/8, 4/8, 1/8. At temperature 0.5 the weights are squared.
        let logits = [1.0f32, 2.0, 4.0, 1.0].map(f32::ln);
        assert_close(&shares(params(1.0, 5), &logits), &[0.125, 0.25, 0.5, 0.125]);
        assert_close(
            &shares(params(0.5, 5), &logits),
            &[1.0 / 22.0, 4.0 / 22.0, 16.0 / 22.0, 1.0 / 22.0],
        );
    }

    #[test]
    fn top_k_keeps_the_highest() {
        let logits = [1.0f32, 2.0, 4.0, 1.0].map(f32::ln);
        let two = SamplerParams {
            top_k: 2,
            ..params(1.0, 5)
        };
        assert_close(&shares(two, &logits), &[0.0, 1.0 / 3.0, 2.0 / 3.0, 0.0]);
        let one = SamplerParams {
            top_k: 1,
            ..params(2.0, 5)
        };
        let mut sampler = Sampler::new(one);
        for row in [&LOGITS[..], &logits, &[5.0, 5.0]] {
            assert_eq!(sampler.sample(row), greedy(row));
        }
    }

    #[test]
    fn top_p_keeps_the_smallest_set_before_the_temperature() {
        let logits = [1.0f32, 2.0, 4.0, 1.0].map(f32::ln); // eighths: 1 2 4 1
        let top_p = |top_p| SamplerParams {
            top_p,
            ..params(100.0, 5)
        };
        // A high temperature makes all kept tokens nearly equally likely.
        let t = 0.01f64;
        let (a, b) = (2f64.powf(t), 4f64.powf(t));
        assert_close(
            &shares(top_p(0.7), &logits),
            &[0.0, a / (a + b), b / (a + b), 0.0],
        );
        assert_close(&shares(top_p(0.4), &logits), &[0.0, 0.0, 1.0, 0.0]);
        assert_close(&shares(top_p(0.0), &logits), &[0.0, 0.0, 1.0, 0.0]);
        let s = a + b + 1.0;
        assert_close(&shares(top_p(0.8), &logits), &[1.0 / s, a / s, b / s, 0.0]);
    }

    #[test]
    fn min_p_is_relative_to_the_best() {
        let logits = [1.0f32, 2.0, 4.0, 1.0].map(f32::ln);
        let min_p = |min_p| SamplerParams {
            min_p,
            ..params(1.0, 5)
        };
        assert_close(
            &shares(min_p(0.4), &logits),
            &[0.0, 1.0 / 3.0, 2.0 / 3.0, 0.0],
        );
        assert_close(&shares(min_p(2.0), &logits), &[0.0, 0.0, 1.0, 0.0]);
        assert_close(&shares(min_p(0.2), &logits), &[0.125, 0.25, 0.5, 0.125]);
    }
}
