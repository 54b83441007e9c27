//! Causal convolution of the tokens of a sequence, with a kernel for each channel.

use std::ops::Range;

use crate::cpu::threads::Threads;

/// `out[t] = Σ kernel[i] · input[t + i]` for each channel, where the input consists of `past` and `x`. Afterwards `past` contains the
/// last inputs.
///
/// Shapes: `kernel (n, channels)`, the oldest input first; `past (n - 1, channels)`; `x` and `out (token, channels)`. Like in ggml's
/// `ssm_conv`, the sum starts with the oldest input.
pub fn convolve(
    threads: &Threads,
    channels: usize,
    kernel: &[f32],
    past: &mut [f32],
    x: &[f32],
    out: &mut [f32],
) {
    convolve_to_columns(threads, 0..channels, kernel, past, x, (out, channels));
}

/// Like [`convolve`], with as many channels as `columns`: the result is these columns of `out (token, width)`, whose other columns do not
/// change.
pub fn convolve_to_columns(
    threads: &Threads,
    columns: Range<usize>,
    kernel: &[f32],
    past: &mut [f32],
    x: &[f32],
    (out, width): (&mut [f32], usize),
) {
    let channels = columns.len();
    let n_past = past.len() / channels.max(1);
    let before = &*past;
    let row = |i: usize| match i.checked_sub(n_past) {
        None => &before[i * channels..][..channels],
        Some(token) => &x[token * channels..][..channels],
    };
    threads.rows(out, width.max(1), |token, out| {
        let out = &mut out[columns.clone()];
        out.fill(0.0);
        for (i, weights) in kernel.chunks_exact(channels.max(1)).enumerate() {
            let products = row(token + i).iter().zip(weights);
            for (out, (x, weight)) in out.iter_mut().zip(products) {
                *out += x * weight;
            }
        }
    });
    let n = past.len();
    let kept = n.saturating_sub(x.len());
    past.copy_within(n - kept.., 0);
    past[kept..].copy_from_slice(&x[x.len() - (n - kept)..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANNELS: usize = 5;

    fn values(n: usize, factor: usize) -> Vec<f32> {
        let value = |i: usize| ((i * factor) % 29) as f32 / 7.0 - 2.0;
        (0..n).map(value).collect()
    }

    /// All outputs for the inputs `x (token, channel)` of a sequence, in f64.
    fn reference(kernel: &[f32], x: &[f32]) -> Vec<f64> {
        let n = kernel.len() / CHANNELS;
        let output = |at: usize| {
            let (token, channel) = (at / CHANNELS, at % CHANNELS);
            let term = |i: usize| {
                let input = (token + i + 1).checked_sub(n)?;
                let x = f64::from(x[input * CHANNELS + channel]);
                Some(x * f64::from(kernel[i * CHANNELS + channel]))
            };
            (0..n).filter_map(term).sum::<f64>()
        };
        (0..x.len()).map(output).collect()
    }

    #[test]
    fn parts_of_a_sequence_agree_with_the_formula() {
        let threads = Threads::new(2).unwrap();
        for n in 1..6 {
            let kernel = values(n * CHANNELS, 11);
            let x = values(16 * CHANNELS, 17);
            let expected = reference(&kernel, &x);
            for sizes in [vec![16], vec![1; 16], vec![7, 1, 2, 6]] {
                let mut past = vec![0.0; (n - 1) * CHANNELS];
                let mut got = Vec::new();
                for size in sizes {
                    let x = &x[got.len()..][..size * CHANNELS];
                    let mut out = vec![f32::NAN; x.len()];
                    convolve(&threads, CHANNELS, &kernel, &mut past, x, &mut out);
                    got.extend(out);
                }
                for (got, expected) in got.iter().zip(&expected) {
                    assert!((f64::from(*got) - expected).abs() < 1e-4, "{n}");
                }
                assert_eq!(past, x[(17 - n) * CHANNELS..], "{n}");
            }
        }
    }

    #[test]
    fn parts_of_channels_agree_with_all_channels() {
        let threads = Threads::new(2).unwrap();
        let (n, tokens) = (4, 9);
        let (kernel, x) = (values(n * CHANNELS, 11), values(tokens * CHANNELS, 17));
        let expected = reference(&kernel, &x);
        let mut out = vec![f32::NAN; x.len()];
        for columns in [0..2, 2..CHANNELS] {
            let of_part = |all: &[f32]| {
                let rows = all.chunks_exact(CHANNELS);
                rows.flat_map(|row| row[columns.clone()].to_vec())
                    .collect::<Vec<f32>>()
            };
            let (kernel, x) = (of_part(&kernel), of_part(&x));
            let mut past = vec![0.0; (n - 1) * columns.len()];
            let out = (out.as_mut_slice(), CHANNELS);
            convolve_to_columns(&threads, columns.clone(), &kernel, &mut past, &x, out);
            assert_eq!(past, x[x.len() - past.len()..]);
        }
        for (got, expected) in out.iter().zip(&expected) {
            assert!((f64::from(*got) - expected).abs() < 1e-4);
        }
    }
}
