//! The scan of Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024, section 6).

use crate::cpu::disjoint::Disjoint;
use crate::cpu::simd::{self, Kernel, Simd};
use crate::cpu::threads::Threads;

/// The heads of a Mamba-2 layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SsmHeads {
    /// Number of heads.
    pub n: usize,
    /// Elements of a head.
    pub dim: usize,
    /// Groups of consecutive heads with the same `B` and `C`.
    pub n_group: usize,
    /// Values of the state for each element of a head.
    pub n_state: usize,
}

impl SsmHeads {
    /// Elements of all heads.
    pub fn width(&self) -> usize {
        self.n * self.dim
    }

    /// Elements of `x`, `B` and `C` of a token: the channels of the convolution.
    pub fn channels(&self) -> usize {
        self.width() + 2 * self.n_group * self.n_state
    }
}

/// Inputs of a scan over consecutive tokens of a sequence.
#[derive(Clone, Copy)]
pub struct ScanInputs<'a> {
    /// `x (head, dim)`, `B (group, state)` and `C (group, state)` of each token, one after the other `(token, channels)`.
    pub xbc: &'a [f32],
    /// Step size of each head before the softplus `(token, head)`.
    pub dt: &'a [f32],
    /// Decay of each head, negative `(head)`.
    pub a: &'a [f32],
}

/// Updates the state of a sequence by each token, and computes the output of each token from the state:
///
/// `state = state · exp(Δ · A) + x · Δ · B` with `Δ = softplus(dt)`, and `out = state · C`.
///
/// `state (head, dim, n_state)`, `out (token, head, dim)`.
pub fn scan(
    threads: &Threads,
    heads: SsmHeads,
    inputs: ScanInputs,
    state: &mut [f32],
    out: &mut [f32],
) {
    let per_head = heads.dim * heads.n_state;
    let tokens = inputs.dt.len() / heads.n.max(1);
    let bytes = tokens.saturating_mul(size_of_val(state));
    let (state, out) = (Disjoint::new(state), Disjoint::new(out));
    threads.split(heads.n, bytes, |range| {
        for head in range {
            // SAFETY: `split` passes disjoint ranges of heads, and each head has a part of the state of its own.
            let state = unsafe { state.slice(head * per_head..(head + 1) * per_head) };
            simd::dispatch(HeadScan {
                heads,
                inputs,
                head,
                state,
                out: &out,
            });
        }
    });
}

/// The scan of one head over all tokens.
struct HeadScan<'a> {
    heads: SsmHeads,
    inputs: ScanInputs<'a>,
    head: usize,
    /// `(dim, n_state)`
    state: &'a mut [f32],
    /// `(token, head, dim)`; only the elements of this head are written.
    out: &'a Disjoint<'a, f32>,
}

impl Kernel for HeadScan<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let HeadScan {
            heads,
            inputs,
            head,
            state: states,
            out: outs,
        } = self;
        let SsmHeads {
            n,
            dim,
            n_group,
            n_state,
        } = heads;
        let group = head / (n / n_group);
        let (b_start, c_start) = (n * dim, n * dim + n_group * n_state);
        let tokens = inputs.xbc.chunks_exact(heads.channels());
        let tokens = tokens.zip(inputs.dt.chunks_exact(n)).enumerate();
        for (token, (xbc, dt)) in tokens {
            let step = softplus(dt[head]);
            let decay = (step * inputs.a[head]).exp();
            let x = &xbc[head * dim..][..dim];
            let b = &xbc[b_start + group * n_state..][..n_state];
            let c = &xbc[c_start + group * n_state..][..n_state];
            let first = (token * n + head) * dim;
            // SAFETY: no other head has these elements of the token, and one thread scans the head.
            let out = unsafe { outs.slice(first..first + dim) };
            let elements = states.chunks_exact_mut(n_state).zip(x);
            for ((state, x), out) in elements.zip(out) {
                // SAFETY: by the contract of `run`.
                *out = unsafe { update::<S>(state, [decay, x * step], [b, c]) };
            }
        }
    }
}

/// `ln(1 + e^x)`, like ggml without overflow for large `x`.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { (1.0 + x.exp()).ln() }
}

/// `state = state · decay + b · x`; returns `Σ state · c`. All slices have the same length.
///
/// # Safety
/// The CPU has the instructions of `S`.
#[inline(always)]
unsafe fn update<S: Simd>(state: &mut [f32], [decay, x]: [f32; 2], [b, c]: [&[f32]; 2]) -> f32 {
    let n = state.len();
    let (b, c) = (&b[..n], &c[..n]);
    let n_vectors = n / S::LANES;
    // SAFETY: all vectors are within the slices; the CPU has the instructions by the contract of this function.
    let mut sum = unsafe {
        let (decays, xs) = (S::splat(decay), S::splat(x));
        let mut sum = S::splat(0.0);
        for i in (0..n_vectors).map(|i| i * S::LANES) {
            let at = state.as_mut_ptr().add(i);
            let kept = S::mul(S::load(at), decays);
            let new = S::add(kept, S::mul(S::load(b.as_ptr().add(i)), xs));
            S::store(at, new);
            sum = S::mul_add(new, S::load(c.as_ptr().add(i)), sum);
        }
        S::sum(sum)
    };
    let rest = n_vectors * S::LANES;
    let inputs = b[rest..].iter().zip(&c[rest..]);
    for (state, (b, c)) in state[rest..].iter_mut().zip(inputs) {
        *state = *state * decay + b * x;
        sum += *state * c;
    }
    sum
}

#[cfg(test)]
mod tests {
    use moe_placement::random::SplitMix64;

    use super::*;
    use crate::cpu::quant::Isa;

    /// Random values from -1 to 1.
    fn noise(random: &mut SplitMix64, n: usize) -> Vec<f32> {
        let value = |_| (random.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        (0..n).map(value).collect()
    }

    fn assert_close(got: &[f32], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let error = (f64::from(*got) - want).abs();
            assert!(
                error <= 1e-5 * want.abs() + 1e-5,
                "{got}, not {want}, at {i}"
            );
        }
    }

    /// State and output of a scan in f64.
    fn reference(heads: SsmHeads, inputs: ScanInputs, state: &[f32]) -> [Vec<f64>; 2] {
        let SsmHeads {
            n,
            dim,
            n_group,
            n_state,
        } = heads;
        let mut state: Vec<f64> = state.iter().map(|&s| f64::from(s)).collect();
        let mut out = Vec::new();
        for (xbc, dt) in inputs.xbc.chunks(heads.channels()).zip(inputs.dt.chunks(n)) {
            for element in 0..n * dim {
                let head = element / dim;
                let step = f64::from(dt[head]).exp().ln_1p();
                let decay = (step * f64::from(inputs.a[head])).exp();
                let group = head / (n / n_group);
                let mut sum = 0.0;
                for i in 0..n_state {
                    let b = f64::from(xbc[n * dim + group * n_state + i]);
                    let c = f64::from(xbc[n * dim + (n_group + group) * n_state + i]);
                    let value = &mut state[element * n_state + i];
                    *value = *value * decay + f64::from(xbc[element]) * step * b;
                    sum += *value * c;
                }
                out.push(sum);
            }
        }
        [state, out]
    }

    #[test]
    fn scan_agrees_with_its_formula() {
        let mut random = SplitMix64::new(4);
        for n_state in [1, 16, 21, 128] {
            let heads = SsmHeads {
                n: 6,
                dim: 5,
                n_group: 2,
                n_state,
            };
            let tokens = 11;
            let xbc = noise(&mut random, tokens * heads.channels());
            let dt = noise(&mut random, tokens * heads.n);
            let a: Vec<f32> = noise(&mut random, heads.n)
                .iter()
                .map(|a| a - 1.0)
                .collect();
            let inputs = ScanInputs {
                xbc: &xbc,
                dt: &dt,
                a: &a,
            };
            let before = noise(&mut random, heads.width() * n_state);
            let [want_state, want_out] = reference(heads, inputs, &before);

            let threads = Threads::new(2).unwrap();
            let mut state = before.clone();
            let mut out = vec![f32::NAN; tokens * heads.width()];
            scan(&threads, heads, inputs, &mut state, &mut out);
            assert_close(&state, &want_state);
            assert_close(&out, &want_out);

            // Token by token, with the instructions of each CPU.
            for isa in Isa::available() {
                let mut state = before.clone();
                let mut rows = vec![f32::NAN; tokens * heads.width()];
                for (token, row) in rows.chunks_mut(heads.width()).enumerate() {
                    let inputs = ScanInputs {
                        xbc: &xbc[token * heads.channels()..][..heads.channels()],
                        dt: &dt[token * heads.n..][..heads.n],
                        a: &a,
                    };
                    let out = Disjoint::new(row);
                    let parts = state.chunks_mut(heads.dim * n_state).enumerate();
                    for (head, state) in parts {
                        let scan = HeadScan {
                            heads,
                            inputs,
                            head,
                            state,
                            out: &out,
                        };
                        simd::dispatch_with(isa, scan);
                    }
                }
                assert_close(&state, &want_state);
                assert_close(&rows, &want_out);
            }
        }
    }

    #[test]
    fn softplus_does_not_overflow() {
        assert_eq!(softplus(200.0), 200.0);
        assert!((softplus(0.0) - std::f32::consts::LN_2).abs() < 1e-6);
        assert!(softplus(-200.0).abs() < 1e-6);
        assert!(softplus(f32::NAN).is_nan());
    }
}
