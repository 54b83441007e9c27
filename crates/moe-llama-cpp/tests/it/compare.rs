//! Distances between the results of two engines, and their limits.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use moe_executor::CacheType;
use moe_gguf::{GgmlType, Gguf};

use crate::engines::{Answer, OTHERS, PLAIN, Variant, llama_cpp, native};
use crate::models::n_vocab;

/// The distance between two results.
#[derive(Clone, Copy, Debug, Default)]
pub struct Distance {
    n_positions: usize,
    other_top1: usize,
    /// Maximum over the positions of the best logit of `a` minus `a`'s logit of the token that is best in `b`.
    widest_top1: f32,
    sum_top5: f64,
    n_rows: usize,
    other_experts: usize,
    /// Maximum difference of router logits between an expert that only `a` selected and one that only `b` selected.
    pub widest_tie: f32,
}

impl Distance {
    /// The distance of `b` from `a`.
    pub fn of(a: &Answer, b: &Answer) -> Distance {
        let mut distance = Distance::default();
        assert_eq!(a.logits.len(), b.logits.len());
        for (a, b) in a.logits.iter().zip(&b.logits) {
            let mut order: Vec<usize> = (0..a.len()).collect();
            order.sort_by(|&i, &j| a[j].total_cmp(&a[i]));
            let best = (0..b.len()).max_by(|&i, &j| b[i].total_cmp(&b[j]).then(j.cmp(&i)));
            distance.n_positions += 1;
            let best = best.unwrap();
            distance.other_top1 += usize::from(best != order[0]);
            distance.widest_top1 = distance.widest_top1.max(a[order[0]] - a[best]);
            for &i in &order[..5] {
                distance.sum_top5 += f64::from((a[i] - b[i]).abs()) / 5.0;
            }
        }
        let routed = |answer: &Answer| answer.rows.keys().copied().collect::<Vec<_>>();
        assert_eq!(routed(a), routed(b), "the routed tokens differ");
        for (a, b) in a.rows.values().zip(b.rows.values()) {
            let set = |ids: &[i32]| ids.iter().copied().collect::<BTreeSet<i32>>();
            let (chosen_a, chosen_b) = (set(&a.ids), set(&b.ids));
            assert_eq!(chosen_a.len(), chosen_b.len());
            distance.n_rows += 1;
            distance.other_experts += usize::from(chosen_a != chosen_b);
            let score = |e: &i32| b.logits[*e as usize];
            let lost = chosen_a
                .difference(&chosen_b)
                .map(score)
                .fold(f32::INFINITY, f32::min);
            let won = chosen_b
                .difference(&chosen_a)
                .map(score)
                .fold(f32::NEG_INFINITY, f32::max);
            if chosen_a != chosen_b {
                distance.widest_tie = distance.widest_tie.max(won - lost);
            }
        }
        distance
    }

    /// Mean absolute difference of the five highest logits.
    pub fn mean_top5(&self) -> f64 {
        self.sum_top5 / self.n_positions.max(1) as f64
    }

    /// Fraction of positions with the same best token.
    pub fn same_top1(&self) -> f64 {
        1.0 - self.other_top1 as f64 / self.n_positions.max(1) as f64
    }

    /// Fraction of routed tokens with the same set of experts.
    pub fn same_experts(&self) -> f64 {
        1.0 - self.other_experts as f64 / self.n_rows.max(1) as f64
    }

    /// The combination of two distances.
    pub fn and(self, other: Distance) -> Distance {
        Distance {
            n_positions: self.n_positions + other.n_positions,
            other_top1: self.other_top1 + other.other_top1,
            widest_top1: self.widest_top1.max(other.widest_top1),
            sum_top5: self.sum_top5 + other.sum_top5,
            n_rows: self.n_rows + other.n_rows,
            other_experts: self.other_experts + other.other_experts,
            widest_tie: self.widest_tie.max(other.widest_tie),
        }
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "top-1 {:6.2} %, mean |Δ| {:.4}, experts {:6.2} %, widest tie {:.3}",
            self.same_top1() * 100.0,
            self.mean_top5(),
            self.same_experts() * 100.0,
            self.widest_tie
        )
    }
}

/// Pseudorandom tokens, the same in every run.
pub fn some_tokens(n: usize, n_vocab: u32, seed: u64) -> Vec<u32> {
    let mut state = seed;
    let next = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % u64::from(n_vocab)) as u32
    };
    (0..n).map(next).collect()
}

/// Comparison for models in F32, F16 and BF16. With random weights, many tokens are nearly as good as the best, and a model has
/// few positions. Therefore the fraction of equal best tokens is checked over all models, and each difference must be a near
/// tie.
#[derive(Default)]
pub struct Exact {
    ours: Distance,
}

impl Exact {
    /// Compares executor and llama.cpp for another model.
    pub fn compare(&mut self, name: &str, path: &Path) {
        let gguf = Gguf::open(path).unwrap();
        let (ours, _) = distances(&gguf);
        self.add_near(name, ours);
    }

    /// Like [`Exact::compare`], for a prompt in batches of 1, 7 and 64 tokens and 72 tokens after it. A model in F32 has the same
    /// experts and closer logits. With BF16 activations, an expert that was swapped in a near tie also changes the scores of later
    /// layers, so that not every difference is a near tie.
    pub fn compare_batches(&mut self, name: &str, path: &Path, ty: GgmlType) {
        let gguf = Gguf::open(path).unwrap();
        let tokens = some_tokens(144, n_vocab(&gguf), 3);
        let prompt = [1, 7, 64];
        let [theirs] = llama_cpp(&gguf, &tokens, &prompt, [PLAIN]);
        let ours = native(&gguf, &tokens, &prompt, CacheType::F32);
        let ours = Distance::of(&theirs, &ours);
        if ty == GgmlType::F32 {
            assert_eq!(ours.other_experts, 0, "{name}: {ours}");
            assert!(ours.mean_top5() <= 0.001, "{name}: {ours}");
        }
        match ty {
            GgmlType::BF16 => self.add(name, ours),
            _ => self.add_near(name, ours),
        }
    }

    fn add_near(&mut self, name: &str, ours: Distance) {
        assert!(ours.widest_tie < 0.05, "{name}: {ours}");
        assert!(ours.widest_top1 < 0.05, "{name}: {ours:?}");
        self.add(name, ours);
    }

    /// Like [`Exact::compare`], with an F16 cache in both. Differences need not be near ties: flash attention of llama.cpp also adds the
    /// values in F16, the executor in F32.
    pub fn compare_with_f16_cache(&mut self, name: &str, path: &Path) {
        let gguf = Gguf::open(path).unwrap();
        let [theirs] = theirs(&gguf, [OTHERS[0]]);
        self.add(name, Distance::of(&theirs, &ours(&gguf, CacheType::F16)));
    }

    fn add(&mut self, name: &str, ours: Distance) {
        println!("{name:24} ours {ours}");
        assert!(ours.same_experts() >= 0.99, "{name}: {ours}");
        assert!(ours.mean_top5() <= 0.02, "{name}: {ours}");
        self.ours = self.ours.and(ours);
    }

    /// Checks the limits for all models.
    pub fn check_all(self) {
        assert!(self.ours.same_top1() >= 0.99, "{}", self.ours);
    }
}

/// Comparison for quantized models: the distance between executor and llama.cpp may be at most 1.25 times the distance between
/// variants of llama.cpp. Differences of logits are checked for each model. Different best tokens and sets of experts are rare,
/// so their numbers are checked over all models.
#[derive(Default)]
pub struct Spread {
    ours: Distance,
    own: [Distance; 3],
}

impl Spread {
    /// Compares executor and llama.cpp for another model.
    pub fn compare(&mut self, name: &str, path: &Path) {
        let gguf = Gguf::open(path).unwrap();
        let (ours, own) = distances(&gguf);
        println!("{name:24} ours {ours}");
        own.iter().for_each(|own| println!("{name:24} own  {own}"));
        let widest = own.iter().map(Distance::mean_top5).fold(0.0, f64::max);
        assert!(ours.mean_top5() <= 1.25 * widest, "{name}: {ours}");
        assert!(ours.widest_tie < 0.5, "{name}: {ours}");
        self.ours = self.ours.and(ours);
        for (sum, own) in self.own.iter_mut().zip(own) {
            *sum = sum.and(own);
        }
    }

    /// Checks the limits for all models.
    pub fn check_all(self) {
        // Counts are integers, so the limit is rounded up: 1.25 × 3 becomes 4.
        let within = |others: fn(&Distance) -> usize| {
            let own = self.own.iter().map(others).max().unwrap_or(0);
            others(&self.ours) <= (5 * own).div_ceil(4)
        };
        let text = format!("{}; llama.cpp itself: {:?}", self.ours, self.own);
        assert!(within(|d| d.other_top1), "{text}");
        assert!(within(|d| d.other_experts), "{text}");
    }
}

/// Distances from llama.cpp's plain variant to the executor and to the other variants of llama.cpp.
fn distances(gguf: &Gguf) -> (Distance, [Distance; 3]) {
    let theirs = theirs(gguf, [PLAIN, OTHERS[0], OTHERS[1], OTHERS[2]]);
    let [plain, others @ ..] = &theirs;
    let own = others.each_ref().map(|other| Distance::of(plain, other));
    (Distance::of(plain, &ours(gguf, CacheType::F32)), own)
}

const N_PROMPT: usize = 96;
const N_TOKENS: usize = 256;

/// The results of llama.cpp for pseudorandom tokens.
pub fn theirs<const N: usize>(gguf: &Gguf, variants: [Variant; N]) -> [Answer; N] {
    let tokens = some_tokens(N_TOKENS, n_vocab(gguf), 1);
    llama_cpp(gguf, &tokens, &[N_PROMPT], variants)
}

/// The results of the executor for the tokens of [`theirs`].
pub fn ours(gguf: &Gguf, cache: CacheType) -> Answer {
    let tokens = some_tokens(N_TOKENS, n_vocab(gguf), 1);
    native(gguf, &tokens, &[N_PROMPT], cache)
}
