//! Memory over time as stacked steps, one colour per usage.

use moe_trace::buffers::{Timeline, usage};

use super::{Axis, Colour, Figure, Key, Mark, Panel, Sample, colour};
use crate::output::human_bytes;

const SIZE: (u32, u32) = (760, 190);
const N_BANDS: usize = 3;

/// Usage, name and colour of the bands, from bottom to top.
const BANDS: [(u8, &str, Colour); N_BANDS] = [
    (usage::WEIGHTS, "weights", colour::SLATE),
    (usage::ANY, "KV cache, other", colour::RED),
    (usage::COMPUTE, "results of operations", colour::ORANGE),
];

/// Milliseconds of an event, and bytes of each band after it.
type Step = (f64, [u64; N_BANDS]);

/// Returns the plot of the memory of a run's buffers over time. The upper panel shows all buffers, the lower panel those without weights,
/// which are much larger than the rest. The time axis ends at `end_ms`, the end of the run, or at the last event if that is later.
pub fn occupancy(run: &str, timeline: &Timeline, end_ms: Option<f64>) -> Figure {
    let steps = steps(timeline);
    let last = steps.last().map_or(0.0, |step| step.0);
    let last = end_ms.map_or(last, |end_ms| end_ms.max(last));
    let (divisor, unit) = if last >= 10_000.0 {
        (1000.0, "s")
    } else {
        (1.0, "ms")
    };
    let panel = |first_band: usize, title: &str| {
        let highest = steps
            .iter()
            .map(|(_, bands)| sum(&bands[first_band..]))
            .max();
        let (unit_bytes, byte_unit) = byte_unit(highest.unwrap_or(0));
        let bytes = |bytes: u64| bytes as f64 / unit_bytes;
        let mut marks = Vec::new();
        let ends = steps.iter().skip(1).map(|step| step.0).chain([last]);
        for ((from, bands), to) in steps.iter().zip(ends) {
            let mut below = 0u64;
            for (n_bytes, (_, _, colour)) in bands.iter().zip(BANDS).skip(first_band) {
                let above = below.saturating_add(*n_bytes);
                if *n_bytes > 0 {
                    let corners = [(from / divisor, bytes(below)), (to / divisor, bytes(above))];
                    marks.push(Mark::area(corners, colour));
                }
                below = above;
            }
        }
        Panel {
            title: title.into(),
            size: SIZE,
            x: Axis::numbers(format!("time ({unit})"), 0.0, last / divisor),
            y: Axis::numbers(
                format!("memory ({byte_unit})"),
                0.0,
                bytes(highest.unwrap_or(0)),
            ),
            marks,
        }
    };
    let names = BANDS.iter().rev();
    let names = names.map(|&(_, name, colour)| (name.to_owned(), Sample::Area(colour)));
    let peak = human_bytes(timeline.metadata.peak_occupancy_bytes);
    Figure {
        title: "Memory of buffers over time".into(),
        subtitle: format!("{run}: peak {peak}"),
        panels: vec![panel(0, "all buffers"), panel(1, "without the weights")],
        key: Key::Legend(names.collect()),
    }
}

fn steps(timeline: &Timeline) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut taken = [0u64; N_BANDS];
    let band = |usage: u8| BANDS.iter().position(|(of, ..)| *of == usage).unwrap_or(1);
    let begins = timeline.buffers.iter().map(|b| (b.alloc_time_ms, true, b));
    let ends = timeline
        .buffers
        .iter()
        .filter_map(|b| Some((b.dealloc_time_ms?, false, b)));
    let mut changes: Vec<_> = begins.chain(ends).collect();
    // Deallocations precede allocations at the same time: a buffer that grows is freed and allocated again.
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
    steps
}

fn sum(bands: &[u64]) -> u64 {
    bands.iter().copied().fold(0, u64::saturating_add)
}

/// Returns the size in bytes and the name of the unit in which a number of bytes has at most four digits.
fn byte_unit(bytes: u64) -> (f64, &'static str) {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut size = 1.0;
    for unit in units {
        if (bytes as f64) < 1024.0 * size {
            return (size, unit);
        }
        size *= 1024.0;
    }
    (size, "EiB")
}

#[cfg(test)]
mod tests {
    use moe_trace::LayerId;
    use moe_trace::buffers::{Buffer, BufferEvent, Change};

    use super::*;

    #[test]
    fn time_axis_ends_at_the_end_of_the_run_or_a_later_event() {
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
                layer: Some(LayerId(0)),
            }),
        };
        let (timeline, _) = Timeline::new(&[event]);
        for (end_ms, expected) in [(Some(7.5), 7.5), (None, 2.0), (Some(1.0), 2.0)] {
            let figure = occupancy("run", &timeline, end_ms);
            for panel in figure.panels {
                assert_eq!(panel.x.range, (0.0, expected));
            }
        }
    }

    #[test]
    fn selects_a_unit_for_the_number() {
        assert_eq!(byte_unit(0), (1.0, "bytes"));
        assert_eq!(byte_unit(1023), (1.0, "bytes"));
        assert_eq!(byte_unit(9 << 20), (1024.0 * 1024.0, "MiB"));
        assert_eq!(byte_unit(u64::MAX).1, "EiB");
    }
}
