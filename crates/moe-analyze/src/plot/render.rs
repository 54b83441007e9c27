//! Draws figures with plotters.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::Once;

use anyhow::anyhow;
use plotters::coord::Shift;
use plotters::coord::cartesian::Cartesian2d;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, register_font};

use super::scale::Scale;
use super::{Axis, Colour, Figure, Key, LineStyle, Mark, Marker, Panel, Point, Sample, Ticks};
use crate::output::message;

/// DejaVu Sans is embedded in the binary, and used to measure texts for both formats. A viewer of an SVG without the font uses another.
const FONT: &str = "DejaVu Sans, sans-serif";
/// Bytes per pixel of the bitmap backend.
const RGB_BYTES: usize = 3;

const TEXT: RGBColor = RGBColor(40, 40, 48);
const FRAME: RGBColor = RGBColor(150, 150, 158);
const GRID: RGBColor = RGBColor(228, 228, 232);
const TITLE_SIZE: u32 = 20;
const TEXT_SIZE: u32 = 13;
const TICK_SIZE: u32 = 12;

/// Pixels of the margin, of the title with the subtitle, and between the panels and the legend.
const MARGIN: u32 = 16;
const HEAD: u32 = 70;
const GAP: u32 = 20;
/// Pixels of a panel's title, and of the labels of its axes.
const PANEL_TITLE: u32 = 24;
const X_LABELS: u32 = 52;
const Y_LABELS: u32 = 68;
/// Pixels of a sample in the legend, and of a row of the legend.
const SAMPLE: u32 = 36;
const LEGEND_ROW: u32 = 18;
/// Maximum width to which a title extends a figure.
const MAX_TITLE: u32 = 1200;
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

/// Returns width and height of a figure in pixels.
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

/// Returns width and height of a panel with its title and labels in pixels.
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

/// Returns the width of a text in pixels.
fn text_width(text: &str, size: u32) -> u32 {
    let font = FontDesc::from((FONT, size));
    font.box_size(text).map_or(0, |(width, _)| width)
}

fn register_fonts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // An invalid font would be an error of the first text.
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

/// Returns the text, truncated to `room` pixels.
fn shortened(text: &str, size: u32, room: u32) -> String {
    if text_width(text, size) <= room {
        return text.to_owned();
    }
    let mut text = text.to_owned();
    while text.pop().is_some() && text_width(&format!("{text}…"), size) > room {}
    text + "…"
}

/// Side of the labels of the y axis.
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
        Scale::horizontal(&panel.x, panel.size.0),
        Scale::vertical(&panel.y, panel.size.1),
    );
    let (x_labels, y_labels) = (x.labels(), y.labels());
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
        .x_label_formatter(&x_labels)
        .y_label_formatter(&y_labels)
        .x_desc(&panel.x.label)
        .y_desc(&panel.y.label);
    if !matches!(panel.y.ticks, Ticks::Numbers | Ticks::Integers) {
        mesh.disable_y_mesh();
    }
    mesh.draw().map_err(drawing)?;
    // The width of a pixel is the minimum width of an area.
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

/// Returns the corners of a marker, `right` pixels to the right of its point.
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
    let unit = || Scale::horizontal(&Axis::numbers("", 0.0, 1.0), 1);
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

/// Returns the line of a sample, in pixels from the middle of its left edge.
fn sample_line(sample: Sample) -> (Vec<(i32, i32)>, ShapeStyle) {
    match sample {
        Sample::Line(style) => (vec![(0, 0), (28, 0)], stroke(&style)),
        // Covered by the shape.
        Sample::Area(colour) => (vec![(14, 0), (24, 0)], rgb(colour).into()),
    }
}

/// Returns the shape of a sample.
fn sample_shape(sample: Sample) -> (Vec<(i32, i32)>, RGBColor) {
    match sample {
        Sample::Area(colour) => {
            let corners = vec![(14, -5), (24, -5), (24, 5), (14, 5)];
            (corners, rgb(colour))
        }
        Sample::Line(style) => {
            // Without a marker, a point on the line, which is invisible.
            let corners = style.marker.map(|marker| outline(marker, 14));
            let corners = corners.unwrap_or_else(|| vec![(14, 0), (15, 0), (15, 0)]);
            (corners, rgb(style.colour))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of a trace can be arbitrary; drawing must neither panic nor loop forever.
    #[test]
    fn draws_extreme_values() {
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
