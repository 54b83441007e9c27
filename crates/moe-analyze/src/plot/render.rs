//! Draws figures with plotters, all in one frame.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::Once;

use anyhow::anyhow;
use plotters::coord::Shift;
use plotters::coord::cartesian::Cartesian2d;
use plotters::coord::ranged1d::{BoldPoints, DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::{RangedCoordf64, RangedCoordi64};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};

use super::{Axis, Colour, Figure, Key, LineStyle, Mark, Marker, Panel, Point, Sample, Ticks};
use crate::output::message;

/// DejaVu Sans is part of the binary, and measures texts in both formats; in an SVG the viewer falls back to its own font where it
/// is missing.
const FONT: &str = "DejaVu Sans, sans-serif";
/// Bytes of a pixel of the bitmap backend.
const RGB_BYTES: usize = 3;

const TEXT: RGBColor = RGBColor(40, 40, 48);
const FRAME: RGBColor = RGBColor(150, 150, 158);
const GRID: RGBColor = RGBColor(228, 228, 232);
const TITLE_SIZE: u32 = 20;
const TEXT_SIZE: u32 = 13;
const TICK_SIZE: u32 = 12;

/// Pixels around the figure, of its title with the subtitle, and between the panels and the key.
const MARGIN: u32 = 16;
const HEAD: u32 = 70;
const GAP: u32 = 20;
/// Pixels of a panel's title, and of the ticks with the label of its axes.
const PANEL_TITLE: u32 = 24;
const X_LABELS: u32 = 52;
const Y_LABELS: u32 = 68;
/// The sample of a line in the legend, and a row of names.
const SAMPLE: u32 = 36;
const LEGEND_ROW: u32 = 18;
/// The widest figure that is made for the sake of its title.
const MAX_TITLE: u32 = 1200;
/// Pixels from one name on an axis to the next, at least: across, of the length of the names and beside it.
const TICK_HEIGHT: f64 = 18.0;
const TICK_GAP: f64 = 10.0;
const CHARACTER: f64 = 7.0;

/// Draws a figure as PNG.
pub fn png(figure: &Figure, out: &mut dyn Write) -> anyhow::Result<()> {
    let size @ (width, height) = size(figure);
    let mut pixels = vec![0; width as usize * height as usize * RGB_BYTES];
    draw(figure, BitMapBackend::with_buffer(&mut pixels, size))?;
    Ok(write_png(out, size, &pixels)?)
}

/// Draws a figure as SVG.
pub fn svg(figure: &Figure, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut svg = String::new();
    draw(figure, SVGBackend::with_string(&mut svg, size(figure)))?;
    Ok(out.write_all(svg.as_bytes())?)
}

/// Writes rows of RGB pixels as PNG.
fn write_png(out: &mut dyn Write, (width, height): (u32, u32), pixels: &[u8]) -> io::Result<()> {
    let mut encoder = png::Encoder::new(out, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    Ok(writer.finish()?)
}

/// Width and height of a figure in pixels.
fn size(figure: &Figure) -> (u32, u32) {
    register_fonts();
    let panels = figure.panels.iter().map(outer_size);
    let (width, height) = panels.fold((0, 0), |(width, height), (w, h)| (width.max(w), height + h));
    let (key_width, key_height) = key_size(&figure.key);
    let titles = [(&figure.title, TITLE_SIZE), (&figure.subtitle, TEXT_SIZE)];
    let titles = titles.map(|(text, size)| text_width(&message::cell(text), size));
    let titles = titles.into_iter().max().unwrap_or(0).min(MAX_TITLE);
    (
        MARGIN + titles.max(width + GAP + key_width) + MARGIN,
        HEAD + height.max(key_height) + MARGIN,
    )
}

/// Width and height of a panel with its title and labels.
fn outer_size(panel: &Panel) -> (u32, u32) {
    let (width, height) = panel.size;
    (Y_LABELS + width, title_height(panel) + height + X_LABELS)
}

fn title_height(panel: &Panel) -> u32 {
    if panel.title.is_empty() {
        0
    } else {
        PANEL_TITLE
    }
}

fn key_size(key: &Key) -> (u32, u32) {
    match key {
        Key::Scale(panel) => outer_size(panel),
        Key::Legend(names) => {
            let widths = names.iter().map(|(name, _)| text_width(name, TEXT_SIZE));
            let rows = LEGEND_ROW.saturating_mul(names.len() as u32);
            (SAMPLE + widths.max().unwrap_or(0) + GAP, rows)
        }
    }
}

/// Pixels that a text takes in the font of the binary.
fn text_width(text: &str, size: u32) -> u32 {
    let font = FontDesc::from((FONT, size));
    font.box_size(text).map_or(0, |(width, _)| width)
}

fn register_fonts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // The bytes are part of the binary; a font that did not parse would show as an error of the first text.
        let _ = register_font(FONT, FontStyle::Normal, dejavu::sans::regular());
    });
}

fn drawing(error: impl Display) -> anyhow::Error {
    anyhow!("drawing: {error}")
}

fn font(size: u32) -> TextStyle<'static> {
    TextStyle::from((FONT, size)).color(&TEXT)
}

fn rgb(Colour(red, green, blue): Colour) -> RGBColor {
    RGBColor(red, green, blue)
}

type Area<B> = DrawingArea<B, Shift>;

fn draw<B: DrawingBackend>(figure: &Figure, backend: B) -> anyhow::Result<()> {
    let root = backend.into_drawing_area();
    root.fill(&WHITE).map_err(drawing)?;
    let part =
        |x: u32, y: u32, (width, height): (u32, u32)| root.clone().shrink((x, y), (width, height));
    let room = root.dim_in_pixel().0.saturating_sub(2 * MARGIN);
    for (text, size, y) in [
        (&figure.title, TITLE_SIZE, 14),
        (&figure.subtitle, TEXT_SIZE, 42),
    ] {
        let text = shortened(&message::cell(text), size, room);
        let at = (MARGIN as i32, y);
        root.draw_text(&text, &font(size), at).map_err(drawing)?;
    }
    let (mut top, mut right) = (HEAD, 0);
    for panel in &figure.panels {
        let outer = outer_size(panel);
        draw_panel(panel, Side::Left, &part(MARGIN, top, outer))?;
        top += outer.1;
        right = right.max(MARGIN + outer.0);
    }
    let key = part(right + GAP, HEAD, key_size(&figure.key));
    match &figure.key {
        Key::Scale(panel) => draw_panel(panel, Side::Right, &key)?,
        Key::Legend(names) => draw_legend(names, &key)?,
    }
    root.present().map_err(drawing)
}

/// The text, or as much of its start as has room.
fn shortened(text: &str, size: u32, room: u32) -> String {
    if text_width(text, size) <= room {
        return text.to_owned();
    }
    let mut text = text.to_owned();
    while text.pop().is_some() && text_width(&format!("{text}…"), size) > room {}
    text + "…"
}

/// Where the values of the y axis are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Left,
    Right,
}

fn draw_panel<B: DrawingBackend>(panel: &Panel, side: Side, area: &Area<B>) -> anyhow::Result<()> {
    if !panel.title.is_empty() {
        let at = (Y_LABELS as i32, 2);
        let title = message::cell(&panel.title);
        area.draw_text(&title, &font(TEXT_SIZE), at)
            .map_err(drawing)?;
    }
    let (x, y) = (
        Scale::across(&panel.x, panel.size.0),
        Scale::upright(&panel.y, panel.size.1),
    );
    let (x_name, y_name) = (x.namer(), y.namer());
    let mut builder = ChartBuilder::on(area);
    builder
        .margin_top(title_height(panel))
        .x_label_area_size(X_LABELS);
    match side {
        Side::Left => builder.y_label_area_size(Y_LABELS),
        Side::Right => builder.right_y_label_area_size(Y_LABELS),
    };
    let mut chart = builder.build_cartesian_2d(x, y).map_err(drawing)?;
    let mut mesh = chart.configure_mesh();
    mesh.disable_x_mesh()
        .bold_line_style(GRID)
        .axis_style(FRAME)
        .label_style(font(TICK_SIZE))
        .axis_desc_style(font(TEXT_SIZE))
        .set_all_tick_mark_size(4)
        .x_label_formatter(&x_name)
        .y_label_formatter(&y_name)
        .x_desc(&panel.x.label)
        .y_desc(&panel.y.label);
    if !matches!(panel.y.ticks, Ticks::Numbers | Ticks::Integers) {
        mesh.disable_y_mesh();
    }
    mesh.draw().map_err(drawing)?;
    // The least width that is seen.
    let pixel = (panel.x.range.1 - panel.x.range.0) / f64::from(panel.size.0.max(1));
    for mark in &panel.marks {
        draw_mark(mark, pixel, &mut chart)?;
    }
    let [(x0, x1), (y0, y1)] = [panel.x.range, panel.y.range];
    let frame = Rectangle::new([(x0, y0), (x1, y1)], FRAME);
    chart.draw_series([frame]).map_err(drawing)?;
    Ok(())
}

type Chart<'a, B> = ChartContext<'a, B, Cartesian2d<Scale, Scale>>;

fn draw_mark<B: DrawingBackend>(
    mark: &Mark,
    pixel: f64,
    chart: &mut Chart<'_, B>,
) -> anyhow::Result<()> {
    match mark {
        Mark::Area {
            corners: [from, to],
            colour,
            gap,
        } => {
            let to = (to.0.max(from.0 + pixel), to.1);
            let mut area = Rectangle::new([*from, to], rgb(*colour).filled());
            area.set_margin(0, *gap, 0, *gap);
            chart.draw_series([area]).map_err(drawing)?;
        }
        Mark::Line { points, style } => {
            let line = LineSeries::new(points.iter().copied(), stroke(style));
            chart.draw_series(line).map_err(drawing)?;
            if let Some(marker) = style.marker {
                let markers = points.iter().map(|&at| {
                    let shape = Polygon::new(outline(marker, 0), rgb(style.colour));
                    EmptyElement::at(at) + shape
                });
                chart.draw_series(markers).map_err(drawing)?;
            }
        }
        Mark::Text { at, text } => {
            let style = font(TICK_SIZE).pos(Pos::new(HPos::Center, VPos::Center));
            let text = Text::new(message::cell(text).into_owned(), *at, style);
            chart.draw_series([text]).map_err(drawing)?;
        }
    }
    Ok(())
}

fn stroke(style: &LineStyle) -> ShapeStyle {
    rgb(style.colour).stroke_width(style.width)
}

/// The corners of a marker, `right` pixels to the right of its point.
fn outline(marker: Marker, right: i32) -> Vec<(i32, i32)> {
    let corners: &[(i32, i32)] = match marker {
        Marker::Square => &[(-3, -3), (3, -3), (3, 3), (-3, 3)],
        Marker::Diamond => &[(-5, 0), (0, -5), (5, 0), (0, 5)],
        Marker::Triangle => &[(-4, 4), (0, -5), (4, 4)],
    };
    corners.iter().map(|&(x, y)| (x + right, y)).collect()
}

fn draw_legend<B: DrawingBackend>(
    names: &[(String, Sample)],
    area: &Area<B>,
) -> anyhow::Result<()> {
    let unit = || Scale::across(&Axis::numbers("", 0.0, 1.0), 1);
    let mut chart = ChartBuilder::on(area)
        .build_cartesian_2d(unit(), unit())
        .map_err(drawing)?;
    for (name, sample) in names {
        let nothing = std::iter::empty::<Rectangle<Point>>();
        let series = chart.draw_series(nothing).map_err(drawing)?;
        let sample = *sample;
        series.label(message::cell(name)).legend(move |at| {
            let (line, stroke) = sample_line(sample);
            let (outline, fill) = sample_shape(sample);
            EmptyElement::at(at) + PathElement::new(line, stroke) + Polygon::new(outline, fill)
        });
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .legend_area_size(SAMPLE)
        .margin(0)
        .label_font(font(TEXT_SIZE))
        .draw()
        .map_err(drawing)
}

/// The line before a name, in pixels from the left end of the sample's middle.
fn sample_line(sample: Sample) -> (Vec<(i32, i32)>, ShapeStyle) {
    match sample {
        Sample::Line(style) => (vec![(0, 0), (28, 0)], stroke(&style)),
        // Within the shape.
        Sample::Area(colour) => (vec![(14, 0), (24, 0)], rgb(colour).into()),
    }
}

/// The shape before a name.
fn sample_shape(sample: Sample) -> (Vec<(i32, i32)>, RGBColor) {
    match sample {
        Sample::Area(colour) => {
            let corners = vec![(14, -5), (24, -5), (24, 5), (14, 5)];
            (corners, rgb(colour))
        }
        Sample::Line(style) => {
            // Without a marker, a point on the line.
            let corners = style.marker.map(|marker| outline(marker, 14));
            let corners = corners.unwrap_or_else(|| vec![(14, 0), (15, 0), (15, 0)]);
            (corners, rgb(style.colour))
        }
    }
}

/// An axis in pixels, with the values that are named on it.
struct Scale {
    range: (f64, f64),
    ticks: Vec<(f64, String)>,
}

impl Scale {
    fn across(axis: &Axis, pixels: u32) -> Scale {
        Scale::new(axis, pixels, |text| {
            CHARACTER * text.chars().count() as f64 + TICK_GAP
        })
    }

    fn upright(axis: &Axis, pixels: u32) -> Scale {
        Scale::new(axis, pixels, |_| TICK_HEIGHT)
    }

    /// The scale of an axis on which `room` tells how many pixels a name needs.
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

    /// A function from values to their names.
    fn namer(&self) -> impl Fn(&f64) -> String + use<> {
        let ticks = self.ticks.clone();
        move |value| {
            let named = ticks.iter().find(|(tick, _)| tick == value);
            named.map_or(String::new(), |(_, name)| name.clone())
        }
    }
}

/// The values that may be named on an axis: at most `n` round numbers, or all names.
fn candidates(axis: &Axis, n: usize) -> Vec<(f64, String)> {
    let (first, last) = axis.range;
    let numbers = || {
        let range = RangedCoordf64::from(first.min(last)..first.max(last));
        // Steps are 1, 2 or 5 times a power of ten: more digits come of rounding alone.
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
    fn ticks_are_round_numbers_with_room_for_their_names() {
        let percent = Axis::numbers("", 0.0, 100.0);
        assert_eq!(Scale::upright(&percent, 420).ticks.len(), 11);
        assert_eq!(names(&Scale::upright(&percent, 60)), ["0", "50", "100"]);
        let share = Axis::numbers("", 0.0, 1.0);
        assert_eq!(names(&Scale::upright(&share, 400))[3], "0.3");
        let layers = Axis::integers("", 3.0, 5.0);
        assert_eq!(names(&Scale::across(&layers, 700)), ["3", "4", "5"]);
        let large = Axis::numbers("", 0.0, 5e9);
        for pixels in [0, 1, 40, 200, 5000] {
            let scale = Scale::across(&large, pixels);
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
    fn numbers_are_named_at_their_places() {
        let layers = Axis::numbered("", vec![1, 3, 5, 10, 20, 23]);
        let scale = Scale::upright(&layers, 200);
        assert!(scale.ticks.contains(&(3.0, "10".into())));
        assert!(scale.ticks.contains(&(4.0, "20".into())));
        assert!(
            Scale::upright(&Axis::numbered("", Vec::new()), 200)
                .ticks
                .is_empty()
        );
    }

    /// Of names without room, the more important one is kept.
    #[test]
    fn names_do_not_overlap() {
        let axis = Axis {
            ticks: Ticks::Names(vec![
                (0.0, "0".into()),
                (0.97, "1".into()),
                (1.0, "1.1".into()),
            ]),
            ..Axis::numbers("", 0.0, 1.0)
        };
        assert_eq!(names(&Scale::upright(&axis, 160)), ["0", "1"]);
    }

    /// No panic and no endless loop, whatever a trace claims.
    #[test]
    fn extreme_values_are_drawn() {
        for (from, to) in [
            (0.0, 1e-300),
            (0.0, 1.8e19),
            (1e18, 1e18 + 1000.0),
            (-1e300, 1e300),
        ] {
            let panel = Panel {
                title: "a".into(),
                size: (200, 100),
                x: Axis::numbers("x", from, to),
                y: Axis::numbers("y", from, to),
                marks: vec![
                    Mark::area([(from, from), (to, to)], Colour(1, 2, 3)),
                    Mark::area([(f64::NAN, from), (f64::INFINITY, to)], Colour(1, 2, 3)),
                ],
            };
            let figure = Figure {
                title: "x".repeat(1000),
                subtitle: String::new(),
                panels: vec![panel],
                key: Key::Legend(Vec::new()),
            };
            let (mut png_bytes, mut svg_bytes) = (Vec::new(), Vec::new());
            png(&figure, &mut png_bytes).unwrap();
            svg(&figure, &mut svg_bytes).unwrap();
            assert!(String::from_utf8(svg_bytes).unwrap().contains("xxx…"));
        }
    }
}
