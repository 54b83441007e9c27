//! Gated activations of feed-forward blocks.

use std::sync::OnceLock;

use half::f16;

use crate::cpu::simd::{self, Kernel, Simd, exp};
use crate::cpu::threads::Threads;

/// A gated activation: a function of a value of gate and a value of up.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Glu {
    /// `silu(gate) · up`.
    Swiglu,
    /// gpt-oss: `gate · sigmoid(1.702 gate) · (up + 1)` with `gate` clamped to at most 7 and `up` to -7..=7.
    SwigluOai,
    /// `max(gate, 0) · up`.
    Reglu,
    /// `gelu(gate) · up` with the approximation `gelu(x) = x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`. Like in ggml
    /// (`ggml_vec_geglu_f32`), `x` and `gelu(x)` are rounded to half precision for `x` between -10 and 10.
    Geglu,
    /// `min(silu(gate), limit) · up` with `up` clamped to `-limit..=limit`.
    SwigluLimited(f32),
}

/// The activations that consist of vector instructions.
#[derive(Clone, Copy)]
enum Vectorized {
    Swiglu,
    SwigluOai,
    Reglu,
}

/// √(2/π), as in ggml.
const SQRT_2_OVER_PI: f32 = 0.797_884_6;

/// Values per call of the vectorized code.
const CHUNK: usize = 1024;

impl Glu {
    /// `gate[i] = glu(gate[i], up[i])`.
    pub fn apply(self, threads: &Threads, gate: &mut [f32], up: &[f32]) {
        let n_chunked = gate.len() / CHUNK * CHUNK;
        let (chunks, rest) = gate.split_at_mut(n_chunked);
        threads.rows(chunks, CHUNK, |i, gate| {
            self.pairs(gate, &up[i * CHUNK..][..CHUNK])
        });
        self.pairs(rest, &up[n_chunked..]);
    }

    fn pairs(self, gate: &mut [f32], up: &[f32]) {
        let glu = match self {
            Glu::Swiglu => Vectorized::Swiglu,
            Glu::SwigluOai => Vectorized::SwigluOai,
            Glu::Reglu => Vectorized::Reglu,
            Glu::Geglu => return geglu(gate, up),
            Glu::SwigluLimited(limit) => return swiglu_limited(limit, gate, up),
        };
        simd::dispatch(Pairs { glu, gate, up });
    }
}

/// [`Glu::Geglu`] of each pair.
fn geglu(gate: &mut [f32], up: &[f32]) {
    let table = gelu_table();
    for (gate, up) in gate.iter_mut().zip(up) {
        let x = *gate;
        *gate = if x <= -10.0 {
            0.0
        } else if x >= 10.0 {
            x * up
        } else {
            table[usize::from(f16::from_f32(x).to_bits())] * up
        };
    }
}

/// [`Glu::SwigluLimited`] of each pair.
fn swiglu_limited(limit: f32, gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        // Comparisons, unlike `f32::min`, propagate NaN.
        let at_most = |x: f32| if x > limit { limit } else { x };
        let silu = *gate / (1.0 + (-*gate).exp());
        *gate = at_most(silu) * -at_most(-at_most(*up));
    }
}

/// The activation of each half-precision number, by its bits, rounded to half precision.
fn gelu_table() -> &'static [f32] {
    static TABLE: OnceLock<Vec<f32>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let numbers = (0..=u16::MAX).map(|bits| f16::from_bits(bits).to_f32());
        let rounded = |x: f32| f16::from_f32(gelu(x)).to_f32();
        numbers.map(rounded).collect()
    })
}

fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + (SQRT_2_OVER_PI * x * (1.0 + 0.044_715 * x * x)).tanh())
}

struct Pairs<'a> {
    glu: Vectorized,
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Kernel for Pairs<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let mut gate = self.gate.chunks_exact_mut(S::LANES);
        let mut up = self.up.chunks_exact(S::LANES);
        for (gate, up) in gate.by_ref().zip(up.by_ref()) {
            // SAFETY: both chunks have `LANES` values; the CPU has the instructions by the contract of `run`.
            unsafe {
                let value = vector::<S>(self.glu, S::load(gate.as_ptr()), S::load(up.as_ptr()));
                S::store(gate.as_mut_ptr(), value);
            }
        }
        for (gate, up) in gate.into_remainder().iter_mut().zip(up.remainder()) {
            // SAFETY: the CPU has the instructions by the contract of `run`.
            *gate = unsafe { first::<S>(vector::<S>(self.glu, S::splat(*gate), S::splat(*up))) };
        }
    }
}

/// The activation of each lane.
///
/// # Safety
/// The CPU has the instructions of `S`.
#[inline(always)]
unsafe fn vector<S: Simd>(glu: Vectorized, gate: S::Vector, up: S::Vector) -> S::Vector {
    // SAFETY: by the contract of this function.
    unsafe {
        match glu {
            Vectorized::Swiglu => S::mul(silu::<S>(gate, 1.0), up),
            Vectorized::SwigluOai => {
                let gate = S::min(S::splat(7.0), gate);
                let up = S::min(S::splat(7.0), S::max(S::splat(-7.0), up));
                S::mul(silu::<S>(gate, 1.702), S::add(up, S::splat(1.0)))
            }
            Vectorized::Reglu => S::mul(S::max(S::splat(0.0), gate), up),
        }
    }
}

/// `x · sigmoid(alpha x)`
///
/// # Safety
/// The CPU has the instructions of `S`.
#[inline(always)]
unsafe fn silu<S: Simd>(x: S::Vector, alpha: f32) -> S::Vector {
    // SAFETY: by the contract of this function.
    unsafe {
        let e = exp::<S>(S::mul(x, S::splat(-alpha)));
        S::div(x, S::add(S::splat(1.0), e))
    }
}

/// The first lane.
///
/// # Safety
/// The CPU has the instructions of `S`.
#[inline(always)]
unsafe fn first<S: Simd>(x: S::Vector) -> f32 {
    let mut lanes = [0.0; 16];
    // SAFETY: no `Simd` has more than 16 lanes.
    unsafe { S::store(lanes.as_mut_ptr(), x) };
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::quant::Isa;

    #[test]
    fn agrees_with_the_formulas_in_f64() {
        let gate: Vec<f32> = (0..2100).map(|i| (i as f32 - 1000.0) * 0.02).collect();
        let up: Vec<f32> = (0..2100)
            .map(|i| ((i * 37) % 200) as f32 * 0.1 - 10.0)
            .collect();
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        for (glu, vectorized) in [
            (Glu::Swiglu, Vectorized::Swiglu),
            (Glu::SwigluOai, Vectorized::SwigluOai),
            (Glu::Reglu, Vectorized::Reglu),
        ] {
            let want = |g: f32, u: f32| {
                let (g, u) = (f64::from(g), f64::from(u));
                match vectorized {
                    Vectorized::Swiglu => g * sigmoid(g) * u,
                    Vectorized::SwigluOai => {
                        g.min(7.0) * sigmoid(1.702 * g.min(7.0)) * (u.clamp(-7.0, 7.0) + 1.0)
                    }
                    Vectorized::Reglu => g.max(0.0) * u,
                }
            };
            for isa in Isa::available() {
                let mut out = gate.clone();
                simd::dispatch_with(
                    isa,
                    Pairs {
                        glu: vectorized,
                        gate: &mut out,
                        up: &up,
                    },
                );
                for (i, got) in out.iter().enumerate() {
                    let want = want(gate[i], up[i]);
                    let error = (f64::from(*got) - want).abs();
                    assert!(
                        error <= 1e-6 * want.abs() + 1e-9,
                        "{glu:?} {isa:?} at {i}: {got}, not {want}"
                    );
                }
            }
            let mut out = gate.clone();
            glu.apply(&Threads::new(2).unwrap(), &mut out, &up);
            assert!((f64::from(out[2099]) - want(gate[2099], up[2099])).abs() < 1e-4);
            assert!((f64::from(out[5]) - want(gate[5], up[5])).abs() < 1e-4);
        }
    }

    #[test]
    fn geglu_agrees_with_its_formula_in_half_precision() {
        let gate: Vec<f32> = (0..2100).map(|i| (i as f32 - 1000.0) * 0.0125).collect();
        let up: Vec<f32> = (0..2100).map(|i| (i % 7) as f32 - 3.0).collect();
        let mut out = gate.clone();
        Glu::Geglu.apply(&Threads::new(2).unwrap(), &mut out, &up);
        for (i, got) in out.iter().enumerate() {
            let (exact, u) = (f64::from(gate[i]), f64::from(up[i]));
            let x = f64::from(f16::from_f32(gate[i]).to_f32());
            let y = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            let want = match exact {
                x if x <= -10.0 => 0.0,
                x if x >= 10.0 => x * u,
                _ => 0.5 * x * (1.0 + y.tanh()) * u,
            };
            // Half a unit in the last place of half precision, and the cancellation of `1 + tanh` in f32.
            let tolerance = want.abs() / 2048.0 + u.abs() * 1e-6 + 1e-9;
            assert!(
                (f64::from(*got) - want).abs() <= tolerance,
                "{got} {want} at {i}"
            );
        }
    }

    #[test]
    fn limited_swiglu_agrees_with_its_formula() {
        let gate: Vec<f32> = (0..900).map(|i| (i as f32 - 450.0) * 0.02).collect();
        let up: Vec<f32> = (0..900).map(|i| (i % 31) as f32 * 0.2 - 3.0).collect();
        let mut out = gate.clone();
        Glu::SwigluLimited(1.5).apply(&Threads::new(2).unwrap(), &mut out, &up);
        for (i, got) in out.iter().enumerate() {
            let (g, u) = (f64::from(gate[i]), f64::from(up[i]));
            let want = (g / (1.0 + (-g).exp())).min(1.5) * u.clamp(-1.5, 1.5);
            assert!((f64::from(*got) - want).abs() < 1e-6, "{got} {want} at {i}");
        }
    }

    #[test]
    fn propagates_nan() {
        for glu in [
            Glu::Swiglu,
            Glu::SwigluOai,
            Glu::Reglu,
            Glu::Geglu,
            Glu::SwigluLimited(1.0),
        ] {
            let mut gate = [f32::NAN, 1.0];
            glu.apply(&Threads::new(1).unwrap(), &mut gate, &[1.0, f32::NAN]);
            assert!(gate.iter().all(|x| x.is_nan()));
        }
    }
}
