//! Lines over two axes.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::{Canvas, FRAME, Picture, write_picture};

const WIDTH: i32 = 760;
const LEFT: i32 = 76;
const RIGHT: i32 = 28;
const TOP: i32 = 68;
const HEIGHT: i32 = 400;
/// Below the axes: their ticks and label; then a row for each line's name.
const FOOT: i32 = 64;
const LEGEND_ROW: i32 = 20;

/// A picture of lines.
pub struct Chart {
    /// First line.
    pub title: String,
    /// Second line, smaller.
    pub subtitle: String,
    pub x_label: &'static str,
    pub y_label: &'static str,
    /// First and last value of the axes.
    pub x: (f64, f64),
    pub y: (f64, f64),
    pub lines: Vec<Line>,
}

/// How a line looks; the kinds differ in lightness and width, so that they can be told apart in grey.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reference,
    Plain,
    Strong,
}

/// One line of a chart.
pub struct Line {
    name: &'static str,
    points: Vec<(f64, f64)>,
    kind: Kind,
    has_marks: bool,
}

impl Line {
    /// A line among others.
    pub fn new(name: &'static str, points: Vec<(f64, f64)>) -> Line {
        Line {
            name,
            points,
            kind: Kind::Plain,
            has_marks: false,
        }
    }

    /// What the others are compared with.
    pub fn reference(name: &'static str, points: Vec<(f64, f64)>) -> Line {
        Line {
            kind: Kind::Reference,
            ..Line::new(name, points)
        }
    }

    /// The line that matters.
    pub fn strong(name: &'static str, points: Vec<(f64, f64)>) -> Line {
        Line {
            kind: Kind::Strong,
            ..Line::new(name, points)
        }
    }

    /// Marks its points.
    pub fn with_points(self) -> Line {
        Line {
            has_marks: true,
            ..self
        }
    }

    /// The colour and width; `n` tells plain lines apart.
    fn style(&self, n: usize) -> ShapeStyle {
        match self.kind {
            Kind::Reference => FRAME.stroke_width(1),
            Kind::Strong => RGBColor(74, 16, 92).stroke_width(3),
            Kind::Plain if n.is_multiple_of(2) => RGBColor(235, 122, 82).stroke_width(2),
            Kind::Plain => RGBColor(196, 66, 92).stroke_width(2),
        }
    }
}

impl Chart {
    /// Draws the chart into a file, PNG or SVG by its extension.
    pub fn write(&self, path: &Path, force: bool) -> anyhow::Result<()> {
        write_picture(self, path, force)
    }

    fn place(&self, (x, y): (f64, f64)) -> (i32, i32) {
        let fraction = |value: f64, (from, to): (f64, f64)| (value - from) / (to - from);
        let width = f64::from(WIDTH - LEFT - RIGHT);
        (
            LEFT + (fraction(x, self.x) * width).round() as i32,
            TOP + HEIGHT - (fraction(y, self.y) * f64::from(HEIGHT)).round() as i32,
        )
    }

    fn draw_axes<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        let bottom = TOP + HEIGHT;
        // Layers and percent are told in whole numbers.
        for value in ticks(self.x)
            .into_iter()
            .filter(|value| value.fract() == 0.0)
        {
            let (x, _) = self.place((value, self.y.0));
            canvas.line((x, bottom), (x, bottom + 4))?;
            let label = tick_label(value);
            canvas.text(&label, (x, bottom + 8), 12, HPos::Center, VPos::Top)?;
        }
        for value in ticks(self.y) {
            let (_, y) = self.place((self.x.0, value));
            canvas.line((LEFT - 5, y), (LEFT - 1, y))?;
            let label = tick_label(value);
            canvas.text(&label, (LEFT - 9, y), 12, HPos::Right, VPos::Center)?;
        }
        let frame = [(LEFT - 1, TOP - 1), (WIDTH - RIGHT, bottom)];
        canvas.rectangle(frame, FRAME.stroke_width(1))?;
        let middle = (LEFT + (WIDTH - LEFT - RIGHT) / 2, bottom + 30);
        canvas.text(self.x_label, middle, 14, HPos::Center, VPos::Top)?;
        canvas.upright_text(self.y_label, (22, TOP + HEIGHT / 2), 14)
    }

    fn draw_lines<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        for (n, line) in self.lines.iter().enumerate() {
            let style = line.style(n);
            let points: Vec<(i32, i32)> = line.points.iter().map(|&p| self.place(p)).collect();
            let y = TOP + HEIGHT + FOOT + LEGEND_ROW * n as i32;
            canvas.path(vec![(LEFT, y), (LEFT + 28, y)], style)?;
            canvas.text(line.name, (LEFT + 38, y), 13, HPos::Left, VPos::Center)?;
            if line.has_marks {
                for &(x, y) in &points {
                    canvas.rectangle([(x - 2, y - 2), (x + 3, y + 3)], style.filled())?;
                }
            }
            canvas.path(points, style)?;
        }
        Ok(())
    }
}

impl Picture for Chart {
    fn size(&self) -> (u32, u32) {
        let legend = LEGEND_ROW * self.lines.len() as i32;
        (WIDTH as u32, (TOP + HEIGHT + FOOT + legend) as u32)
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        canvas.text(&self.title, (LEFT, 14), 20, HPos::Left, VPos::Top)?;
        canvas.text(&self.subtitle, (LEFT, 42), 13, HPos::Left, VPos::Top)?;
        self.draw_axes(canvas)?;
        self.draw_lines(canvas)
    }
}

/// Values of 1, 2 or 5 times a power of ten between the ends of an axis, ten at most.
pub(super) fn ticks((from, to): (f64, f64)) -> Vec<f64> {
    let step = super::nice_step(to - from, 10.0);
    let first = (from / step).ceil() as i64;
    let last = (to / step + 1e-9).floor() as i64;
    (first..=last).map(|n| n as f64 * step).collect()
}

pub(super) fn tick_label(value: f64) -> String {
    // Ten steps of an axis from 0 to 1 have one decimal.
    format!("{}", (value * 1000.0).round() / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!(ticks((0.0, 100.0)).len(), 11);
        assert_eq!(ticks((3.0, 5.5)), [3.0, 3.5, 4.0, 4.5, 5.0, 5.5]);
        let labels: Vec<String> = ticks((0.0, 1.0)).into_iter().map(tick_label).collect();
        assert_eq!(labels[3], "0.3");
        assert_eq!(labels[10], "1");
    }

    #[test]
    fn corners_are_in_place() {
        let chart = Chart {
            title: String::new(),
            subtitle: String::new(),
            x_label: "",
            y_label: "",
            x: (0.0, 10.0),
            y: (0.0, 1.0),
            lines: Vec::new(),
        };
        assert_eq!(chart.place((0.0, 0.0)), (LEFT, TOP + HEIGHT));
        assert_eq!(chart.place((10.0, 1.0)), (WIDTH - RIGHT, TOP));
    }
}
