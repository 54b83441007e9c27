//! Portable products and decoding for all formats.
//!
//! The functions are `inline(always)`, so that the x86 modules compile them with their own target features.

use zerocopy::FromBytes;
use zerocopy::byteorder::little_endian::F32;

use super::ActivationType;
use super::activation::{Q8Row, floats};
use super::float::FloatFormat;
use super::format::{Format, Unpacked};
use super::gemm::{Product, Put};

/// The blocks of a row.
#[inline(always)]
pub fn blocks<F: Format>(row: &[u8]) -> &[F] {
    <[F]>::ref_from_bytes(row).expect("the size of a row is a multiple of the block size")
}

/// The activations of a token.
#[inline(always)]
pub fn activations<'a, F: Format>(product: &Product<'a>, token: usize) -> Q8Row<'a> {
    Q8Row::new(F::ACTIVATION, product.n, (product.act)(token))
}

/// The products of all rows and tokens.
#[inline(always)]
pub fn stream<F: Format>(product: &Product, put: &mut Put) {
    for token in 0..product.n_tokens {
        let act = activations::<F>(product, token);
        product.stream(token, put, |[row]| [[dot::<F>(blocks(row), &act)]]);
    }
}

/// The inner product of a row with activations. Sums within a group are exact, in integers.
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

/// The scale of the activations at element `at`.
#[inline(always)]
fn scale<F: Format>(act: &Q8Row, at: usize) -> f32 {
    match F::ACTIVATION {
        ActivationType::Q8K => act.scale[at / 256].get(),
        _ => act.scale[at / 32].get(),
    }
}

/// `scale * sum of codes` of the activations of the group that starts at element `at`.
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

/// Decodes a row with the arithmetic of ggml: `scale * q - min`.
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

/// The activations of a token, for floating-point rows.
#[inline(always)]
pub fn float_activations<'a, F: FloatFormat>(product: &Product<'a>, token: usize) -> &'a [F32] {
    floats(product.n, (product.act)(token))
}

/// [`stream`] for floating-point rows.
#[inline(always)]
pub fn stream_float<F: FloatFormat>(product: &Product, put: &mut Put) {
    for token in 0..product.n_tokens {
        let act = float_activations::<F>(product, token);
        product.stream(token, put, |[row]| {
            [[dot_float::<F>(F::elements(row), act)]]
        });
    }
}

/// The inner product of a floating-point row with activations. Sixteen partial sums make the additions independent.
#[inline(always)]
fn dot_float<F: FloatFormat>(row: &[F], act: &[F32]) -> f32 {
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
    sums.iter().sum::<f32>() + rest
}

/// Converts a floating-point row to f32.
#[inline(always)]
pub fn dequantize_float<F: FloatFormat>(row: &[u8], out: &mut [f32]) {
    for (weight, out) in F::elements(row).iter().zip(out) {
        *out = weight.to_f32();
    }
}
