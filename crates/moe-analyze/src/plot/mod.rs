//! Plots as PNG or SVG: heat maps, line charts, memory over time, and the timeline of a forward pass.
//!
//! A [`Figure`] describes a plot: panels with marks in the units of their axes. [`render`] draws all figures with the same layout: title,
//! panels one below the other, and a legend or a colour scale on the right.

mod chart;
mod colour;
mod heat_map;
mod occupancy;
mod pass_timeline;
#[cfg(feature = "plot")]
mod render;
#[cfg(feature = "plot")]
mod scale;

use std::path::Path;

use anyhow::bail;
use moe_files::AtomicFile;

pub use chart::{Chart, Line};
pub use colour::Colour;
pub use heat_map::HeatMap;
pub use occupancy::occupancy;
pub use pass_timeline::pass_timeline;

/// A position in the units of a panel's axes.
pub type Point = (f64, f64);

/// A plot.
pub struct Figure {
    /// First line.
    pub title: String,
    /// Second line, smaller.
    pub subtitle: String,
    /// Panels from top to bottom.
    pub panels: Vec<Panel>,
    /// Legend or colour scale on the right.
    pub key: Key,
}

/// The explanation of a figure's colours.
pub enum Key {
    /// Names from top to bottom.
    Legend(Vec<(String, Sample)>),
    /// A colour bar with values on its y axis.
    Scale(Panel),
}

/// The sample next to a name in the legend.
#[derive(Clone, Copy)]
pub enum Sample {
    Area(Colour),
    Line(LineStyle),
}

/// Marks on two axes.
pub struct Panel {
    /// Text above the panel; can be empty.
    pub title: String,
    /// Width and height of the plot area in pixels.
    pub size: (u32, u32),
    pub x: Axis,
    pub y: Axis,
    /// Marks in drawing order.
    pub marks: Vec<Mark>,
}

/// An axis.
pub struct Axis {
    /// Quantity and unit; empty if the ticks are names.
    pub label: String,
    /// First and last value. The first value of a reversed axis is greater.
    pub range: (f64, f64),
    pub ticks: Ticks,
}

/// The labelled values of an axis. Labels that would overlap are omitted.
pub enum Ticks {
    /// Round numbers.
    Numbers,
    /// Round integers.
    Integers,
    /// The label of the value `i` is `numbers[i]`. Round numbers are labelled.
    Numbered(Vec<u32>),
    /// Values and their labels, the most important first.
    Names(Vec<(f64, String)>),
}

/// A shape in a panel.
pub enum Mark {
    /// A rectangle between two corners, at least one pixel wide. `gap` pixels stay free at its right and bottom edges.
    Area {
        corners: [Point; 2],
        colour: Colour,
        gap: u32,
    },
    /// Connected points.
    Line {
        points: Vec<Point>,
        style: LineStyle,
    },
    /// Text centred at a position.
    Text { at: Point, text: String },
}

/// Style of a line.
#[derive(Clone, Copy)]
pub struct LineStyle {
    pub colour: Colour,
    /// Width in pixels.
    pub width: u32,
    /// Marker at each point.
    pub marker: Option<Marker>,
}

/// Shape of a marker.
#[derive(Clone, Copy)]
pub enum Marker {
    Square,
    Diamond,
    Triangle,
}

impl Axis {
    /// Creates an axis of numbers. An empty or infinite range is replaced by a finite range.
    pub fn numbers(label: impl Into<String>, from: f64, to: f64) -> Axis {
        let range = if from < to && (to - from).is_finite() {
            (from, to)
        } else if from.is_finite() {
            (from, from + from.abs().max(1.0))
        } else {
            (0.0, 1.0)
        };
        Axis {
            label: label.into(),
            range,
            ticks: Ticks::Numbers,
        }
    }

    /// Creates an axis of numbers with labels only at integers.
    pub fn integers(label: impl Into<String>, from: f64, to: f64) -> Axis {
        Axis {
            ticks: Ticks::Integers,
            ..Axis::numbers(label, from, to)
        }
    }

    /// Creates an axis with an interval of width 1 for each number, centred at 0, 1, 2 and so on.
    pub fn numbered(label: impl Into<String>, numbers: Vec<u32>) -> Axis {
        let n = numbers.len().max(1) as f64;
        Axis {
            label: label.into(),
            range: (-0.5, n - 0.5),
            ticks: Ticks::Numbered(numbers),
        }
    }

    /// Reverses the direction of the axis.
    pub fn reversed(self) -> Axis {
        Axis {
            range: (self.range.1, self.range.0),
            ..self
        }
    }
}

impl Mark {
    /// Creates a rectangle without a gap.
    pub fn area(corners: [Point; 2], colour: Colour) -> Mark {
        let gap = 0;
        Mark::Area {
            corners,
            colour,
            gap,
        }
    }
}

enum ImageFormat {
    Png,
    Svg,
}

fn format_of(path: &Path) -> anyhow::Result<ImageFormat> {
    let extension = path
        .extension()
        .map(|extension| extension.to_ascii_lowercase());
    match extension
        .as_deref()
        .and_then(|extension| extension.to_str())
    {
        Some("png") => Ok(ImageFormat::Png),
        Some("svg") => Ok(ImageFormat::Svg),
        _ => bail!("{}: the extension must be .png or .svg", path.display()),
    }
}

/// Rejects a path with another extension than .png and .svg, and every path in a build without plots.
pub fn check_extension(path: &Path) -> anyhow::Result<()> {
    if !cfg!(feature = "plot") {
        bail!(
            "{}: this program was built without plots; build it with the feature `plot`, which is on by default",
            path.display()
        );
    }
    format_of(path).map(|_| ())
}

impl Figure {
    /// Draws the figure to a file, which appears at its path on commit. The extension selects PNG or SVG.
    #[cfg(feature = "plot")]
    pub fn prepare(&self, path: &Path, force: bool) -> anyhow::Result<AtomicFile> {
        crate::files::prepare(path, force, |out| match format_of(path)? {
            ImageFormat::Png => render::png(self, out),
            ImageFormat::Svg => render::svg(self, out),
        })
    }

    /// Returns an error in a build without plots.
    #[cfg(not(feature = "plot"))]
    pub fn prepare(&self, path: &Path, _force: bool) -> anyhow::Result<AtomicFile> {
        match check_extension(path) {
            Err(error) => Err(error),
            Ok(()) => bail!("{}: not drawn", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_has_a_finite_length_for_any_values() {
        for (from, to) in [
            (0.0, 0.0),
            (3.0, 1.0),
            (f64::NAN, 1.0),
            (0.0, f64::INFINITY),
            (f64::MIN, f64::MAX),
        ] {
            let (from, to) = Axis::numbers("", from, to).range;
            assert!(to > from && (to - from).is_finite(), "{from} {to}");
        }
        assert_eq!(Axis::numbers("", 0.0, 4.0).reversed().range, (4.0, 0.0));
        assert_eq!(Axis::numbered("", vec![7, 9]).range, (-0.5, 1.5));
    }
}
