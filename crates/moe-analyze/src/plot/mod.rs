//! Pictures as PNG or SVG: heat maps of layers × experts, memory and a pass over time, and curves.

mod chart;
mod colour;
mod occupancy;
mod pass_timeline;

use std::io;
use std::path::Path;
use std::sync::Once;

use anyhow::{anyhow, bail};
use moe_files::AtomicFile;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};

use crate::files;
use crate::output::message;

pub use chart::{Chart, Legend, Line};
pub use occupancy::Occupancy;
pub use pass_timeline::PassTimeline;

/// DejaVu Sans travels in the binary for PNG; in an SVG the viewer falls back to its own font where it is missing.
const FONT: &str = "DejaVu Sans, sans-serif";

/// Bytes of a pixel of the bitmap backend.
const RGB_BYTES: usize = 3;
const LEFT: i32 = 76;
const TOP: i32 = 68;
const RIGHT: i32 = 104;
const BOTTOM: i32 = 64;
const BAR_WIDTH: i32 = 18;
const SCALE_MIN_HEIGHT: i32 = 140;
const TEXT: RGBColor = RGBColor(40, 40, 48);
const FRAME: RGBColor = RGBColor(150, 150, 158);
const GRID: RGBColor = RGBColor(228, 228, 232);

/// What a heat map shows: for each layer and expert, how often it was chosen relative to an even spread.
pub struct HeatMap {
    /// First line.
    pub title: String,
    /// Second line, smaller.
    pub subtitle: String,
    /// Block numbers of the rows, top to bottom.
    pub layers: Vec<u32>,
    /// What a column is.
    pub x_label: &'static str,
    /// `[n_layer][n_expert]`; 1 is an even share.
    pub values: Vec<Vec<f64>>,
}

/// Refuses a file name whose extension names no picture format.
pub fn check_extension(path: &Path) -> anyhow::Result<()> {
    format_of(path).map(|_| ())
}

enum PictureFormat {
    Png,
    Svg,
}

fn format_of(path: &Path) -> anyhow::Result<PictureFormat> {
    let extension = path
        .extension()
        .map(|extension| extension.to_ascii_lowercase());
    match extension
        .as_deref()
        .and_then(|extension| extension.to_str())
    {
        Some("png") => Ok(PictureFormat::Png),
        Some("svg") => Ok(PictureFormat::Svg),
        _ => bail!(
            "{}: no picture format has that extension; name a .png or .svg file",
            path.display()
        ),
    }
}

impl HeatMap {
    /// Draws the map for a file, PNG or SVG by its extension, which is in its place once it is committed.
    pub fn prepare(&self, path: &Path, force: bool) -> anyhow::Result<AtomicFile> {
        prepare_picture(self, path, force)
    }

    fn highest(&self) -> f64 {
        self.values.iter().flatten().copied().fold(1.0, f64::max)
    }

    fn n_expert(&self) -> i32 {
        self.values.iter().map(Vec::len).max().unwrap_or(0) as i32
    }

    /// Cells are as large as fits a screen, never so small that a layer or an expert vanishes.
    fn layout(&self) -> Layout {
        let (columns, rows) = (self.n_expert().max(1), (self.layers.len() as i32).max(1));
        let cell_width = (1200 / columns).clamp(2, 64);
        let cell_height = (640 / rows).clamp(4, 40);
        let grid_width = columns * cell_width;
        let grid_height = rows * cell_height;
        // Beside a small grid the scale leaves room for the title.
        let scale_left = (LEFT + grid_width + 28).max(500);
        Layout {
            cell_width,
            cell_height,
            grid_width,
            grid_height,
            width: scale_left + RIGHT,
            height: TOP + grid_height.max(SCALE_MIN_HEIGHT) + BOTTOM,
            scale_left,
        }
    }

    fn draw_cells<B: DrawingBackend>(
        &self,
        layout: &Layout,
        canvas: &Canvas<B>,
    ) -> anyhow::Result<()> {
        let highest = self.highest();
        // Large cells get a gap between them; small ones would drown in it.
        let gap = i32::from(layout.cell_width >= 10 && layout.cell_height >= 10);
        if gap == 0 {
            let corner = (LEFT + layout.grid_width, TOP + layout.grid_height);
            canvas.rectangle([(LEFT, TOP), corner], colour::colour(0.0).filled())?;
        }
        for (row, values) in (0..).zip(&self.values) {
            for (column, &value) in (0..).zip(values) {
                if value == 0.0 && gap == 0 {
                    continue;
                }
                let x = LEFT + column * layout.cell_width;
                let y = TOP + row * layout.cell_height;
                let corner = (x + layout.cell_width - gap, y + layout.cell_height - gap);
                canvas.rectangle([(x, y), corner], colour_of(value, highest).filled())?;
            }
        }
        let frame = [
            (LEFT - 1, TOP - 1),
            (LEFT + layout.grid_width, TOP + layout.grid_height),
        ];
        canvas.rectangle(frame, FRAME.stroke_width(1))
    }

    fn draw_axes<B: DrawingBackend>(
        &self,
        layout: &Layout,
        canvas: &Canvas<B>,
    ) -> anyhow::Result<()> {
        let bottom = TOP + layout.grid_height;
        for expert in (0..self.n_expert()).step_by(tick_step(layout.cell_width, 28) as usize) {
            let x = LEFT + expert * layout.cell_width + layout.cell_width / 2;
            canvas.line((x, bottom), (x, bottom + 4))?;
            canvas.text(
                &expert.to_string(),
                (x, bottom + 8),
                12,
                HPos::Center,
                VPos::Top,
            )?;
        }
        let step = tick_step(layout.cell_height, 20);
        for (row, layer) in (0..).zip(&self.layers) {
            if !layer.is_multiple_of(step) {
                continue;
            }
            let y = TOP + row * layout.cell_height + layout.cell_height / 2;
            canvas.line((LEFT - 5, y), (LEFT - 1, y))?;
            canvas.text(
                &layer.to_string(),
                (LEFT - 9, y),
                12,
                HPos::Right,
                VPos::Center,
            )?;
        }
        let middle = (LEFT + layout.grid_width / 2, bottom + 32);
        canvas.text(self.x_label, middle, 14, HPos::Center, VPos::Top)?;
        let middle = (22, TOP + layout.grid_height / 2);
        canvas.upright_text("layer", middle, 14)
    }
}

impl Picture for HeatMap {
    fn size(&self) -> (u32, u32) {
        let layout = self.layout();
        (layout.width as u32, layout.height as u32)
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        let layout = self.layout();
        canvas.text(&self.title, (LEFT, 14), 20, HPos::Left, VPos::Top)?;
        canvas.text(&self.subtitle, (LEFT, 42), 13, HPos::Left, VPos::Top)?;
        self.draw_cells(&layout, canvas)?;
        self.draw_axes(&layout, canvas)?;
        draw_scale(&layout, canvas, self.highest())
    }
}

/// Sizes in pixels.
struct Layout {
    cell_width: i32,
    cell_height: i32,
    grid_width: i32,
    grid_height: i32,
    scale_left: i32,
    width: i32,
    height: i32,
}

/// The colour bar: value 0 at its foot, the highest value at its head.
fn draw_scale<B: DrawingBackend>(
    layout: &Layout,
    canvas: &Canvas<B>,
    highest: f64,
) -> anyhow::Result<()> {
    let left = layout.scale_left;
    let height = layout.grid_height.clamp(SCALE_MIN_HEIGHT, 360);
    let foot = TOP + height;
    for step in 0..height {
        let y = foot - step - 1;
        let shade = colour::colour(f64::from(step) / f64::from(height - 1));
        canvas.rectangle([(left, y), (left + BAR_WIDTH, y + 1)], shade.filled())?;
    }
    canvas.rectangle(
        [(left, TOP - 1), (left + BAR_WIDTH, foot)],
        FRAME.stroke_width(1),
    )?;

    for tick in scale_ticks(highest, height) {
        let bar = left + BAR_WIDTH;
        canvas.line((bar, TOP + tick.y), (bar + 4, TOP + tick.y))?;
        let at = (bar + 8, TOP + tick.label_y);
        canvas.text(&tick.label, at, 12, HPos::Left, VPos::Center)?;
    }
    canvas.text(
        "× even share",
        (left - 8, TOP - 12),
        12,
        HPos::Left,
        VPos::Bottom,
    )
}

/// A mark on the colour bar; places are pixels below the bar's head.
struct Tick {
    y: i32,
    label_y: i32,
    label: String,
}

/// The marks on a colour bar of `height` pixels: its ends and the even share always, the rest where there is room.
fn scale_ticks(highest: f64, height: i32) -> Vec<Tick> {
    const LABEL: i32 = 16;
    let mut ticks = vec![Tick {
        y: 0,
        label_y: 0,
        label: format!("{highest:.1}"),
    }];
    if ticks[0].label == "1.0" {
        ticks[0].label = "1".into();
    }
    for value in [1.0, 0.0, 64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 0.5] {
        let label = value.to_string();
        if value > highest || label == ticks[0].label {
            continue;
        }
        let y = height - (scale_fraction(value, highest) * f64::from(height)).round() as i32;
        let label_y = if value == 1.0 {
            // Right below the highest value the label gives way, for the even share must be there.
            y.clamp(LABEL, height - LABEL)
        } else {
            y
        };
        let is_free = |tick: &Tick| (tick.label_y - label_y).abs() >= LABEL;
        if ticks.iter().all(is_free) {
            ticks.push(Tick { y, label_y, label });
        }
    }
    ticks
}

/// Place of a value on the scale. The root spreads the crowd of small values, which a few very hot experts would
/// otherwise press together.
fn scale_fraction(value: f64, highest: f64) -> f64 {
    (value / highest).sqrt()
}

/// The smallest of 1, 2, 5, 10, 20, 50, … at which labels are `room` pixels apart.
fn tick_step(cell: i32, room: i32) -> u32 {
    let mut steps = (0..6).flat_map(|power| [1, 2, 5].map(|digit| digit * 10u32.pow(power)));
    steps
        .find(|&step| step as i32 * cell >= room)
        .unwrap_or(u32::MAX)
}

fn colour_of(value: f64, highest: f64) -> RGBColor {
    colour::colour(scale_fraction(value, highest))
}

/// What can be drawn into a file.
trait Picture {
    /// Width and height in pixels.
    fn size(&self) -> (u32, u32);

    /// Draws it on a white canvas of that size.
    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()>;
}

/// Draws a picture for a file, PNG or SVG by its extension.
fn prepare_picture(picture: &impl Picture, path: &Path, force: bool) -> anyhow::Result<AtomicFile> {
    register_fonts();
    let size = picture.size();
    match format_of(path)? {
        PictureFormat::Png => files::prepare(path, force, |out| {
            let (width, height) = size;
            let mut pixels = vec![0; width as usize * height as usize * RGB_BYTES];
            draw_on(picture, BitMapBackend::with_buffer(&mut pixels, size))?;
            Ok(write_png(out, size, &pixels)?)
        }),
        PictureFormat::Svg => files::prepare(path, force, |out| {
            let mut svg = String::new();
            draw_on(picture, SVGBackend::with_string(&mut svg, size))?;
            Ok(std::io::Write::write_all(out, svg.as_bytes())?)
        }),
    }
}

/// Writes rows of RGB pixels as PNG.
fn write_png(out: impl io::Write, (width, height): (u32, u32), pixels: &[u8]) -> io::Result<()> {
    let mut encoder = png::Encoder::new(out, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    Ok(writer.finish()?)
}

fn draw_on<B: DrawingBackend>(picture: &impl Picture, backend: B) -> anyhow::Result<()> {
    let canvas = Canvas {
        area: backend.into_drawing_area(),
    };
    canvas.area.fill(&WHITE).map_err(drawing)?;
    picture.draw(&canvas)?;
    canvas.area.present().map_err(drawing)
}

/// A drawing area with the few things that are drawn on it.
struct Canvas<B: DrawingBackend> {
    area: DrawingArea<B, Shift>,
}

impl<B: DrawingBackend> Canvas<B> {
    fn rectangle(&self, corners: [(i32, i32); 2], style: ShapeStyle) -> anyhow::Result<()> {
        self.area
            .draw(&Rectangle::new(corners, style))
            .map_err(drawing)
    }

    fn line(&self, from: (i32, i32), to: (i32, i32)) -> anyhow::Result<()> {
        self.area
            .draw(&PathElement::new([from, to], FRAME))
            .map_err(drawing)
    }

    /// A line behind what is drawn, at a value of an axis.
    fn grid_line(&self, from: (i32, i32), to: (i32, i32)) -> anyhow::Result<()> {
        self.path(vec![from, to], GRID.into())
    }

    fn path(&self, points: Vec<(i32, i32)>, style: ShapeStyle) -> anyhow::Result<()> {
        self.area
            .draw(&PathElement::new(points, style))
            .map_err(drawing)
    }

    fn text(&self, text: &str, at: (i32, i32), size: i32, h: HPos, v: VPos) -> anyhow::Result<()> {
        let style = TextStyle::from((FONT, size))
            .color(&TEXT)
            .pos(Pos::new(h, v));
        self.draw_text(text, &style, at)
    }

    fn draw_text(&self, text: &str, style: &TextStyle, at: (i32, i32)) -> anyhow::Result<()> {
        // Control characters are not valid in the XML of an SVG.
        let text = message::cell(text);
        self.area.draw_text(&text, style, at).map_err(drawing)
    }

    /// Names of colours in the head of a picture, from left to right up to `right`.
    fn legend(&self, right: i32, entries: &[(&str, RGBColor)]) -> anyhow::Result<()> {
        const SIZE: i32 = 12;
        let style = TextStyle::from((FONT, SIZE));
        let mut right = right;
        for &(name, colour) in entries.iter().rev() {
            self.text(name, (right, 22), SIZE, HPos::Right, VPos::Center)?;
            let measured = self
                .area
                .estimate_text_size(name, &style)
                .map_err(drawing)?;
            right -= measured.0 as i32 + 16;
            self.rectangle([(right, 17), (right + 10, 27)], colour.filled())?;
            right -= 16;
        }
        Ok(())
    }

    /// Text that reads from bottom to top, centred on `at`.
    fn upright_text(&self, text: &str, at: (i32, i32), size: i32) -> anyhow::Result<()> {
        let style = TextStyle::from((FONT, size))
            .color(&TEXT)
            .transform(FontTransform::Rotate270)
            .pos(Pos::new(HPos::Center, VPos::Center));
        self.draw_text(text, &style, at)
    }
}

/// A step of 1, 2 or 5 times a power of ten that divides `whole` in at most `n` parts.
fn nice_step(whole: f64, n: f64) -> f64 {
    let power = 10f64.powf((whole / n).max(1e-12).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power);
    steps
        .into_iter()
        .find(|step| whole / step <= n + 1e-9)
        .unwrap_or(10.0 * power)
}

fn register_fonts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // The bytes are part of the binary; a font that did not parse would show as an error of the first text.
        let _ = register_font(FONT, FontStyle::Normal, dejavu::sans::regular());
    });
}

fn drawing<E: std::error::Error + Send + Sync>(error: DrawingAreaErrorKind<E>) -> anyhow::Error {
    anyhow!("drawing: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A map with a few hot experts and a long tail.
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
            let even = weights.iter().sum::<f64>() / f64::from(n_expert);
            weights.into_iter().map(|weight| weight / even).collect()
        });
        HeatMap {
            title: "How often each expert is chosen".into(),
            subtitle: format!("an example of {n_layer} layers and {n_expert} experts"),
            x_label: "expert",
            layers: (3..3 + n_layer).collect(),
            values: values.collect(),
        }
    }

    #[test]
    fn every_expert_of_small_and_large_models_has_a_cell() {
        let dir = tempfile::tempdir().unwrap();
        for (n_layer, n_expert) in [(1, 1), (2, 8), (48, 128), (94, 512)] {
            let map = example(n_layer, n_expert);
            let [png, svg] = ["png", "svg"].map(|extension| {
                let path = dir.path().join(format!("{n_layer}x{n_expert}.{extension}"));
                map.prepare(&path, false).unwrap().commit().unwrap();
                path
            });
            assert_eq!(moe_testkit::png_size(&png), map.size());

            let svg = std::fs::read_to_string(svg).unwrap();
            let (width, height) = map.size();
            assert!(svg.contains(&format!("width=\"{width}\" height=\"{height}\"")));
            let layout = map.layout();
            let gap = i32::from(layout.cell_width >= 10 && layout.cell_height >= 10);
            let cell = format!(
                "width=\"{}\" height=\"{}\" opacity=\"1\" fill=\"#",
                layout.cell_width - gap,
                layout.cell_height - gap
            );
            // Without gaps the background is the cells without a value.
            let values = map.values.iter().flatten();
            let n_cells = values.filter(|&&value| gap == 1 || value > 0.0).count();
            assert_eq!(svg.matches(&cell).count(), n_cells, "{n_layer}x{n_expert}");
            for text in [map.title.as_str(), &map.subtitle, map.x_label, "layer"] {
                assert!(svg.contains(&format!(">\n{text}\n<")), "{text}");
            }
        }
    }

    #[test]
    fn the_scale_always_marks_its_ends_and_the_even_share() {
        for height in [140, 360] {
            for highest in [1.0, 1.06, 1.2, 2.1, 8.0, 64.0, 500.0] {
                let ticks = scale_ticks(highest, height);
                let y = |label: &str| ticks.iter().find(|t| t.label == label).map(|t| t.y);
                let even = f64::from(height) * (1.0 - (1.0f64 / highest).sqrt());
                // A pixel for rounding.
                let is_even = |y: i32| (f64::from(y) - even).abs() < 2.0;
                assert!(y("1").is_some_and(is_even), "{highest} {height}");
                assert_eq!((ticks[0].y, y("0")), (0, Some(height)));
                let mut labels: Vec<i32> = ticks.iter().map(|t| t.label_y).collect();
                labels.sort_unstable();
                assert!(labels.windows(2).all(|pair| pair[1] - pair[0] >= 16));
            }
        }
    }

    #[test]
    fn ticks_leave_room_for_their_labels() {
        assert_eq!(tick_step(40, 28), 1);
        assert_eq!(tick_step(9, 28), 5);
        assert_eq!(tick_step(2, 28), 20);
    }
}
