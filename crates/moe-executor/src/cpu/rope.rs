//! Rotary position embedding (Su et al., "RoFormer", 2021) with YaRN.

use crate::cpu::threads::Threads;
use crate::hparams::{Rope, RopeLayout};
use crate::mirrored::Mirrored;

/// Cosines and sines of the positions of a batch. They are the same for queries and keys of all layers, so they are computed
/// once per pass.
#[derive(Default)]
pub struct Angles {
    /// The parameters, and whether there are divisors.
    key: Option<(Rope, bool)>,
    positions: Vec<u32>,
    values: Mirrored<f32>,
}

impl Angles {
    /// The values of [`angles`] for each position `(position, n_dims)`. They are cached by `rope`, `positions`, and whether there are
    /// divisors, which must always be the same for the same `rope`.
    pub fn of(
        &mut self,
        threads: &Threads,
        rope: &Rope,
        divisors: Option<&[f32]>,
        positions: &[u32],
    ) -> &mut Mirrored<f32> {
        let key = Some((*rope, divisors.is_some()));
        if self.key != key || self.positions != positions {
            self.key = key;
            self.positions.clear();
            self.positions.extend(positions);
            self.values.resize(positions.len() * rope.n_dims);
            threads.rows(self.values.host_mut(), rope.n_dims, |i, out| {
                angles(rope, divisors, positions[i] as usize, out);
            });
        }
        &mut self.values
    }
}

/// Cosine and sine of each pair at one position, interleaved: `n_dims` values `(cos, sin)`. `divisors (n_dims / 2)` divide the
/// frequencies.
///
/// YaRN is that of Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023), section 3: pairs
/// with high frequencies keep them, low frequencies are interpolated, and the vectors are multiplied by
/// `1 + 0.1 ln(factor)`.
pub fn angles(rope: &Rope, divisors: Option<&[f32]>, position: usize, out: &mut [f32]) {
    let n_dims = rope.n_dims;
    let theta_scale = rope.freq_base.powf(-2.0 / n_dims as f32);
    let correction = |beta: f32| {
        let turns = rope.n_ctx_orig as f32 / (beta * 2.0 * std::f32::consts::PI);
        n_dims as f32 * turns.ln() / (2.0 * rope.freq_base.ln())
    };
    let low = correction(rope.beta.0).floor().max(0.0);
    let high = correction(rope.beta.1).ceil().min(n_dims as f32 - 1.0);
    let yarn = rope.ext_factor != 0.0;
    let magnitude = if yarn && rope.freq_scale < 1.0 {
        rope.attn_factor * (1.0 + 0.1 * (1.0 / rope.freq_scale).ln())
    } else {
        rope.attn_factor
    };

    let mut turned = position as f32;
    for (i, pair) in out[..n_dims].chunks_exact_mut(2).enumerate() {
        let theta = divisors.map_or(turned, |d| turned / d[i]);
        let mut angle = rope.freq_scale * theta;
        if yarn {
            let ramp = (i as f32 - low) / (high - low).max(0.001);
            let mix = (1.0 - ramp.clamp(0.0, 1.0)) * rope.ext_factor;
            angle = angle * (1.0 - mix) + theta * mix;
        }
        pair[0] = angle.cos() * magnitude;
        pair[1] = angle.sin() * magnitude;
        turned *= theta_scale;
    }
}

/// Rotates one head in place by the values of [`angles`].
pub fn rotate(layout: RopeLayout, head: &mut [f32], angles: &[f32]) {
    let turn = |a: &mut f32, b: &mut f32, angle: &[f32]| {
        (*a, *b) = (*a * angle[0] - *b * angle[1], *a * angle[1] + *b * angle[0]);
    };
    let angles = angles.chunks_exact(2);
    match layout {
        RopeLayout::Halves => {
            let (first, second) = head.split_at_mut(head.len() / 2);
            let pairs = first.iter_mut().zip(second);
            pairs
                .zip(angles)
                .for_each(|((a, b), angle)| turn(a, b, angle));
        }
        RopeLayout::Neighbours => {
            let pairs = head.as_chunks_mut().0.iter_mut();
            pairs
                .zip(angles)
                .for_each(|([a, b], angle)| turn(a, b, angle));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(n_dims: usize) -> Rope {
        Rope {
            n_dims,
            layout: RopeLayout::Halves,
            freq_base: 10_000.0,
            freq_scale: 1.0,
            ext_factor: 0.0,
            attn_factor: 1.0,
            n_ctx_orig: 1024,
            beta: (32.0, 1.0),
        }
    }

    #[test]
    fn position_zero_is_the_identity() {
        let mut cache = [0.0; 8];
        angles(&plain(8), None, 0, &mut cache);
        let mut head = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        rotate(RopeLayout::Halves, &mut head, &cache);
        assert_eq!(head, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    }

    #[test]
    fn recomputes_angles_for_other_parameters_or_positions() {
        let threads = Threads::new(1).unwrap();
        let mut kept = Angles::default();
        let other = Rope {
            freq_base: 500.0,
            ..plain(8)
        };
        let divisors = Some(&[1.0, 2.0, 4.0, 8.0][..]);
        for (rope, divisors, positions) in [
            (plain(8), None, [3, 4]),
            (plain(8), None, [3, 4]),
            (plain(8), divisors, [3, 4]),
            (other, None, [3, 4]),
            (other, None, [4, 9]),
        ] {
            let got = kept.of(&threads, &rope, divisors, &positions);
            let got = got.host().to_vec();
            for (got, position) in got.chunks_exact(8).zip(positions) {
                let mut want = [0.0; 8];
                angles(&rope, divisors, position as usize, &mut want);
                assert_eq!(got, want);
            }
        }
    }

    #[test]
    fn first_pair_rotates_by_one_radian_per_position() {
        let mut cache = [0.0; 4];
        angles(&plain(4), None, 1, &mut cache);
        let mut head = [1.0, 0.0, 0.0, 0.0];
        rotate(RopeLayout::Halves, &mut head, &cache);
        assert!((head[0] - 1f32.cos()).abs() < 1e-6 && (head[2] - 1f32.sin()).abs() < 1e-6);
        // The second pair rotates by freq_base^(-2/4) = 0.01.
        assert!((cache[3] - 0.01f32.sin()).abs() < 1e-6);
    }

    #[test]
    fn both_layouts_rotate_by_the_same_angles() {
        let mut cache = [0.0; 6];
        angles(&plain(6), Some(&[1.0, 2.0, 4.0]), 3, &mut cache);
        let mut halves = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut neighbours = [1.0, 4.0, 2.0, 5.0, 3.0, 6.0];
        rotate(RopeLayout::Halves, &mut halves, &cache);
        rotate(RopeLayout::Neighbours, &mut neighbours, &cache);
        for i in 0..3 {
            assert_eq!(neighbours[2 * i..2 * i + 2], [halves[i], halves[i + 3]]);
        }
        // The second of three pairs rotates by freq_base^(-2/6) per position, here divided by 2.
        let slow = 3.0 * 10_000f32.powf(-1.0 / 3.0) / 2.0;
        assert!((cache[2] - slow.cos()).abs() < 1e-6 && (cache[3] - slow.sin()).abs() < 1e-6);
    }

    #[test]
    fn yarn_keeps_high_frequencies_and_interpolates_low_ones() {
        // gpt-oss: 64 dimensions, base 150,000, factor 32, original context 4096.
        let rope = Rope {
            n_dims: 64,
            layout: RopeLayout::Halves,
            freq_base: 150_000.0,
            freq_scale: 1.0 / 32.0,
            ext_factor: 1.0,
            attn_factor: 1.0,
            n_ctx_orig: 4096,
            beta: (32.0, 1.0),
        };
        let mut cache = [0.0; 64];
        angles(&rope, None, 1, &mut cache);
        let magnitude = 1.0 + 0.1 * 32f32.ln();
        assert!(
            (cache[0] - 1f32.cos() * magnitude).abs() < 1e-5,
            "the fastest pair keeps its angle"
        );
        let slowest = 150_000f32.powf(-62.0 / 64.0) / 32.0;
        assert!(
            (cache[63] - slowest.sin() * magnitude).abs() < 1e-8,
            "the slowest pair is interpolated"
        );
    }
}
