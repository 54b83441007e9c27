//! Buffers of a run, and their memory over time.

use std::collections::BTreeMap;

use moe_trace::buffers::{BufferEvent, Timeline};

use crate::charts::reduced;
use crate::document::{Axis, Buffer, Chart, Series, layer_or_none};

/// The buffers of a run, with times relative to `first`, the time of its first record. If the events have no times on the clock of
/// the records, the times of the buffers are unknown: they exist during the complete run.
pub(crate) fn buffers(events: &[BufferEvent], first: i64) -> Vec<Buffer> {
    let on_clock = |event: &BufferEvent| Some((event.timestamp_ms, event.timestamp_ns?));
    let clock = events.iter().find_map(on_clock);
    let relative = |ms: f64| -> Option<i64> {
        let (clock_ms, clock_ns) = clock?;
        let clock_ns = i64::try_from(clock_ns).unwrap_or(i64::MAX);
        let since = ((ms - clock_ms) * 1e6).round() as i64;
        Some(clock_ns.saturating_sub(first).saturating_add(since).max(0))
    };
    let (timeline, _) = Timeline::new(events);
    let buffers = timeline.buffers.into_iter().map(|buffer| Buffer {
        alloc: relative(buffer.alloc_time_ms).unwrap_or(0),
        dealloc: buffer.dealloc_time_ms.and_then(relative),
        name: buffer.name,
        backend: buffer.backend,
        usage: buffer.usage_name,
        layer: layer_or_none(buffer.layer),
        size: buffer.size,
    });
    buffers.collect()
}

/// Memory over time by backend; `None` without buffers.
pub(crate) fn chart(input: usize, buffers: &[Buffer], duration: i64) -> Option<Chart> {
    let mut changes: BTreeMap<&str, Vec<(i64, i128)>> = BTreeMap::new();
    for buffer in buffers {
        let changes = changes.entry(&buffer.backend).or_default();
        changes.push((buffer.alloc, buffer.size.into()));
        if let Some(dealloc) = buffer.dealloc {
            changes.push((dealloc, -i128::from(buffer.size)));
        }
    }
    let series = changes.into_iter().map(|(backend, mut changes)| {
        changes.sort_by_key(|&(time, _)| time);
        let mut points: Vec<(f64, f64)> = vec![(0.0, 0.0)];
        let mut bytes = 0i128;
        for (time, change) in changes {
            bytes += change;
            let point = (time as f64, bytes as f64);
            match points.last_mut() {
                Some(last) if last.0 >= point.0 => *last = point,
                _ => points.push(point),
            }
        }
        let end = duration as f64;
        if let Some(&(_, bytes)) = points.last().filter(|last| last.0 < end) {
            points.push((end, bytes));
        }
        let points = reduced(points).into_iter();
        Series::new(backend, "step", points.map(|(x, y)| (x, Some(y))))
    });
    let series: Vec<Series> = series.collect();
    (!series.is_empty()).then(|| Chart {
        id: format!("buffers-{input}"),
        group: "buffers",
        input: Some(input),
        title: "Memory of buffers over time".to_owned(),
        note: Some("The backend mmap is the address space of the model's files.".to_owned()),
        x: Axis::new("time", "time"),
        y: Axis {
            min: Some(0.0),
            ..Axis::new("memory (bytes)", "bytes")
        },
        series,
    })
}

#[cfg(test)]
mod tests {
    use moe_trace::buffers::{self, Change};

    use super::*;

    fn event(timestamp_ms: f64, change: Change) -> BufferEvent {
        BufferEvent {
            timestamp_ms,
            timestamp_ns: Some(1_000_000),
            change,
        }
    }

    #[test]
    fn times_are_on_the_clock_of_the_records() {
        let buffer = buffers::Buffer {
            buffer_id: 1,
            buffer_ptr: 0,
            size: 100,
            name: "results".to_owned(),
            backend: "CPU".to_owned(),
            usage: buffers::usage::COMPUTE,
            layer: None,
        };
        let events = [
            event(2.0, Change::Alloc(buffer)),
            event(5.0, Change::Dealloc { buffer_id: 1 }),
        ];
        // The first record is 0.5 ms after the allocation.
        let found = super::buffers(&events, 1_500_000);
        assert_eq!((found[0].alloc, found[0].dealloc), (0, Some(2_500_000)));
        assert_eq!((found[0].usage, found[0].layer), ("COMPUTE", -1));
        let chart = chart(0, &found, 3_000_000).unwrap();
        assert_eq!(chart.series[0].x, [0.0, 2_500_000.0, 3_000_000.0]);
        assert_eq!(chart.series[0].y, [Some(100.0), Some(0.0), Some(0.0)]);
    }
}
