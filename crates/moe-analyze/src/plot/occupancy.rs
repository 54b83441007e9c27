//! Memory over time: stacked steps, one colour a usage.

use std::path::Path;

use moe_files::AtomicFile;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use moe_trace::buffers::{Timeline, usage};

use super::{Canvas, Picture, TEXT, nice_step, prepare_picture};
use crate::output::human_bytes;

const WIDTH: i32 = 960;
const HEIGHT: i32 = 560;
const LEFT: i32 = 96;
const RIGHT: i32 = 28;
const TOP: i32 = 92;
const BOTTOM: i32 = 60;
/// Between the panels.
const GAP: i32 = 52;

/// The bands from below, with what they are called and how they look.
const BANDS: [(u8, &str, RGBColor); 3] = [
    (usage::WEIGHTS, "weights", RGBColor(166, 178, 196)),
    (usage::ANY, "key-value cache, other", RGBColor(196, 66, 92)),
    (
        usage::COMPUTE,
        "results of operations",
        RGBColor(250, 178, 106),
    ),
];

/// Memory that the buffers of a run take over time. Above, all of it; below, without the weights, which dwarf the rest.
pub struct Occupancy {
    title: String,
    peak: u64,
    /// End of the time axis, milliseconds.
    end_ms: f64,
    /// (milliseconds, bytes of each band) after each event.
    steps: Vec<(f64, [u64; BANDS.len()])>,
}

impl Occupancy {
    /// The picture of a run's timeline; `title` names the run. It ends with the run (`end_ms`) or with the last event, whichever is
    /// later.
    pub fn new(title: String, timeline: &Timeline, end_ms: Option<f64>) -> Occupancy {
        let mut steps: Vec<(f64, [u64; BANDS.len()])> = Vec::new();
        let mut taken = [0u64; BANDS.len()];
        let band = |usage: u8| BANDS.iter().position(|(of, ..)| *of == usage).unwrap_or(1);
        let begins = timeline.buffers.iter().map(|b| (b.alloc_time_ms, true, b));
        let ends = timeline
            .buffers
            .iter()
            .filter_map(|b| Some((b.dealloc_time_ms?, false, b)));
        let mut changes: Vec<_> = begins.chain(ends).collect();
        // At one moment what goes goes first: a buffer that grows is given back before it is made anew.
        changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        for (time, is_begin, buffer) in changes {
            let bytes = &mut taken[band(buffer.usage)];
            *bytes = if is_begin {
                bytes.saturating_add(buffer.size)
            } else {
                bytes.saturating_sub(buffer.size)
            };
            match steps.last_mut() {
                Some(last) if last.0 == time => last.1 = taken,
                _ => steps.push((time, taken)),
            }
        }
        let peak = timeline.metadata.peak_occupancy_bytes;
        let last = steps.last().map_or(0.0, |step| step.0);
        Occupancy {
            title,
            peak,
            end_ms: end_ms.map_or(last, |end_ms| end_ms.max(last)),
            steps,
        }
    }

    /// Draws the picture for a file, PNG or SVG by its extension, which is in its place once it is committed.
    pub fn prepare(&self, path: &Path, force: bool) -> anyhow::Result<AtomicFile> {
        prepare_picture(self, path, force)
    }

    fn duration(&self) -> f64 {
        if self.end_ms > 0.0 { self.end_ms } else { 1.0 }
    }

    /// One panel: the bands from `first_band` on, stacked.
    fn draw_panel<B: DrawingBackend>(
        &self,
        canvas: &Canvas<B>,
        [top, bottom]: [i32; 2],
        first_band: usize,
        title: &str,
    ) -> anyhow::Result<()> {
        let sum = |bands: &[u64; BANDS.len()]| {
            let bands = bands[first_band..].iter().copied();
            bands.fold(0, u64::saturating_add)
        };
        let highest = self
            .steps
            .iter()
            .map(|(_, bands)| sum(bands))
            .max()
            .unwrap_or(0);
        let (step, n_ticks) = byte_ticks(highest);
        let scale = step as f64 * n_ticks as f64;
        let x = |ms: f64| LEFT + (ms / self.duration() * f64::from(WIDTH - LEFT - RIGHT)) as i32;
        let y = |bytes: u64| bottom - (bytes as f64 / scale * f64::from(bottom - top)) as i32;
        canvas.text(title, (LEFT, top - 10), 13, HPos::Left, VPos::Bottom)?;
        for tick in 0..=n_ticks {
            let value = step.saturating_mul(tick);
            let at = y(value);
            canvas.grid_line((LEFT, at), (WIDTH - RIGHT, at))?;
            let label = human_bytes(value);
            canvas.text(&label, (LEFT - 8, at), 12, HPos::Right, VPos::Center)?;
        }
        let ends = self.steps.iter().skip(1).map(|step| step.0);
        for ((from, bands), to) in self.steps.iter().zip(ends.chain([self.duration()])) {
            let mut below = 0;
            for (bytes, (_, _, colour)) in bands.iter().zip(BANDS).skip(first_band) {
                let above = bytes.saturating_add(below);
                if *bytes > 0 {
                    let corners = [(x(*from), y(above)), (x(to).max(x(*from) + 1), y(below))];
                    canvas.rectangle(corners, colour.filled())?;
                }
                below = above;
            }
        }
        let frame = [(LEFT, top), (WIDTH - RIGHT, bottom)];
        canvas.rectangle(frame, TEXT.mix(0.4).stroke_width(1))
    }

    fn draw_time<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        let (divisor, unit) = if self.duration() >= 10_000.0 {
            (1000.0, "s")
        } else {
            (1.0, "ms")
        };
        let whole = self.duration() / divisor;
        let step = nice_step(whole, 8.0);
        let n = (whole / step + 1e-9) as i32;
        let foot = HEIGHT - BOTTOM;
        for tick in 0..=n {
            let value = f64::from(tick) * step;
            let x = LEFT + (value / whole * f64::from(WIDTH - LEFT - RIGHT)) as i32;
            canvas.line((x, foot), (x, foot + 4))?;
            let label = format!("{value:.prec$}", prec = if step < 1.0 { 1 } else { 0 });
            canvas.text(&label, (x, foot + 8), 12, HPos::Center, VPos::Top)?;
        }
        let middle = (LEFT + (WIDTH - LEFT - RIGHT) / 2, foot + 30);
        canvas.text(
            &format!("time, {unit}"),
            middle,
            14,
            HPos::Center,
            VPos::Top,
        )
    }
}

impl Picture for Occupancy {
    fn size(&self) -> (u32, u32) {
        (WIDTH as u32, HEIGHT as u32)
    }

    fn draw<B: DrawingBackend>(&self, canvas: &Canvas<B>) -> anyhow::Result<()> {
        canvas.text(
            "Memory taken by buffers",
            (LEFT, 14),
            20,
            HPos::Left,
            VPos::Top,
        )?;
        let subtitle = format!("{}: {} at most", self.title, human_bytes(self.peak));
        canvas.text(&subtitle, (LEFT, 42), 13, HPos::Left, VPos::Top)?;
        canvas.legend(
            WIDTH - RIGHT,
            &BANDS.map(|(_, name, colour)| (name, colour)),
        )?;
        let height = (HEIGHT - TOP - BOTTOM - GAP) / 2;
        let lower = HEIGHT - BOTTOM - height;
        self.draw_panel(canvas, [TOP, TOP + height], 0, "everything")?;
        self.draw_panel(canvas, [lower, HEIGHT - BOTTOM], 1, "without the weights")?;
        self.draw_time(canvas)
    }
}

/// A power of two, and how often it is needed to reach `highest`: two to four times.
fn byte_ticks(highest: u64) -> (u64, u64) {
    let step = (highest / 4)
        .max(1)
        .checked_next_power_of_two()
        .unwrap_or(1 << 62);
    (step, highest.div_ceil(step).max(1))
}

#[cfg(test)]
mod tests {
    use moe_trace::buffers::{Buffer, BufferEvent, Change};

    use super::*;

    #[test]
    fn time_axis_ends_with_the_run_or_a_later_event() {
        let event = BufferEvent {
            timestamp_ms: 2.0,
            timestamp_ns: Some(9),
            change: Change::Alloc(Buffer {
                buffer_id: 1,
                buffer_ptr: 0,
                size: 8,
                name: String::new(),
                backend: String::new(),
                usage: usage::COMPUTE,
                layer: 0,
            }),
        };
        let (timeline, _) = Timeline::new(&[event]);
        for (end_ms, expected) in [(Some(7.5), 7.5), (None, 2.0), (Some(1.0), 2.0)] {
            let occupancy = Occupancy::new("run".into(), &timeline, end_ms);
            assert_eq!(occupancy.duration(), expected);
        }
    }

    #[test]
    fn steps_are_round_and_few() {
        for (whole, step) in [
            (8.0, 1.0),
            (9.0, 2.0),
            (73.4, 10.0),
            (0.5, 0.1),
            (1234.0, 200.0),
        ] {
            assert_eq!(nice_step(whole, 8.0), step, "{whole}");
        }
        for (highest, expected) in [
            (0, (1, 1)),
            (4096, (1024, 4)),
            (4097, (1024, 5)),
            (9 << 20, (4 << 20, 3)),
        ] {
            assert_eq!(byte_ticks(highest), expected);
        }
        let (step, n) = byte_ticks(u64::MAX);
        assert!(n <= 4 && step.is_power_of_two());
    }
}
