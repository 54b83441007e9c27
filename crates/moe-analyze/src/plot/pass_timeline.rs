//! A pass under Post-Fetch over time: what the host, the link and the GPU did, and how much of each layer's transfers hid.

use std::path::Path;

use moe_analysis::overlap::{self, OverlapReport};
use moe_trace::transfers::{Span, Transfer};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::{Canvas, FRAME, Picture, TEXT, nice_step, prepare_picture, tick_step};
use crate::files;

const WIDTH: i32 = 1100;
const LEFT: i32 = 116;
const RIGHT: i32 = 28;
const TOP: i32 = 104;
const LANE: i32 = 30;
const LANE_GAP: i32 = 6;
const LANES: i32 = 3 * LANE + 4 * LANE_GAP;
/// From the foot of one panel to the head of the next: ticks, their label, the next one's title.
const GAP: i32 = 78;
const BARS: i32 = 130;
const BOTTOM: i32 = 58;
/// Layers of the magnified panel; a pass of fewer than twice as many has none.
const N_MAGNIFIED: usize = 4;

/// What the lanes show and how it looks: the colours differ in lightness, so that they can be told apart in grey.
const GATE_UP: (&str, RGBColor) = ("gate and up", RGBColor(166, 178, 196));
const HIDDEN: (&str, RGBColor) = ("transfer under them", RGBColor(250, 178, 106));
const EXPOSED: (&str, RGBColor) = ("transfer beside them", RGBColor(196, 66, 92));
const DOWN: (&str, RGBColor) = ("down on the GPU", RGBColor(74, 16, 92));

/// The picture of a pass.
pub struct PassTimeline {
    subtitle: String,
    pass: Vec<Transfer>,
    /// Layer, hidden and hideable share, of all passes of the phase.
    shares: Vec<(u16, Option<f64>, Option<f64>)>,
}

impl PassTimeline {
    /// The picture of `pass`, which `title` names, with the layers' shares of `report`.
    pub fn new(title: String, pass: &[Transfer], report: &OverlapReport) -> PassTimeline {
        let length = overlap::bounds(pass).map_or(0, Span::ns);
        let what = pass.first().map_or(String::new(), |first| {
            format!(
                ": {} of sequence {} at position {} in {:.3} ms",
                match first.n_tokens {
                    1 => "one token".into(),
                    n => format!("{n} tokens"),
                },
                first.sequence_id,
                first.token_id,
                length as f64 * 1e-6
            )
        });
        let shares = report
            .layers
            .iter()
            .map(|(&layer, figures)| (layer, figures.hidden_share(), figures.hideable_share()));
        PassTimeline {
            subtitle: title + &what,
            pass: pass.to_vec(),
            shares: shares.collect(),
        }
    }

    /// Draws the picture into a file, PNG or SVG by its extension.
    pub fn write(&self, path: &Path, force: bool) -> anyhow::Result<()> {
        files::commit(vec![prepare_picture(self, path, force)?])
    }

    /// The layers in the middle of the pass, if it has too many to be seen well.
    fn magnified(&self) -> Option<&[Transfer]> {
        let first = (self.pass.len() / 2).checked_sub(N_MAGNIFIED / 2)?;
        let is_long = self.pass.len() >= 2 * N_MAGNIFIED;
        self.pass
            .get(first..first + N_MAGNIFIED)
            .filter(|_| is_long)
    }

    /// Heads of the panels: the pass, its magnified part, the bars; then the foot of all.
    fn layout(&self) -> [i32; 4] {
        let magnified = TOP + LANES + GAP;
        let bars = match self.magnified() {
            Some(_) => magnified + LANES + GAP,
            None => magnified,
        };
        [TOP, magnified, bars, bars + BARS + BOTTOM]
    }

    /// Hidden share of each layer as a bar; what could have hidden as a line above it.
    fn draw_bars<B: DrawingBackend>(&self, canvas: &Canvas<B>, top: i32) -> anyhow::Result<()> {
        let foot = top + BARS;
        let title = "hidden share of each layer's transfers, all passes of the phase, %; the line is what could have hidden";
        canvas.text(title, (LEFT, top - 10), 13, HPos::Left, VPos::Bottom)?;
        let y = |share: f64| foot - (share.clamp(0.0, 1.0) * f64::from(BARS)).round() as i32;
        for percent in [0, 25, 50, 75, 100] {
            let at = y(f64::from(percent) / 100.0);
            canvas.grid_line((LEFT, at), (WIDTH - RIGHT, at))?;
            let label = percent.to_string();
            canvas.text(&label, (LEFT - 8, at), 12, HPos::Right, VPos::Center)?;
        }
        let n = self.shares.len().max(1) as f64;
        let width = f64::from(WIDTH - LEFT - RIGHT) / n;
        let x = |place: f64| LEFT + (place * width).round() as i32;
        let step = tick_step((width as i32).max(1), 24);
        for (place, &(layer, hidden, hideable)) in (0..).map(f64::from).zip(&self.shares) {
            let gap = (width * 0.15).min(8.0) / width;
            let (left, right) = (x(place + gap), x(place + 1.0 - gap));
            let right = right.max(left + 1);
            if let Some(hidden) = hidden {
                canvas.rectangle([(left, y(hidden)), (right, foot)], HIDDEN.1.filled())?;
            }
            if let Some(hideable) = hideable {
                let at = y(hideable);
                canvas.rectangle([(left, at - 1), (right, at + 1)], DOWN.1.filled())?;
            }
            if u32::from(layer).is_multiple_of(step) {
                let at = (x(place + 0.5), foot + 6);
                canvas.text(&layer.to_string(), at, 12, HPos::Center, VPos::Top)?;
            }
        }
        let frame = [(LEFT, top), (WIDTH - RIGHT, foot)];
        canvas.rectangle(frame, FRAME.stroke_width(1))?;
        let middle = (LEFT + (WIDTH - LEFT - RIGHT) / 2, foot + 28);
        canvas.text("layer", middle, 14, HPos::Center, VPos::Top)
    }
}

impl Picture for PassTimeline {
    fn size(&self) -> (u32, u32) {
        let [.., height] = self.layout();
        (WIDTH as u32, height as u32)
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        canvas.text(
            "A pass under Post-Fetch",
            (LEFT, 14),
            20,
            HPos::Left,
            VPos::Top,
        )?;
        canvas.text(&self.subtitle, (LEFT, 42), 13, HPos::Left, VPos::Top)?;
        canvas.legend(WIDTH - RIGHT, &[GATE_UP, HIDDEN, EXPOSED, DOWN])?;
        let [pass, magnified, bars, _] = self.layout();
        Panel::new(&self.pass, pass).draw(canvas, "the pass, by layer")?;
        if let Some(runs) = self.magnified() {
            Panel::new(runs, magnified).draw(canvas, "some of its layers, magnified")?;
        }
        self.draw_bars(canvas, bars)
    }
}

/// The three lanes of some layers of a pass.
struct Panel<'a> {
    runs: &'a [Transfer],
    bounds: Span,
    top: i32,
}

impl<'a> Panel<'a> {
    fn new(runs: &'a [Transfer], top: i32) -> Panel<'a> {
        let bounds = overlap::bounds(runs).unwrap_or(Span {
            start_ns: 0,
            end_ns: 0,
        });
        Panel { runs, bounds, top }
    }

    /// Where a fraction of the panel's time lies.
    fn at(fraction: f64) -> i32 {
        LEFT + (fraction * f64::from(WIDTH - LEFT - RIGHT)).round() as i32
    }

    fn x(&self, ns: u64) -> i32 {
        let since = ns.saturating_sub(self.bounds.start_ns) as f64;
        Self::at(since / self.bounds.ns().max(1) as f64)
    }

    fn lane(&self, lane: i32) -> [i32; 2] {
        let top = self.top + LANE_GAP + lane * (LANE + LANE_GAP);
        [top, top + LANE]
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>, title: &str) -> anyhow::Result<()> {
        canvas.text(title, (LEFT, self.top - 22), 13, HPos::Left, VPos::Bottom)?;
        for (lane, name) in (0..).zip(["CPU", "link", "GPU"]) {
            let [top, foot] = self.lane(lane);
            let at = (LEFT - 10, (top + foot) / 2);
            canvas.text(name, at, 13, HPos::Right, VPos::Center)?;
        }
        for run in self.runs {
            self.draw_run(canvas, run)?;
        }
        self.draw_layers(canvas)?;
        self.draw_time(canvas)?;
        let frame = [(LEFT, self.top), (WIDTH - RIGHT, self.top + LANES)];
        canvas.rectangle(frame, TEXT.mix(0.4).stroke_width(1))
    }

    fn draw_run<B: DrawingBackend>(
        &self,
        canvas: &Canvas<B>,
        run: &Transfer,
    ) -> anyhow::Result<()> {
        let bar = |lane: i32, start: u64, end: u64, colour: RGBColor| {
            let [top, foot] = self.lane(lane);
            let left = self.x(start);
            let corners = [(left, top), (self.x(end).max(left + 1), foot)];
            canvas.rectangle(corners, colour.filled())
        };
        let window = run.window;
        bar(0, window.start_ns, window.end_ns, GATE_UP.1)?;
        if let Some(transfer) = run.transfer {
            bar(1, transfer.start_ns, transfer.end_ns, EXPOSED.1)?;
            let start = transfer.start_ns.max(window.start_ns);
            let end = transfer.end_ns.min(window.end_ns);
            if start < end {
                bar(1, start, end, HIDDEN.1)?;
            }
        }
        match run.product {
            Some(product) => bar(2, product.start_ns, product.end_ns, DOWN.1),
            None => Ok(()),
        }
    }

    /// Numbers of the layers above where their windows begin, as there is room for them.
    fn draw_layers<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        let mean = (WIDTH - LEFT - RIGHT) / (self.runs.len() as i32).max(1);
        let step = tick_step(mean.max(1), 30);
        // Layers that took less time than others have less room.
        let mut free = LEFT;
        for run in self.runs {
            let x = self.x(run.window.start_ns);
            if x >= free && u32::from(run.layer_id).is_multiple_of(step) {
                canvas.line((x, self.top - 4), (x, self.top))?;
                let label = run.layer_id.to_string();
                canvas.text(&label, (x, self.top - 6), 11, HPos::Center, VPos::Bottom)?;
                free = x + 7 + 7 * label.len() as i32;
            }
        }
        Ok(())
    }

    fn draw_time<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        let whole_us = self.bounds.ns().max(1) as f64 * 1e-3;
        let (whole, unit) = if whole_us >= 10_000.0 {
            (whole_us * 1e-3, "ms")
        } else {
            (whole_us, "µs")
        };
        let step = nice_step(whole, 10.0);
        let decimals = (-step.log10().floor()).max(0.0) as usize;
        let foot = self.top + LANES;
        for tick in 0..=(whole / step + 1e-9) as i32 {
            let value = f64::from(tick) * step;
            let x = Self::at(value / whole);
            canvas.line((x, foot), (x, foot + 4))?;
            let label = format!("{value:.decimals$}");
            canvas.text(&label, (x, foot + 6), 12, HPos::Center, VPos::Top)?;
        }
        let end = (LEFT - 10, foot + 6);
        canvas.text(unit, end, 12, HPos::Right, VPos::Top)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moe_analysis::overlap::Reads;

    fn pass(n_layer: u16, clock: u64) -> Vec<Transfer> {
        let span = |start_ns, length| Span {
            start_ns,
            end_ns: start_ns + length,
        };
        let run = |layer_id: u16| {
            let start = clock + u64::from(layer_id) * 230_000;
            let length = 60_000 + 9_000 * u64::from(layer_id % 12);
            Transfer {
                sequence_id: 0,
                token_id: 12,
                phase: 1,
                layer_id,
                n_tokens: 1,
                n_experts: 8,
                n_fetched: 8,
                bytes: 4 << 20,
                transfer: (layer_id % 7 != 5).then(|| span(start - 5_000, length)),
                window: span(start, 110_000),
                product: (layer_id % 7 != 5)
                    .then(|| span(start + length.max(110_000) + 2_000, 15_000)),
            }
        };
        (0..n_layer).map(run).collect()
    }

    #[test]
    fn passes_of_any_length_have_all_their_bars() {
        let dir = tempfile::tempdir().unwrap();
        let mut longest = pass(1, 5_000);
        longest[0].window.end_ns = u64::MAX;
        let mut empty = pass(1, 5_000);
        empty[0].transfer = None;
        empty[0].product = None;
        empty[0].window = Span {
            start_ns: 7,
            end_ns: 7,
        };
        let passes = [
            pass(1, 5_000),
            pass(7, 5_000),
            pass(48, 1_800_000_000_000_000_000),
            longest,
            empty,
        ];
        for (n, pass) in passes.iter().enumerate() {
            let report = overlap::report(pass, 1, &Reads::default()).unwrap();
            let picture = PassTimeline::new("run, pass 0 of 1".into(), pass, &report);
            assert_eq!(picture.magnified().is_some(), pass.len() >= 2 * N_MAGNIFIED);
            let [png, svg] = ["png", "svg"].map(|extension| {
                let path = dir.path().join(format!("{n}.{extension}"));
                picture.write(&path, false).unwrap();
                path
            });
            assert_eq!(moe_testkit::png_size(&png), picture.size());

            let svg = std::fs::read_to_string(svg).unwrap();
            let magnified = picture.magnified().unwrap_or_default();
            let count = |is: fn(&Transfer) -> bool| {
                // A bar in each panel, and the legend's square.
                pass.iter().chain(magnified).filter(|run| is(run)).count() + 1
            };
            let bars = |(_, RGBColor(r, g, b)): (&str, RGBColor)| {
                svg.matches(&format!("fill=\"#{r:02X}{g:02X}{b:02X}\""))
                    .count()
            };
            assert_eq!(bars(GATE_UP), count(|_| true), "pass {n}");
            assert_eq!(
                bars(EXPOSED),
                count(|run| run.transfer.is_some()),
                "pass {n}"
            );
            for text in [&*picture.subtitle, "CPU", "GPU", "layer"] {
                assert!(svg.contains(&format!(">\n{text}\n<")), "{text}");
            }
        }
    }

    #[test]
    fn times_are_where_they_should_be() {
        let pass = pass(2, 1_800_000_000_000_000_000);
        let panel = Panel::new(&pass, TOP);
        assert_eq!(panel.x(panel.bounds.start_ns), LEFT);
        assert_eq!(panel.x(panel.bounds.end_ns), WIDTH - RIGHT);
        let middle = panel.bounds.start_ns + panel.bounds.ns() / 2;
        assert_eq!(panel.x(middle), LEFT + (WIDTH - LEFT - RIGHT) / 2);
    }
}
