//! The gated delta rule (Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024).
//!
//! The state of a head is a matrix `S (value, key)`. A token decays it, replaces the value that belongs to its key, and reads the
//! value of its query:
//!
//! `S ← exp(g) S`, `S ← S + β (v - S k) kᵀ`, `o = S q / √d`
//!
//! In Kimi Delta Attention (Kimi Team, "Kimi Linear", 2025), `g` has one value for each element of a key: `S ← S diag(exp(g))`.

use std::cell::RefCell;

use crate::cpu::disjoint::Disjoint;
use crate::cpu::threads::Threads;

/// The heads of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Heads {
    /// Heads of queries and keys.
    pub n_k: usize,
    /// Heads of values, a multiple of `n_k`.
    pub n_v: usize,
    /// Elements of a head.
    pub width: usize,
    /// Which head of queries and keys a head of values uses.
    pub keys: KeyHeads,
}

/// The head of queries and keys that a head of values uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyHeads {
    /// Consecutive heads of values use the same one: `head / (n_v / n_k)`.
    Grouped,
    /// They use all in turn: `head % n_k`.
    InTurn,
}

impl Heads {
    /// Elements of the queries, keys and values of a token.
    pub fn qkv_width(&self) -> usize {
        (2 * self.n_k + self.n_v) * self.width
    }

    /// Elements of the values of a token.
    pub fn v_width(&self) -> usize {
        self.n_v * self.width
    }

    /// Elements of the state of a sequence.
    pub fn state(&self) -> usize {
        self.n_v * self.width * self.width
    }

    fn key_head(&self, head: usize) -> usize {
        match self.keys {
            KeyHeads::Grouped => head / (self.n_v / self.n_k),
            KeyHeads::InTurn => head % self.n_k,
        }
    }
}

/// The tokens of a sequence.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    /// Queries, keys and values `(token, (2 n_k + n_v) · width)`, after [`normalize`].
    pub qkv: &'a [f32],
    /// Logarithms `g` of the decay, for each head `(token, n_v)`, or for each element of its key `(token, n_v, width)`.
    pub decay: &'a [f32],
    /// Learning rates `β (token, n_v)`.
    pub beta: &'a [f32],
}

/// Divides each query and key of `qkv (token, qkv_width)` by its length: `x / √(Σ x² + eps)`. Like llama.cpp, it is computed as an RMS
/// norm with a smaller epsilon.
pub fn normalize(threads: &Threads, heads: Heads, eps: f32, qkv: &mut [f32]) {
    let n = heads.width as f32;
    threads.rows(qkv, heads.qkv_width(), |_, row| {
        let queries_and_keys = &mut row[..2 * heads.n_k * heads.width];
        for head in queries_and_keys.chunks_exact_mut(heads.width) {
            let squares: f64 = head.iter().map(|&x| f64::from(x * x)).sum();
            let mean = (squares / f64::from(n)) as f32;
            let scale = 1.0 / (mean + eps / n).sqrt();
            let length = 1.0 / n.sqrt();
            head.iter_mut().for_each(|x| *x = *x * scale * length);
        }
    });
}

thread_local! {
    /// Decays of the elements of a key; empty if all elements of a head have the same.
    static DECAYS: RefCell<Vec<f32>> = RefCell::default();
}

/// Computes the tokens of a sequence in order. Updates `state (n_v, value, key)`; `out (token, n_v · width)`.
pub fn delta_net(
    threads: &Threads,
    heads: Heads,
    tokens: Tokens,
    state: &mut [f32],
    out: &mut [f32],
) {
    let (n_v, d) = (heads.n_v, heads.width);
    let n_tokens = out.len() / heads.v_width();
    let bytes = size_of_val(state).saturating_mul(n_tokens);
    let (state, out) = (Disjoint::new(state), Disjoint::new(out));
    let scale = 1.0 / (d as f32).sqrt();
    let n_decay = tokens.decay.len() / tokens.beta.len().max(1);
    threads.split(n_v, bytes, |range| {
        let mut decays = DECAYS.take();
        decays.clear();
        for head in range {
            // SAFETY: `split` passes disjoint ranges of heads, and each head has a state of its own.
            let state = unsafe { state.slice(head * d * d..(head + 1) * d * d) };
            let of_keys = heads.key_head(head) * d;
            for token in 0..n_tokens {
                let qkv = &tokens.qkv[token * heads.qkv_width()..][..heads.qkv_width()];
                let q = &qkv[of_keys..][..d];
                let k = &qkv[heads.n_k * d + of_keys..][..d];
                let v = &qkv[2 * heads.n_k * d + head * d..][..d];
                let at = token * n_v + head;
                let beta = tokens.beta[at];
                let decay = match &tokens.decay[at * n_decay..][..n_decay] {
                    [g] => g.exp(),
                    g => {
                        decays.clear();
                        decays.extend(g.iter().map(|g| g.exp()));
                        1.0
                    }
                };
                // SAFETY: each head writes elements of its own of each token.
                let out = unsafe { out.slice(at * d..(at + 1) * d) };
                let rows = state.chunks_exact_mut(d).zip(v);
                for (out, (row, v)) in out.iter_mut().zip(rows) {
                    row.iter_mut()
                        .zip(&decays)
                        .for_each(|(x, decay)| *x *= decay);
                    let known = decayed_product(row, decay, k);
                    *out = updated_product(row, (v - known) * beta, k, q) * scale;
                }
            }
        }
        DECAYS.set(decays);
    });
}

/// Multiplies `row` by `decay`, and returns its product with `k`.
fn decayed_product(row: &mut [f32], decay: f32, k: &[f32]) -> f32 {
    let ((row, row_end), (k, k_end)) = (row.as_chunks_mut::<16>(), k.as_chunks::<16>());
    let mut lanes = [0.0f32; 16];
    for (row, k) in row.iter_mut().zip(k) {
        for ((lane, x), k) in lanes.iter_mut().zip(row).zip(k) {
            *x *= decay;
            *lane += *x * k;
        }
    }
    let mut sum = lanes.iter().sum::<f32>();
    for (x, k) in row_end.iter_mut().zip(k_end) {
        *x *= decay;
        sum += *x * k;
    }
    sum
}

/// Adds `delta · k` to `row`, and returns its product with `q`.
fn updated_product(row: &mut [f32], delta: f32, k: &[f32], q: &[f32]) -> f32 {
    let (row, row_end) = row.as_chunks_mut::<16>();
    let ((k, k_end), (q, q_end)) = (k.as_chunks::<16>(), q.as_chunks::<16>());
    let mut lanes = [0.0f32; 16];
    for ((row, k), q) in row.iter_mut().zip(k).zip(q) {
        for (((lane, x), k), q) in lanes.iter_mut().zip(row).zip(k).zip(q) {
            *x += delta * k;
            *lane += *x * q;
        }
    }
    let mut sum = lanes.iter().sum::<f32>();
    for ((x, k), q) in row_end.iter_mut().zip(k_end).zip(q_end) {
        *x += delta * k;
        sum += *x * q;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, seed: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 37 + seed) * 101 % 197) as f32 / 98.0 - 1.0;
        (0..n).map(value).collect()
    }

    /// The formulas of the module in f64: the state of all heads, and the outputs.
    fn reference(heads: Heads, tokens: Tokens, n_tokens: usize) -> (Vec<f64>, Vec<f64>) {
        let d = heads.width;
        let (mut state, mut out) = (vec![0.0; heads.state()], Vec::new());
        for t in 0..n_tokens {
            let at = |i: usize| f64::from(tokens.qkv[t * heads.qkv_width() + i]);
            for head in 0..heads.n_v {
                let keys = match heads.keys {
                    KeyHeads::Grouped => head * heads.n_k / heads.n_v,
                    KeyHeads::InTurn => head % heads.n_k,
                };
                let unit = |first: usize| {
                    let part = (0..d).map(|i| at(first + keys * d + i));
                    let part: Vec<f64> = part.collect();
                    let length = (part.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    part.iter().map(|x| x / length).collect::<Vec<f64>>()
                };
                let (q, k) = (unit(0), unit(heads.n_k * d));
                let n_decay = tokens.decay.len() / tokens.beta.len();
                let decays = &tokens.decay[(t * heads.n_v + head) * n_decay..][..n_decay];
                let beta = f64::from(tokens.beta[t * heads.n_v + head]);
                for j in 0..d {
                    let row = &mut state[(head * d + j) * d..][..d];
                    for (i, x) in row.iter_mut().enumerate() {
                        *x *= f64::from(decays[i % n_decay]).exp();
                    }
                    let dot = |row: &[f64], x: &[f64]| -> f64 {
                        row.iter().zip(x).map(|(a, b)| a * b).sum()
                    };
                    let v = at((2 * heads.n_k + head) * d + j);
                    let delta = (v - dot(row, &k)) * beta;
                    row.iter_mut().zip(&k).for_each(|(x, k)| *x += delta * k);
                    out.push(dot(row, &q) / (d as f64).sqrt());
                }
            }
        }
        (state, out)
    }

    #[test]
    fn parts_of_a_sequence_agree_with_the_formulas() {
        const N: usize = 23;
        let threads = Threads::new(2).unwrap();
        // The last two have a decay for each element of a key.
        for (width, keys, n_decay) in [
            (20, KeyHeads::Grouped, 1),
            (32, KeyHeads::InTurn, 1),
            (20, KeyHeads::Grouped, 20),
            (32, KeyHeads::InTurn, 32),
        ] {
            let heads = Heads {
                n_k: 2,
                n_v: 4,
                width,
                keys,
            };
            let mut qkv = values(N * heads.qkv_width(), 3);
            let decay = values(N * 4 * n_decay, 5);
            let decay: Vec<f32> = decay.iter().map(|x| x - 1.0).collect();
            let beta: Vec<f32> = values(N * 4, 7).iter().map(|x| x.abs()).collect();
            let tokens = Tokens {
                qkv: &qkv.clone(),
                decay: &decay,
                beta: &beta,
            };
            let (expected_state, expected) = reference(heads, tokens, N);
            normalize(&threads, heads, 1e-6, &mut qkv);
            for sizes in [vec![N], vec![1; N], vec![7, 1, 15]] {
                let mut state = vec![0.0; heads.state()];
                let mut got = Vec::new();
                let mut first = 0;
                for size in sizes {
                    let tokens = Tokens {
                        qkv: &qkv[first * heads.qkv_width()..],
                        decay: &decay[first * 4 * n_decay..],
                        beta: &beta[first * 4..],
                    };
                    let mut out = vec![f32::NAN; size * heads.v_width()];
                    delta_net(&threads, heads, tokens, &mut state, &mut out);
                    got.extend(out);
                    first += size;
                }
                let pairs = got.iter().zip(&expected);
                for (got, expected) in pairs.chain(state.iter().zip(&expected_state)) {
                    assert!(
                        (f64::from(*got) - expected).abs() < 1e-4,
                        "{keys:?}, {n_decay}"
                    );
                }
            }
        }
    }
}
