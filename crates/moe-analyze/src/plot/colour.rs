//! The colour scale: from pale (never) to dark (often), its lightness falling all the way, so that it reads in grey and in print.

use plotters::style::RGBColor;

/// Evenly spaced stops of the scale.
const STOPS: [(u8, u8, u8); 7] = [
    (252, 250, 236),
    (252, 222, 156),
    (250, 178, 106),
    (235, 122, 82),
    (196, 66, 92),
    (122, 30, 108),
    (38, 12, 66),
];

/// The colour of a value between 0 and 1; values outside are those of the nearer end.
pub fn colour(value: f64) -> RGBColor {
    let position = value.clamp(0.0, 1.0) * (STOPS.len() - 1) as f64;
    let left = (position as usize).min(STOPS.len() - 2);
    let fraction = position - left as f64;
    let (from, to) = (STOPS[left], STOPS[left + 1]);
    let mix = |from: u8, to: u8| {
        (f64::from(from) + fraction * (f64::from(to) - f64::from(from))).round() as u8
    };
    RGBColor(mix(from.0, to.0), mix(from.1, to.1), mix(from.2, to.2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lightness_falls_from_end_to_end() {
        // Luma of ITU-R BT.709 on the encoded values is enough to order them.
        let luma = |c: RGBColor| {
            0.2126 * f64::from(c.0) + 0.7152 * f64::from(c.1) + 0.0722 * f64::from(c.2)
        };
        let lumas: Vec<f64> = (0..=100)
            .map(|i| luma(colour(f64::from(i) / 100.0)))
            .collect();
        for pair in lumas.windows(2) {
            assert!(pair[0] > pair[1], "{pair:?}");
        }
        assert!(lumas[0] - lumas[100] > 200.0);
    }
}
