//! Colours of lines, areas and heat maps.

/// Red, green and blue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Colour(pub u8, pub u8, pub u8);

/// Colours of lines, which differ in hue and lightness.
pub const LINES: [Colour; 8] = [
    Colour(40, 40, 48),
    Colour(202, 60, 60),
    Colour(38, 110, 184),
    Colour(240, 150, 40),
    Colour(60, 150, 84),
    Colour(140, 84, 170),
    Colour(0, 160, 170),
    Colour(216, 108, 162),
];

/// Colour of reference lines.
pub const REFERENCE: Colour = Colour(150, 150, 158);

/// Colours of areas, with different lightness, so that they are distinct in greyscale.
pub const SLATE: Colour = Colour(166, 178, 196);
pub const ORANGE: Colour = Colour(250, 178, 106);
pub const RED: Colour = Colour(196, 66, 92);
pub const PURPLE: Colour = Colour(74, 16, 92);

/// Evenly spaced stops of the scale, from light (0) to dark (1). The lightness decreases monotonically, so that the scale is readable in
/// greyscale.
const STOPS: [Colour; 7] = [
    Colour(252, 250, 236),
    Colour(252, 222, 156),
    Colour(250, 178, 106),
    Colour(235, 122, 82),
    Colour(196, 66, 92),
    Colour(122, 30, 108),
    Colour(38, 12, 66),
];

/// Returns the colour of a value from 0 to 1. Values outside of the range are clamped.
pub fn scale(value: f64) -> Colour {
    let position = value.clamp(0.0, 1.0) * (STOPS.len() - 1) as f64;
    let left = (position as usize).min(STOPS.len() - 2);
    let fraction = position - left as f64;
    let (from, to) = (STOPS[left], STOPS[left + 1]);
    let mix = |from: u8, to: u8| {
        (f64::from(from) + fraction * (f64::from(to) - f64::from(from))).round() as u8
    };
    Colour(mix(from.0, to.0), mix(from.1, to.1), mix(from.2, to.2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lightness_decreases_monotonically() {
        // Luma of ITU-R BT.709 on the encoded values.
        let luma =
            |c: Colour| 0.2126 * f64::from(c.0) + 0.7152 * f64::from(c.1) + 0.0722 * f64::from(c.2);
        let lumas: Vec<f64> = (0..=100)
            .map(|i| luma(scale(f64::from(i) / 100.0)))
            .collect();
        for pair in lumas.windows(2) {
            assert!(pair[0] > pair[1], "{pair:?}");
        }
        assert!(lumas[0] - lumas[100] > 200.0);
    }
}
