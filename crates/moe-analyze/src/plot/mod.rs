//! Plots as PNG or SVG: heat maps of layers × experts, memory and a pass over time, and curves.
//!
//! A plot is data, a [`Figure`] of panels with marks in the units of their axes. [`render`] draws every figure in one frame: title,
//! panels one below the other, and a legend or a colour scale on the right.

mod chart;
mod colour;
mod heat_map;
mod occupancy;
mod pass_timeline;
#[cfg(feature = "plot")]
mod render;

use std::path::Path;

use anyhow::bail;
use moe_files::AtomicFile;

pub use chart::{Chart, Line};
pub use colour::Colour;
pub use heat_map::HeatMap;
pub use occupancy::occupancy;
pub use pass_timeline::pass_timeline;

/// A place in the units of a panel's axes.
pub type Point = (f64, f64);

/// A plot.
pub struct Figure {
    /// First line.
    pub title: String,
    /// Second line, smaller.
    pub subtitle: String,
    /// From top to bottom.
    pub panels: Vec<Panel>,
    /// Right of the panels.
    pub key: Key,
}

/// What explains the colours of a figure.
pub enum Key {
    /// Names, from top to bottom.
    Legend(Vec<(String, Sample)>),
    /// A bar of colours, whose values are at its y axis.
    Scale(Panel),
}

/// How a name of the legend looks in the plot.
#[derive(Clone, Copy)]
pub enum Sample {
    Area(Colour),
    Line(LineStyle),
}

/// Marks over two axes.
pub struct Panel {
    /// Above the panel; may be empty.
    pub title: String,
    /// Width and height between the axes, in pixels.
    pub size: (u32, u32),
    pub x: Axis,
    pub y: Axis,
    /// In the order in which they are drawn.
    pub marks: Vec<Mark>,
}

/// An axis.
pub struct Axis {
    /// Quantity and unit; may be empty where the ticks are names.
    pub label: String,
    /// First and last value; the first is greater where an axis is reversed.
    pub range: (f64, f64),
    pub ticks: Ticks,
}

/// The values that are named on an axis, as far as there is room.
pub enum Ticks {
    /// Round numbers.
    Numbers,
    /// Round integers.
    Integers,
    /// The value `i` is called `numbers[i]`; round numbers are named.
    Numbered(Vec<u32>),
    /// Values and their names, the most important ones first.
    Names(Vec<(f64, String)>),
}

/// What is drawn in a panel.
pub enum Mark {
    /// A rectangle between two corners, at least a pixel wide; `gap` pixels are left free at its right and its foot.
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
    /// Text centred at a place.
    Text { at: Point, text: String },
}

/// How a line looks.
#[derive(Clone, Copy)]
pub struct LineStyle {
    pub colour: Colour,
    /// Pixels.
    pub width: u32,
    /// At each point.
    pub marker: Option<Marker>,
}

/// The shape at the points of a line.
#[derive(Clone, Copy)]
pub enum Marker {
    Square,
    Diamond,
    Triangle,
}

impl Axis {
    /// An axis of numbers. A range that is empty, or not finite, becomes one of length 1.
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

    /// An axis of numbers that names integers alone.
    pub fn integers(label: impl Into<String>, from: f64, to: f64) -> Axis {
        Axis {
            ticks: Ticks::Integers,
            ..Axis::numbers(label, from, to)
        }
    }

    /// An axis with a place of width 1 for each number, centred at 0, 1, 2 and so on.
    pub fn numbered(label: impl Into<String>, numbers: Vec<u32>) -> Axis {
        let n = numbers.len().max(1) as f64;
        Axis {
            label: label.into(),
            range: (-0.5, n - 0.5),
            ticks: Ticks::Numbered(numbers),
        }
    }

    /// The axis from its last value to its first.
    pub fn reversed(self) -> Axis {
        Axis {
            range: (self.range.1, self.range.0),
            ..self
        }
    }
}

impl Mark {
    /// A rectangle without a gap.
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
        _ => bail!(
            "{}: no plot format has that extension; name a .png or .svg file",
            path.display()
        ),
    }
}

/// Refuses a file that is not drawn: by its extension, or because this build has no plots.
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
    /// Draws the figure for a file, PNG or SVG by its extension, which is in its place once it is committed.
    #[cfg(feature = "plot")]
    pub fn prepare(&self, path: &Path, force: bool) -> anyhow::Result<AtomicFile> {
        crate::files::prepare(path, force, |out| match format_of(path)? {
            ImageFormat::Png => render::png(self, out),
            ImageFormat::Svg => render::svg(self, out),
        })
    }

    /// The error of every plot in a build without them.
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
    fn an_axis_has_a_length_whatever_its_values_are() {
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
