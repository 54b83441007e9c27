//! Products and decoding for every format without vector instructions of a particular machine.
//!
//! Everything is `inline(always)`: the x86 modules compile the same code again for wider vectors.

use zerocopy::FromBytes;

use super::ActivationType;
use super::activation::{Q8Row, floats};
use super::float::FloatFormat;
use super::format::{Format, Unpacked};

/// The blocks of a row.
#[inline(always)]
pub fn blocks<F: Format>(row: &[u8]) -> &[F] {
    <[F]>::ref_from_bytes(row).expect("a row is a whole number of blocks")
}

/// `out[r] = row r · act`.
#[inline(always)]
pub fn gemv<F: Format>(rows: &[u8], row_size: usize, n: usize, act: &[u8], out: &mut [f32]) {
    let act = Q8Row::new(F::ACTIVATION, n, act);
    for (row, out) in rows.chunks_exact(row_size).zip(out) {
        *out = dot::<F>(blocks(row), &act);
    }
}

/// Inner product of a row and activations; exact, in integers, within a group.
#[inline(always)]
pub fn dot<F: Format>(row: &[F], act: &Q8Row) -> f32 {
    let mut weights = Unpacked::new();
    let mut total = 0.0;
    for (b, block) in row.iter().enumerate() {
        block.unpack(&mut weights);
        for group in 0..F::BLOCK / F::GROUP {
            let first = b * F::BLOCK + group * F::GROUP;
            let products = weights.q[group * F::GROUP..][..F::GROUP]
                .iter()
                .zip(&act.q[first..][..F::GROUP]);
            let sum: i32 = products.map(|(&w, &a)| i32::from(w) * i32::from(a)).sum();
            total += weights.scale[group] * scale::<F>(act, first) * sum as f32;
            if F::MIN {
                total -= weights.min[group] * scaled_sum::<F>(act, first);
            }
        }
    }
    total
}

#[inline(always)]
fn scale<F: Format>(act: &Q8Row, at: usize) -> f32 {
    match F::ACTIVATION {
        ActivationType::Q8K => act.scale[at / 256].get(),
        _ => act.scale[at / 32].get(),
    }
}

/// Scale times sum of the activations of the group that starts at `at`.
#[inline(always)]
fn scaled_sum<F: Format>(act: &Q8Row, at: usize) -> f32 {
    match F::ACTIVATION {
        ActivationType::Q8K => {
            let sum: i32 = act.sum[at / 16..][..F::GROUP / 16]
                .iter()
                .map(|s| i32::from(s.get()))
                .sum();
            act.scale[at / 256].get() * sum as f32
        }
        _ => act.scaled_sum[at / 32].get(),
    }
}

/// The elements of a row as ggml computes them, `scale * q - min`.
#[inline(always)]
pub fn dequantize<F: Format>(row: &[u8], out: &mut [f32]) {
    let mut weights = Unpacked::new();
    for (block, out) in blocks::<F>(row).iter().zip(out.chunks_exact_mut(F::BLOCK)) {
        block.unpack(&mut weights);
        for (group, out) in out.chunks_exact_mut(F::GROUP).enumerate() {
            for (value, &q) in out
                .iter_mut()
                .zip(&weights.q[group * F::GROUP..][..F::GROUP])
            {
                *value = weights.scale[group] * f32::from(q);
                if F::MIN {
                    *value -= weights.min[group];
                }
            }
        }
    }
}

/// As [`gemv`], for floating-point rows. Sixteen partial sums keep the additions independent.
#[inline(always)]
pub fn gemv_float<F: FloatFormat>(
    rows: &[u8],
    row_size: usize,
    n: usize,
    act: &[u8],
    out: &mut [f32],
) {
    let act = floats(n, act);
    for (row, out) in rows.chunks_exact(row_size).zip(out) {
        let row = F::elements(row);
        let mut sums = [0.0f32; 16];
        let (weights, weights_rest) = row.as_chunks::<16>();
        let (values, values_rest) = act.as_chunks::<16>();
        for (weights, values) in weights.iter().zip(values) {
            for j in 0..16 {
                sums[j] += weights[j].to_f32() * values[j].get();
            }
        }
        let rest: f32 = weights_rest
            .iter()
            .zip(values_rest)
            .map(|(w, a)| w.to_f32() * a.get())
            .sum();
        *out = sums.iter().sum::<f32>() + rest;
    }
}

/// Widens a floating-point row.
#[inline(always)]
pub fn dequantize_float<F: FloatFormat>(row: &[u8], out: &mut [f32]) {
    for (weight, out) in F::elements(row).iter().zip(out) {
        *out = weight.to_f32();
    }
}
