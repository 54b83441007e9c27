//! Heat maps of layers × experts.

use moe_trace::LayerId;

use super::{Axis, Figure, Key, Mark, Panel, Ticks, colour};

/// A heat map: a value for each layer and expert, relative to a uniform share.
pub struct HeatMap {
    /// First line.
    pub title: String,
    /// Second line, smaller.
    pub subtitle: String,
    /// Block numbers of the rows, top to bottom.
    pub layers: Vec<LayerId>,
    /// Quantity of the columns.
    pub x_label: &'static str,
    /// `[n_layer][n_expert]`; 1 is a uniform share.
    pub values: Vec<Vec<f64>>,
}

/// Width and height of the colour scale, in pixels.
const SCALE_WIDTH: u32 = 18;
const SCALE_HEIGHT: std::ops::RangeInclusive<u32> = 160..=360;
/// Number of colours in the scale.
const N_SHADES: u32 = 120;

impl HeatMap {
    fn highest(&self) -> f64 {
        self.values.iter().flatten().copied().fold(1.0, f64::max)
    }

    /// Returns width and height of a cell in pixels. Cells are as large as fits a screen, with a minimum so that all are visible.
    fn cell(&self, n_expert: u32) -> (u32, u32) {
        let n_layer = (self.layers.len() as u32).max(1);
        (
            (1200 / n_expert.max(1)).clamp(2, 64),
            (640 / n_layer).clamp(4, 40),
        )
    }

    pub fn figure(self) -> Figure {
        let highest = self.highest();
        let n_expert = self.values.iter().map(Vec::len).max().unwrap_or(0) as u32;
        let (width, height) = self.cell(n_expert);
        // One more pixel, because the last pixel belongs to the last value.
        let size = (
            n_expert.max(1) * width + 1,
            (self.layers.len() as u32).max(1) * height + 1,
        );
        // Only large cells have a gap between them.
        let gap = u32::from(width >= 10 && height >= 10);
        let x = Axis::numbered(self.x_label, (0..n_expert).collect());
        let y = Axis::numbered(
            "layer",
            self.layers.iter().map(|layer| layer.0.into()).collect(),
        )
        .reversed();
        let mut marks = Vec::new();
        if gap == 0 {
            let corners = [(x.range.0, y.range.0), (x.range.1, y.range.1)];
            marks.push(Mark::area(corners, colour::scale(0.0)));
        }
        for (row, values) in self.values.iter().enumerate() {
            for (column, &value) in values.iter().enumerate() {
                // Without gaps, the background shows cells with the value 0.
                if value == 0.0 && gap == 0 {
                    continue;
                }
                let (x, y) = (column as f64, row as f64);
                marks.push(Mark::Area {
                    corners: [(x - 0.5, y - 0.5), (x + 0.5, y + 0.5)],
                    colour: colour::scale(scale_fraction(value, highest)),
                    gap,
                });
            }
        }
        Figure {
            title: self.title,
            subtitle: self.subtitle,
            key: Key::Scale(scale(highest, size.1)),
            panels: vec![Panel {
                title: String::new(),
                size,
                x,
                y,
                marks,
            }],
        }
    }
}

/// Returns the colour scale of a map with maximum `highest`.
fn scale(highest: f64, height: u32) -> Panel {
    let edge = |shade: u32| f64::from(shade) / f64::from(N_SHADES);
    let shades = (0..N_SHADES).map(|shade| {
        let corners = [(0.0, edge(shade)), (1.0, edge(shade + 1))];
        Mark::area(
            corners,
            colour::scale((edge(shade) + edge(shade + 1)) / 2.0),
        )
    });
    let numbers = [0.0, 1.0, highest, 64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 0.5];
    let ticks = numbers.into_iter().filter(|&value| value <= highest);
    let name = |value: f64| {
        if value.fract() == 0.0 {
            value.to_string()
        } else {
            format!("{value:.1}")
        }
    };
    Panel {
        title: String::new(),
        size: (
            SCALE_WIDTH,
            height.clamp(*SCALE_HEIGHT.start(), *SCALE_HEIGHT.end()),
        ),
        x: Axis {
            ticks: Ticks::Names(Vec::new()),
            ..Axis::numbers("", 0.0, 1.0)
        },
        y: Axis {
            ticks: Ticks::Names(
                ticks
                    .map(|value| (scale_fraction(value, highest), name(value)))
                    .collect(),
            ),
            ..Axis::numbers("relative to a uniform router (×)", 0.0, 1.0)
        },
        marks: shades.collect(),
    }
}

/// Returns the position of a value on the scale, from 0 to 1. The square root spreads the many small values next to a few very large
/// ones.
fn scale_fraction(value: f64, highest: f64) -> f64 {
    (value / highest).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a map with a few hot experts and a long tail.
    fn example(n_layer: u32, n_expert: u32) -> HeatMap {
        let weight = |layer: u32, expert: u32| {
            let place = (expert * 37 + layer * 101) % n_expert;
            if place % 5 == 4 {
                0.0
            } else {
                1.0 / f64::from(1 + place)
            }
        };
        let values = (0..n_layer).map(|layer| {
            let weights: Vec<f64> = (0..n_expert).map(|expert| weight(layer, expert)).collect();
            let uniform = weights.iter().sum::<f64>() / f64::from(n_expert);
            weights.into_iter().map(|weight| weight / uniform).collect()
        });
        HeatMap {
            title: String::new(),
            subtitle: String::new(),
            x_label: "expert",
            layers: (3..).map(LayerId).take(n_layer as usize).collect(),
            values: values.collect(),
        }
    }

    #[test]
    fn every_expert_has_a_cell() {
        for (n_layer, n_expert) in [(1, 1), (2, 8), (48, 128), (94, 512)] {
            let map = example(n_layer, n_expert);
            let (width, height) = map.cell(n_expert);
            let has_gap = width >= 10 && height >= 10;
            let values = map.values.iter().flatten();
            let n_cells = values.filter(|&&value| has_gap || value > 0.0).count();
            let panel = &map.figure().panels[0];
            assert_eq!(panel.size, (n_expert * width + 1, n_layer * height + 1));
            assert_eq!(panel.marks.len(), n_cells + usize::from(!has_gap));
        }
    }

    #[test]
    fn scale_labels_zero_and_the_uniform_share_first() {
        for highest in [1.0, 1.06, 2.1, 500.0] {
            let Ticks::Names(names) = scale(highest, 200).y.ticks else {
                panic!("names");
            };
            assert_eq!(names[0], (0.0, "0".into()));
            assert_eq!(names[1], ((1.0f64 / highest).sqrt(), "1".into()));
            assert_eq!(names[2].0, 1.0);
            assert!(names.iter().all(|(place, _)| *place <= 1.0));
        }
    }
}
