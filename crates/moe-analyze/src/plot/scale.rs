//! The scale of an axis in pixels, and its labelled values.

use plotters::coord::ranged1d::{BoldPoints, DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::{RangedCoordf64, RangedCoordi64};

use super::{Axis, Ticks};

/// Minimum distance in pixels between two labels on an axis: on a vertical axis, and between the ends of labels on a horizontal axis.
const TICK_HEIGHT: f64 = 18.0;
const TICK_GAP: f64 = 10.0;
/// Width of a character in pixels.
const CHARACTER: f64 = 7.0;

/// The scale of an axis.
pub struct Scale {
    range: (f64, f64),
    /// Labelled values with their labels.
    ticks: Vec<(f64, String)>,
}

impl Scale {
    /// Creates the scale of a horizontal axis of `pixels` length.
    pub fn horizontal(axis: &Axis, pixels: u32) -> Scale {
        Scale::new(axis, pixels, |text| {
            CHARACTER * text.chars().count() as f64 + TICK_GAP
        })
    }

    /// Creates the scale of a vertical axis of `pixels` length.
    pub fn vertical(axis: &Axis, pixels: u32) -> Scale {
        Scale::new(axis, pixels, |_| TICK_HEIGHT)
    }

    /// Creates the scale of an axis. `room` returns the pixels that a label needs.
    fn new(axis: &Axis, pixels: u32, room: impl Fn(&str) -> f64) -> Scale {
        let (first, last) = axis.range;
        let place = |value: f64| (value - first) / (last - first) * f64::from(pixels);
        let longest = candidates(axis, 11)
            .into_iter()
            .map(|(_, name)| room(&name));
        let most = f64::from(pixels) / longest.fold(1.0, f64::max);
        let mut ticks: Vec<(f64, String)> = Vec::new();
        for (value, name) in candidates(axis, (most as usize).clamp(2, 11)) {
            let is_free = |(other, other_name): &(f64, String)| {
                let needed = (room(&name) + room(other_name)) / 2.0;
                (place(*other) - place(value)).abs() >= needed
            };
            if ticks.iter().all(is_free) {
                ticks.push((value, name));
            }
        }
        Scale {
            range: axis.range,
            ticks,
        }
    }

    fn coordinate(&self) -> RangedCoordf64 {
        RangedCoordf64::from(self.range.0..self.range.1)
    }

    /// Returns a function from values to their labels.
    pub fn labels(&self) -> impl Fn(&f64) -> String + use<> {
        let ticks = self.ticks.clone();
        move |value| {
            let named = ticks.iter().find(|(tick, _)| tick == value);
            named.map_or(String::new(), |(_, name)| name.clone())
        }
    }
}

/// Returns the values of an axis that can be labelled: at most `n` round numbers, or all names.
fn candidates(axis: &Axis, n: usize) -> Vec<(f64, String)> {
    let (first, last) = axis.range;
    let numbers = || {
        let range = RangedCoordf64::from(first.min(last)..first.max(last));
        // Steps are 1, 2 or 5 times a power of ten. More digits are rounding errors.
        let name = |value: f64| (value, format!("{}", (value * 1e3).round() / 1e3));
        range.key_points(BoldPoints(n)).into_iter().map(name)
    };
    match &axis.ticks {
        Ticks::Numbers => numbers().collect(),
        Ticks::Integers => numbers()
            .filter(|(value, _)| value.fract() == 0.0)
            .collect(),
        Ticks::Names(names) => names.clone(),
        Ticks::Numbered(all) => {
            let (least, most) = (all.iter().min(), all.iter().max());
            let (Some(&least), Some(&most)) = (least, most) else {
                return Vec::new();
            };
            let range = RangedCoordi64::from(least.into()..most.into());
            let round = range.key_points(BoldPoints(n));
            let named = all.iter().enumerate();
            let named = named.filter(|&(_, &number)| round.contains(&number.into()));
            named
                .map(|(place, number)| (place as f64, number.to_string()))
                .collect()
        }
    }
}

impl Ranged for Scale {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.coordinate().map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() {
            return Vec::new();
        }
        self.ticks.iter().map(|(value, _)| *value).collect()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.range.0..self.range.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(scale: &Scale) -> Vec<&str> {
        scale.ticks.iter().map(|(_, name)| name.as_str()).collect()
    }

    #[test]
    fn ticks_are_round_numbers_that_do_not_overlap() {
        let percent = Axis::numbers("", 0.0, 100.0);
        assert_eq!(Scale::vertical(&percent, 420).ticks.len(), 11);
        assert_eq!(names(&Scale::vertical(&percent, 60)), ["0", "50", "100"]);
        let share = Axis::numbers("", 0.0, 1.0);
        assert_eq!(names(&Scale::vertical(&share, 400))[3], "0.3");
        let layers = Axis::integers("", 3.0, 5.0);
        assert_eq!(names(&Scale::horizontal(&layers, 700)), ["3", "4", "5"]);
        let large = Axis::numbers("", 0.0, 5e9);
        for pixels in [0, 1, 40, 200, 5000] {
            let scale = Scale::horizontal(&large, pixels);
            let places: Vec<f64> = scale
                .ticks
                .iter()
                .map(|(v, _)| v / 5e9 * f64::from(pixels))
                .collect();
            assert!(
                places.windows(2).all(|pair| pair[1] - pair[0] >= 70.0),
                "{pixels}"
            );
        }
    }

    #[test]
    fn labels_numbers_at_their_positions() {
        let layers = Axis::numbered("", vec![1, 3, 5, 10, 20, 23]);
        let scale = Scale::vertical(&layers, 200);
        assert!(scale.ticks.contains(&(3.0, "10".into())));
        assert!(scale.ticks.contains(&(4.0, "20".into())));
        assert!(
            Scale::vertical(&Axis::numbered("", Vec::new()), 200)
                .ticks
                .is_empty()
        );
    }

    #[test]
    fn keeps_the_more_important_of_overlapping_names() {
        let axis = Axis {
            ticks: Ticks::Names(vec![
                (0.0, "0".into()),
                (0.97, "1".into()),
                (1.0, "1.1".into()),
            ]),
            ..Axis::numbers("", 0.0, 1.0)
        };
        assert_eq!(names(&Scale::vertical(&axis, 160)), ["0", "1"]);
    }
}
