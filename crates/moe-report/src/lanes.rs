//! Charts of a run over time: lanes, requests of a hot cache, transfers of Post-Fetch, speed.

use moe_analysis::overlap::{self, MemoryTraffic, OverlapReport};
use moe_trace::hot_cache::HotCache;
use moe_trace::transfers::Transfer;
use moe_trace::{LayerId, Phase};

use crate::charts::reduced;
use crate::document::{Axis, Chart, Series, TimeUnit};
use crate::routing::{Routing, lane_names};
use crate::tokens::TokenList;

/// Number of windows of time.
const N_WINDOWS: i64 = 200;

/// The percentage of the selections that each lane computed, over time; `None` if no lane is known.
pub(crate) fn shares(input: usize, routing: &Routing, duration: i64) -> Option<Chart> {
    if !routing.has_lanes() {
        return None;
    }
    let names = lane_names();
    let width = (duration / N_WINDOWS).max(1);
    // Selections of each lane in each window.
    let mut windows: Vec<Vec<u64>> = Vec::new();
    for (row, &start) in routing.starts().iter().enumerate() {
        let window = usize::try_from(start / width).unwrap_or(0);
        if windows.len() <= window {
            windows.resize(window + 1, vec![0; names.len()]);
        }
        for selected in routing.row(row) {
            let lane = usize::try_from(selected.lane).ok();
            if let Some(n) = lane.and_then(|lane| windows[window].get_mut(lane)) {
                *n += 1;
            }
        }
    }
    let used = |lane: &usize| windows.iter().any(|window| window[*lane] > 0);
    let series = (0..names.len()).filter(used).map(|lane| {
        let points = (0..).zip(&windows).map(|(i, window): (i64, &Vec<u64>)| {
            let all: u64 = window.iter().sum();
            let share = (all > 0).then(|| 100.0 * window[lane] as f64 / all as f64);
            ((i * width) as f64, share)
        });
        Series::new(names[lane], "line", points)
    });
    Some(Chart {
        id: format!("lanes-{input}"),
        group: "lanes",
        input: Some(input),
        title: "Selections computed by each lane over time".to_owned(),
        note: Some("The lanes of a window of time add up to 100 %.".to_owned()),
        x: Axis::new("time", "time"),
        y: Axis::percent("selections (%)"),
        series: series.collect(),
    })
}

/// The hit rate of each request of a hot expert cache; `None` without requests.
pub(crate) fn requests(input: usize, cache: &HotCache) -> Option<Chart> {
    let points = (1u32..).zip(&cache.requests).map(|(number, request)| {
        let all = request.hot_slots.saturating_add(request.cold_slots);
        let rate = (all > 0).then(|| 100.0 * request.hot_slots as f64 / all as f64);
        (f64::from(number), rate)
    });
    let points: Vec<(f64, Option<f64>)> = points.take(4000).collect();
    (!points.is_empty()).then(|| Chart {
        id: format!("requests-{input}"),
        group: "lanes",
        input: Some(input),
        title: "Hit rate of the hot cache by request".to_owned(),
        note: None,
        x: Axis::new("request", "linear"),
        y: Axis::percent("hit rate (%)"),
        series: vec![Series::new("hot_cache", "points", points)],
    })
}

/// The hidden and the hideable fraction of the transfer time of Post-Fetch, by layer.
pub(crate) fn overlap(input: usize, transfers: &[Transfer]) -> Option<Chart> {
    let mut series = Vec::new();
    let mut notes = Vec::new();
    for (phase, name) in [(Phase::Prompt, "prompt"), (Phase::Generate, "generated")] {
        let Some(report) = overlap::report(transfers, phase, &MemoryTraffic::default()) else {
            continue;
        };
        let hidden = report.all.hidden_share();
        let hideable = report.all.hideable_share();
        if let (Some(hidden), Some(hideable)) = (hidden, hideable) {
            let (hidden, hideable) = (100.0 * hidden, 100.0 * hideable);
            notes.push(format!(
                "{name} tokens: {hidden:.1} % of the transfer time are hidden, at most {hideable:.1} % are hideable."
            ));
        }
        series.push(by_layer(&report, &format!("hidden, {name}"), |stats| {
            stats.hidden_share()
        }));
        series.push(
            by_layer(&report, &format!("hideable, {name}"), |stats| {
                stats.hideable_share()
            })
            .dashed(),
        );
    }
    (!series.is_empty()).then(|| Chart {
        id: format!("overlap-{input}"),
        group: "lanes",
        input: Some(input),
        title: "Transfer time hidden behind gate and up".to_owned(),
        note: (!notes.is_empty()).then(|| notes.join(" ")),
        x: Axis::new("layer", "linear"),
        y: Axis::percent("transfer time (%)"),
        series,
    })
}

fn by_layer(
    report: &OverlapReport,
    name: &str,
    share: fn(&overlap::OverlapStats) -> Option<f64>,
) -> Series {
    let layers = report.layers.iter();
    let points = layers.map(|(&LayerId(layer), stats)| {
        let share = share(stats).map(|share| 100.0 * share);
        (f64::from(layer), share)
    });
    Series::new(name, "line", points)
}

/// Time per token of each pass; `None` for a trace without timestamps.
pub(crate) fn speed(
    input: usize,
    tokens: &TokenList,
    unit: TimeUnit,
    duration: i64,
) -> Option<Chart> {
    if unit != TimeUnit::Ns {
        return None;
    }
    // (start, phase, number of tokens) of each pass
    let mut passes: Vec<(i64, u8, u32)> = Vec::new();
    for (start, phase) in tokens.starts() {
        match passes.last_mut() {
            Some(last) if last.0 == start => last.2 += 1,
            _ => passes.push((start, phase, 1)),
        }
    }
    let ends = passes.iter().skip(1).map(|pass| pass.0).chain([duration]);
    let mut series = Vec::new();
    for (phase, name) in [(Phase::Prompt, "prompt"), (Phase::Generate, "generated")] {
        let of_phase = passes.iter().zip(ends.clone());
        let of_phase = of_phase.filter(|(pass, end)| pass.1 == phase.number() && *end > pass.0);
        let points = of_phase.map(|(&(start, _, n), end)| {
            let ms = end.saturating_sub(start) as f64 / 1e6;
            (start as f64, ms / f64::from(n))
        });
        let points = reduced(points.collect());
        if !points.is_empty() {
            let points = points.into_iter().map(|(x, y)| (x, Some(y)));
            series.push(Series::new(name, "points", points));
        }
    }
    (!series.is_empty()).then(|| Chart {
        id: format!("speed-{input}"),
        group: "speed",
        input: Some(input),
        title: "Time per token of each pass".to_owned(),
        note: Some(
            "The time of a pass ends when the next pass starts. It contains sampling and waiting times.".to_owned(),
        ),
        x: Axis::new("time", "time"),
        y: Axis {
            min: Some(0.0),
            ..Axis::new("time per token (ms)", "linear")
        },
        series,
    })
}

#[cfg(test)]
mod tests {
    use moe_trace::record::lane;

    use super::*;
    use crate::routing::Selected;

    #[test]
    fn shares_of_a_window_add_up() {
        let mut routing = Routing::default();
        for (start, lanes) in [
            (0, [lane::CPU, lane::HOT_CACHE]),
            (900, [lane::CPU, lane::CPU]),
        ] {
            routing.begin_row(0, 0, start);
            for number in lanes {
                routing.push(Selected::new(0, None, Some(number)));
            }
        }
        let chart = shares(0, &routing, 1000).unwrap();
        let names: Vec<&str> = chart.series.iter().map(|series| &*series.name).collect();
        assert_eq!(names, ["cpu", "hot_cache"]);
        assert_eq!(chart.series[0].y[0], Some(50.0));
        assert_eq!(chart.series[0].y[1], None);
        assert_eq!(chart.series[0].y.last(), Some(&Some(100.0)));
    }

    #[test]
    fn time_per_token_is_that_of_the_pass() {
        let mut tokens = TokenList::default();
        tokens.begin_pass(0);
        tokens.in_pass((0, 0), Some(Phase::Prompt));
        tokens.in_pass((0, 1), Some(Phase::Prompt));
        tokens.begin_pass(4_000_000);
        tokens.in_pass((0, 2), Some(Phase::Generate));
        let chart = speed(0, &tokens, TimeUnit::Ns, 7_000_000).unwrap();
        assert_eq!(chart.series[0].y, [Some(2.0)]);
        assert_eq!(chart.series[1].y, [Some(3.0)]);
        assert!(speed(0, &tokens, TimeUnit::Step, 7_000_000).is_none());
    }
}
