//! Line charts.

use super::colour::{self, LINES, REFERENCE};
use super::{Axis, Figure, Key, LineStyle, Mark, Marker, Panel, Sample};

const SIZE: (u32, u32) = (700, 420);
/// Height of a row of the legend in pixels.
const LEGEND_ROW: u32 = 18;
/// Maximum number of points of a line with markers.
const MAX_MARKED: usize = 100;
const MARKERS: [Marker; 3] = [Marker::Square, Marker::Diamond, Marker::Triangle];

/// A line chart.
pub struct Chart {
    /// First line.
    pub title: String,
    /// Second line, smaller.
    pub subtitle: String,
    pub x: Axis,
    pub y: Axis,
    pub lines: Vec<Line>,
}

/// One line of a chart.
pub struct Line {
    name: String,
    points: Vec<(f64, f64)>,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reference,
    Plain,
    Strong,
}

impl Line {
    pub fn new(name: impl Into<String>, points: Vec<(f64, f64)>) -> Line {
        Line {
            name: name.into(),
            points,
            kind: Kind::Plain,
        }
    }

    /// Creates a line that the other lines are compared with.
    pub fn reference(name: impl Into<String>, points: Vec<(f64, f64)>) -> Line {
        Line {
            kind: Kind::Reference,
            ..Line::new(name, points)
        }
    }

    /// Creates the most important line.
    pub fn strong(name: impl Into<String>, points: Vec<(f64, f64)>) -> Line {
        Line {
            kind: Kind::Strong,
            ..Line::new(name, points)
        }
    }

    /// Returns the style of the `n`th line. No two of the first 24 lines have the same colour and marker.
    fn style(&self, n: usize) -> LineStyle {
        let marker = MARKERS[n % MARKERS.len()];
        LineStyle {
            colour: match self.kind {
                Kind::Reference => REFERENCE,
                Kind::Strong => colour::PURPLE,
                Kind::Plain => LINES[n % LINES.len()],
            },
            width: match self.kind {
                Kind::Reference => 1,
                Kind::Strong => 3,
                Kind::Plain => 2,
            },
            marker: Some(marker)
                .filter(|_| self.kind != Kind::Reference && self.points.len() <= MAX_MARKED),
        }
    }

    fn end(&self) -> f64 {
        self.points.last().map_or(0.0, |&(_, y)| y)
    }
}

impl Chart {
    /// Returns the figure. The legend lists the lines by their last values, the highest first.
    pub fn figure(self) -> Figure {
        let styles: Vec<LineStyle> = (0..).zip(&self.lines).map(|(n, l)| l.style(n)).collect();
        let mut order: Vec<usize> = (0..self.lines.len()).collect();
        order.sort_by(|&a, &b| self.lines[b].end().total_cmp(&self.lines[a].end()));
        let names = order.into_iter().map(|n| {
            let name = self.lines[n].name.clone();
            (name, Sample::Line(styles[n]))
        });
        let names = names.collect();
        // A legend of many lines can be higher than the axes.
        let legend = LEGEND_ROW.saturating_mul(self.lines.len() as u32);
        let lines = self.lines.into_iter().zip(styles);
        let marks = lines.map(|(line, style)| Mark::Line {
            points: line.points,
            style,
        });
        Figure {
            title: self.title,
            subtitle: self.subtitle,
            panels: vec![Panel {
                title: String::new(),
                size: (SIZE.0, SIZE.1.max(legend)),
                x: self.x,
                y: self.y,
                marks: marks.collect(),
            }],
            key: Key::Legend(names),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(n_lines: usize) -> Figure {
        let line = |n: usize| Line::new(n.to_string(), vec![(0.0, n as f64)]);
        Chart {
            title: String::new(),
            subtitle: String::new(),
            x: Axis::numbers("", 0.0, 10.0),
            y: Axis::numbers("", 0.0, 1.0),
            lines: (0..n_lines).map(line).collect(),
        }
        .figure()
    }

    #[test]
    fn legend_is_sorted_by_last_value_and_fits() {
        for n_lines in [3, 40] {
            let figure = figure(n_lines);
            let Key::Legend(names) = &figure.key else {
                panic!("a legend");
            };
            let names: Vec<usize> = names
                .iter()
                .map(|(name, _)| name.parse().unwrap())
                .collect();
            assert!(names.is_sorted_by(|a, b| a > b) && names.len() == n_lines);
            assert!(figure.panels[0].size.1 as usize >= n_lines * LEGEND_ROW as usize);
        }
    }

    #[test]
    fn lines_differ_in_colour_or_marker() {
        let looks: std::collections::HashSet<String> = (0..24)
            .map(|n| {
                let style = Line::new("", Vec::new()).style(n);
                let marker = style.marker.map(|marker| marker as u8);
                format!("{:?} {marker:?}", style.colour)
            })
            .collect();
        assert_eq!(looks.len(), 24);
    }
}
