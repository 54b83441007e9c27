//! Rotary position embedding in the NeoX layout: element `i` of a head is paired with `i + n_dims / 2`.

use crate::hparams::Rope;

/// Angles of one position, interleaved `(cos, sin)` for each pair; `n_dims` values.
///
/// YaRN as in "YaRN: Efficient Context Window Extension of Large Language Models" (Peng et al., 2023), section 3:
/// dimensions that turn fast keep their frequency, slow ones are interpolated, and the magnitude grows by
/// `1 + 0.1 ln(factor)`.
pub fn angles(rope: &Rope, position: usize, out: &mut [f32]) {
    let n_dims = rope.n_dims;
    let theta_scale = rope.freq_base.powf(-2.0 / n_dims as f32);
    let correction = |beta: f32| {
        let turns = rope.n_ctx_orig as f32 / (beta * 2.0 * std::f32::consts::PI);
        n_dims as f32 * turns.ln() / (2.0 * rope.freq_base.ln())
    };
    let low = correction(rope.beta.0).floor().max(0.0);
    let high = correction(rope.beta.1).ceil().min(n_dims as f32 - 1.0);
    let yarn = rope.ext_factor != 0.0;
    let magnitude = if yarn {
        1.0 + 0.1 * (1.0 / rope.freq_scale).ln()
    } else {
        1.0
    };

    let mut theta = position as f32;
    for (i, pair) in out[..n_dims].chunks_exact_mut(2).enumerate() {
        let mut angle = rope.freq_scale * theta;
        if yarn {
            let ramp = (i as f32 - low) / (high - low).max(0.001);
            let mix = (1.0 - ramp.clamp(0.0, 1.0)) * rope.ext_factor;
            angle = angle * (1.0 - mix) + theta * mix;
        }
        pair[0] = angle.cos() * magnitude;
        pair[1] = angle.sin() * magnitude;
        theta *= theta_scale;
    }
}

/// Rotates one head in place by the angles of its position.
pub fn rotate(head: &mut [f32], angles: &[f32]) {
    let half = angles.len() / 2;
    let (first, second) = head.split_at_mut(half);
    for ((a, b), pair) in first.iter_mut().zip(second).zip(angles.chunks_exact(2)) {
        let (x, y) = (*a, *b);
        *a = x * pair[0] - y * pair[1];
        *b = x * pair[1] + y * pair[0];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(n_dims: usize) -> Rope {
        Rope {
            n_dims,
            freq_base: 10_000.0,
            freq_scale: 1.0,
            ext_factor: 0.0,
            n_ctx_orig: 1024,
            beta: (32.0, 1.0),
        }
    }

    #[test]
    fn position_zero_is_the_identity() {
        let mut cache = [0.0; 8];
        angles(&plain(8), 0, &mut cache);
        let mut head = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        rotate(&mut head, &cache);
        assert_eq!(head, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    }

    #[test]
    fn first_pair_turns_by_one_radian_a_position() {
        let mut cache = [0.0; 4];
        angles(&plain(4), 1, &mut cache);
        let mut head = [1.0, 0.0, 0.0, 0.0];
        rotate(&mut head, &cache);
        assert!((head[0] - 1f32.cos()).abs() < 1e-6 && (head[2] - 1f32.sin()).abs() < 1e-6);
        // the second pair turns by freq_base^(-2/4) = 0.01
        assert!((cache[3] - 0.01f32.sin()).abs() < 1e-6);
    }

    #[test]
    fn yarn_keeps_fast_dimensions_and_interpolates_slow_ones() {
        // gpt-oss: 64 dimensions, base 150000, factor 32, original context 4096
        let rope = Rope {
            n_dims: 64,
            freq_base: 150_000.0,
            freq_scale: 1.0 / 32.0,
            ext_factor: 1.0,
            n_ctx_orig: 4096,
            beta: (32.0, 1.0),
        };
        let mut cache = [0.0; 64];
        angles(&rope, 1, &mut cache);
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
