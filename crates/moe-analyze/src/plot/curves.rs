//! Many lines of percentages over one axis, with a legend beside them.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::chart::{tick_label, ticks};
use super::{Canvas, FRAME, Picture, write_picture};

const WIDTH: i32 = 960;
const HEIGHT: i32 = 560;
const LEFT: i32 = 76;
const RIGHT: i32 = 168;
const TOP: i32 = 76;
const BOTTOM: i32 = 64;
const GRID: RGBColor = RGBColor(228, 228, 232);

/// Colours that can be told apart; lines beyond them are thinner.
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

/// Lines from 0 to 100 on the upright axis.
pub struct Curves {
    /// First line.
    pub title: String,
    /// Second line, smaller.
    pub subtitle: String,
    /// What the axes show.
    pub x: String,
    /// In percent.
    pub y: String,
    /// Name and points of each line, x ascending.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
}

impl Curves {
    /// Draws them into a file, PNG or SVG by its extension.
    pub fn write(&self, path: &Path, force: bool) -> anyhow::Result<()> {
        write_picture(self, path, force)
    }

    fn highest_x(&self) -> f64 {
        let points = self.lines.iter().flat_map(|(_, points)| points);
        points.map(|&(x, _)| x).fold(0.0, f64::max).max(1e-9)
    }

    fn place(&self, (x, y): (f64, f64)) -> (i32, i32) {
        let width = f64::from(WIDTH - LEFT - RIGHT);
        let height = f64::from(HEIGHT - TOP - BOTTOM);
        let x = LEFT + (x / self.highest_x() * width).round() as i32;
        let y = HEIGHT - BOTTOM - (y / 100.0 * height).round() as i32;
        (x, y)
    }

    fn draw_axes<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        let foot = HEIGHT - BOTTOM;
        for y in (0..=100).step_by(20) {
            let (_, at) = self.place((0.0, f64::from(y)));
            canvas.path(vec![(LEFT, at), (WIDTH - RIGHT, at)], GRID.into())?;
            canvas.text(
                &y.to_string(),
                (LEFT - 8, at),
                12,
                HPos::Right,
                VPos::Center,
            )?;
        }
        for value in ticks((0.0, self.highest_x())) {
            let (x, _) = self.place((value, 0.0));
            canvas.line((x, foot), (x, foot + 4))?;
            let label = tick_label(value);
            canvas.text(&label, (x, foot + 8), 12, HPos::Center, VPos::Top)?;
        }
        let frame = [(LEFT, TOP), (WIDTH - RIGHT, foot)];
        canvas.rectangle(frame, FRAME.stroke_width(1))?;
        let middle = (LEFT + (WIDTH - LEFT - RIGHT) / 2, foot + 32);
        canvas.text(&self.x, middle, 14, HPos::Center, VPos::Top)?;
        canvas.upright_text(&self.y, (24, TOP + (foot - TOP) / 2), 14)
    }

    fn draw_lines<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        for (line, (_, points)) in self.lines.iter().enumerate() {
            let places: Vec<(i32, i32)> = points.iter().map(|&point| self.place(point)).collect();
            for &(x, y) in &places {
                canvas.rectangle([(x - 2, y - 2), (x + 3, y + 3)], colour(line).filled())?;
            }
            canvas.path(places, style(line))?;
        }
        Ok(())
    }

    /// Names in the order in which the lines end, the highest first.
    fn draw_legend<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        let end = |line: usize| self.lines[line].1.last().map_or(0.0, |&(_, y)| y);
        let mut order: Vec<usize> = (0..self.lines.len()).collect();
        order.sort_by(|&a, &b| end(b).total_cmp(&end(a)));
        let room = (HEIGHT - TOP - BOTTOM) / (order.len() as i32).max(1);
        let left = WIDTH - RIGHT + 18;
        for (y, line) in (TOP + 8..).step_by(room.clamp(1, 20) as usize).zip(order) {
            canvas.path(vec![(left, y), (left + 22, y)], style(line))?;
            let name = &self.lines[line].0;
            canvas.text(name, (left + 30, y), 12, HPos::Left, VPos::Center)?;
        }
        Ok(())
    }
}

fn colour(line: usize) -> RGBColor {
    COLOURS[line % COLOURS.len()]
}

fn style(line: usize) -> ShapeStyle {
    colour(line).stroke_width(if line < COLOURS.len() { 2 } else { 1 })
}

impl Picture for Curves {
    fn size(&self) -> (u32, u32) {
        (WIDTH as u32, HEIGHT as u32)
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        canvas.text(&self.title, (LEFT, 14), 20, HPos::Left, VPos::Top)?;
        canvas.text(&self.subtitle, (LEFT, 42), 13, HPos::Left, VPos::Top)?;
        self.draw_axes(canvas)?;
        self.draw_lines(canvas)?;
        self.draw_legend(canvas)
    }
}
