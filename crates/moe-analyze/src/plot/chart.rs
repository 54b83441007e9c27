//! Lines over two axes.

use std::borrow::Cow;
use std::path::Path;

use moe_files::AtomicFile;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::{Canvas, FRAME, Picture, prepare_picture};

const PLOT: (i32, i32) = (656, 400);
/// Room for axes that share it with many lines.
const LARGE_PLOT: (i32, i32) = (716, 420);
const LEFT: i32 = 76;
const RIGHT: i32 = 28;
const TOP: i32 = 68;
/// Below the axes: their ticks and label.
const FOOT: i32 = 64;
/// A line's name in the legend.
const LEGEND_ROW: i32 = 20;
const LEGEND_WIDTH: i32 = 140;

/// Colours that can be told apart; of more lines the further ones are thinner.
const COLOURS: [RGBColor; 8] = [
    RGBColor(40, 40, 48),
    RGBColor(202, 60, 60),
    RGBColor(38, 110, 184),
    RGBColor(240, 150, 40),
    RGBColor(60, 150, 84),
    RGBColor(140, 84, 170),
    RGBColor(0, 160, 170),
    RGBColor(216, 108, 162),
];

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
    pub legend: Legend,
}

/// Where the names of the lines are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Legend {
    /// Below the axes, in the order of the lines: for a few with long names.
    Below,
    /// Beside the axes, in the order in which the lines end: for many.
    Beside,
}

/// How a line looks; the kinds differ in lightness and width, so that they can be told apart in grey.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reference,
    Plain,
    Strong,
    /// One of many.
    Coloured,
}

/// One line of a chart.
pub struct Line {
    name: Cow<'static, str>,
    points: Vec<(f64, f64)>,
    kind: Kind,
    has_marks: bool,
}

impl Line {
    /// A line among a few.
    pub fn new(name: &'static str, points: Vec<(f64, f64)>) -> Line {
        Line {
            name: name.into(),
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

    /// One of many, with marks at its points.
    pub fn coloured(name: String, points: Vec<(f64, f64)>) -> Line {
        Line {
            name: name.into(),
            points,
            kind: Kind::Coloured,
            has_marks: true,
        }
    }

    /// Marks its points.
    pub fn with_points(self) -> Line {
        Line {
            has_marks: true,
            ..self
        }
    }

    /// The colour and width; `n` tells lines of a kind apart.
    fn style(&self, n: usize) -> ShapeStyle {
        match self.kind {
            Kind::Reference => FRAME.stroke_width(1),
            Kind::Strong => RGBColor(74, 16, 92).stroke_width(3),
            Kind::Plain if n.is_multiple_of(2) => RGBColor(235, 122, 82).stroke_width(2),
            Kind::Plain => RGBColor(196, 66, 92).stroke_width(2),
            Kind::Coloured => {
                COLOURS[n % COLOURS.len()].stroke_width(if n < COLOURS.len() { 2 } else { 1 })
            }
        }
    }

    fn end(&self) -> f64 {
        self.points.last().map_or(0.0, |&(_, y)| y)
    }
}

impl Chart {
    /// Draws the chart for a file, PNG or SVG by its extension, which is in its place once it is committed.
    pub fn prepare(&self, path: &Path, force: bool) -> anyhow::Result<AtomicFile> {
        prepare_picture(self, path, force)
    }

    /// Width and height between the axes; a legend beside them may need more height than they have.
    fn plot(&self) -> (i32, i32) {
        match self.legend {
            Legend::Below => PLOT,
            Legend::Beside => {
                let legend = LEGEND_ROW * self.lines.len() as i32;
                (LARGE_PLOT.0, LARGE_PLOT.1.max(legend))
            }
        }
    }

    fn place(&self, (x, y): (f64, f64)) -> (i32, i32) {
        let fraction = |value: f64, (from, to): (f64, f64)| (value - from) / (to - from);
        let (width, height) = self.plot();
        (
            LEFT + (fraction(x, self.x) * f64::from(width)).round() as i32,
            TOP + height - (fraction(y, self.y) * f64::from(height)).round() as i32,
        )
    }

    fn draw_axes<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        let (width, height) = self.plot();
        let (right, bottom) = (LEFT + width, TOP + height);
        // Layers, percent and MiB are told in whole numbers.
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
            canvas.grid_line((LEFT, y), (right, y))?;
            canvas.line((LEFT - 5, y), (LEFT - 1, y))?;
            let label = tick_label(value);
            canvas.text(&label, (LEFT - 9, y), 12, HPos::Right, VPos::Center)?;
        }
        let frame = [(LEFT - 1, TOP - 1), (right, bottom)];
        canvas.rectangle(frame, FRAME.stroke_width(1))?;
        let middle = (LEFT + width / 2, bottom + 30);
        canvas.text(self.x_label, middle, 14, HPos::Center, VPos::Top)?;
        canvas.upright_text(self.y_label, (22, TOP + height / 2), 14)
    }

    fn draw_lines<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        for (n, line) in self.lines.iter().enumerate() {
            let style = line.style(n);
            let points: Vec<(i32, i32)> = line.points.iter().map(|&p| self.place(p)).collect();
            if line.has_marks {
                for &(x, y) in &points {
                    canvas.rectangle([(x - 2, y - 2), (x + 3, y + 3)], style.filled())?;
                }
            }
            canvas.path(points, style)?;
        }
        Ok(())
    }

    fn draw_legend<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        let (width, height) = self.plot();
        let mut order: Vec<usize> = (0..self.lines.len()).collect();
        let (left, top) = match self.legend {
            Legend::Below => (LEFT, TOP + height + FOOT),
            Legend::Beside => {
                order.sort_by(|&a, &b| self.lines[b].end().total_cmp(&self.lines[a].end()));
                (LEFT + width + 18, TOP + 8)
            }
        };
        for (y, n) in (top..).step_by(LEGEND_ROW as usize).zip(order) {
            let line = &self.lines[n];
            canvas.path(vec![(left, y), (left + 28, y)], line.style(n))?;
            canvas.text(&line.name, (left + 38, y), 13, HPos::Left, VPos::Center)?;
        }
        Ok(())
    }
}

impl Picture for Chart {
    fn size(&self) -> (u32, u32) {
        let (width, height) = self.plot();
        let (right, below) = match self.legend {
            Legend::Below => (RIGHT, LEGEND_ROW * self.lines.len() as i32),
            Legend::Beside => (RIGHT + LEGEND_WIDTH, 0),
        };
        (
            (LEFT + width + right) as u32,
            (TOP + height + FOOT + below) as u32,
        )
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        canvas.text(&self.title, (LEFT, 14), 20, HPos::Left, VPos::Top)?;
        canvas.text(&self.subtitle, (LEFT, 42), 13, HPos::Left, VPos::Top)?;
        self.draw_axes(canvas)?;
        self.draw_lines(canvas)?;
        self.draw_legend(canvas)
    }
}

/// Values of 1, 2 or 5 times a power of ten between the ends of an axis, ten at most.
fn ticks((from, to): (f64, f64)) -> Vec<f64> {
    let step = super::nice_step(to - from, 10.0);
    let first = (from / step).ceil() as i64;
    let last = (to / step + 1e-9).floor() as i64;
    (first..=last).map(|n| n as f64 * step).collect()
}

fn tick_label(value: f64) -> String {
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

    fn chart(legend: Legend, n_lines: usize) -> Chart {
        let line = |n: usize| Line::coloured(n.to_string(), vec![(0.0, n as f64)]);
        Chart {
            title: String::new(),
            subtitle: String::new(),
            x_label: "",
            y_label: "",
            x: (0.0, 10.0),
            y: (0.0, 1.0),
            lines: (0..n_lines).map(line).collect(),
            legend,
        }
    }

    #[test]
    fn corners_are_in_place() {
        for legend in [Legend::Below, Legend::Beside] {
            let chart = chart(legend, 3);
            let (width, height) = chart.plot();
            assert_eq!(chart.place((0.0, 0.0)), (LEFT, TOP + height));
            assert_eq!(chart.place((10.0, 1.0)), (LEFT + width, TOP));
        }
    }

    /// Every name has a row, however many there are.
    #[test]
    fn a_legend_has_room_for_all_lines() {
        for legend in [Legend::Below, Legend::Beside] {
            let height = |n_lines| chart(legend, n_lines).size().1 as i32;
            assert!(height(40) >= TOP + 40 * LEGEND_ROW);
        }
    }
}
