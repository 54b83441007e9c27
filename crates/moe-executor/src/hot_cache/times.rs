//! Times of a layer call. Those of GPUs are known at the end of the pass.

use std::time::{Duration, Instant};

use moe_gguf::LayerId;
use moe_placement::perf::{LaneIndex, LayerTimes};

use super::worklist::{LANES, N_LANES};
use crate::devices::{Devices, TimePoint};
use crate::error::Result;

/// One of this number of small passes is timed.
const SAMPLING: u64 = 8;

/// Passes of at least this number of tokens are all timed: their times are much longer than the measurement.
const LARGE_PASS: usize = 32;

/// Selects the passes to time. Recording the events of a layer and reading their times takes several µs, more than the counters of
/// the other passes. Counts are not sampled.
#[derive(Default)]
pub(crate) struct Sampling {
    /// Number of small passes so far.
    n_small: u64,
}

impl Sampling {
    /// Starts a pass of `n_tokens`. Returns the number of passes that its times stand for: this one and the small passes before it
    /// that were not timed; 0 if it is not timed.
    pub fn begin(&mut self, n_tokens: usize) -> u64 {
        if n_tokens >= LARGE_PASS {
            return 1;
        }
        let n_before = self.n_small;
        self.n_small += 1;
        match n_before % SAMPLING {
            0 => n_before.clamp(1, SAMPLING),
            _ => 0,
        }
    }
}

/// Start and end.
pub(crate) type Span = (TimePoint, TimePoint);

/// What is known of the times of a layer call.
#[derive(Clone, Copy, Default)]
pub(crate) struct CallTimes {
    /// Start of the router.
    pub began: Option<TimePoint>,
    /// End of the router.
    pub routed: Option<TimePoint>,
    /// Time of the worklist.
    pub worklist: Duration,
    /// Span of each lane that is on a GPU, or that computed all entries.
    pub gpu_lanes: [Option<Span>; N_LANES],
    /// Span of the lanes on the CPU.
    pub cpu: Option<Span>,
    /// Number of entries of each lane on the CPU. Its threads compute the lanes together: a lane gets the fraction of the time
    /// that it has of the entries.
    pub cpu_entries: [usize; N_LANES],
}

impl CallTimes {
    /// Notes that one lane computed everything from the router to `ended`, unless spans of lanes are known.
    pub fn only(&mut self, lane: LaneIndex, ended: TimePoint) {
        if self.cpu.is_none() && self.gpu_lanes.iter().all(Option::is_none) {
            let start = self.routed.or(self.began);
            self.gpu_lanes[lane as usize] = start.map(|start| (start, ended));
        }
    }

    /// The times of the call, which ended at `ended`, after the pass.
    ///
    /// # Errors
    /// The pass has not ended.
    pub fn resolve(&self, ended: TimePoint, devices: &Devices) -> Result<LayerTimes> {
        let at = |point: TimePoint| devices.at(point);
        let ended = at(ended)?;
        let between = |from: Instant, to: Instant| ns(to.saturating_duration_since(from));
        let began = self.began.map_or(Ok(ended), at)?;
        let routed = self.routed.map_or(Ok(began), at)?;
        let mut times = LayerTimes {
            total: between(began, ended),
            routing: between(began, routed),
            worklist: ns(self.worklist),
            ..LayerTimes::default()
        };
        let on_cpu: usize = self.cpu_entries.iter().sum();
        let (mut first, mut last) = (None::<Instant>, None::<Instant>);
        let mut first_hot_end = None::<Instant>;
        for lane in LANES {
            let index = lane as usize;
            let entries = self.cpu_entries[index];
            let (span, share) = match self.gpu_lanes[index] {
                Some(span) => (Some(span), 1.0),
                None => {
                    let span = self.cpu.filter(|_| entries > 0);
                    (span, entries as f64 / on_cpu.max(1) as f64)
                }
            };
            let Some((from, to)) = span else {
                continue;
            };
            let (from, to) = (at(from)?, at(to)?);
            let time = (between(from, to) as f64 * share) as u64;
            match lane.hot_index() {
                Some(hot) => times.hot_lanes[hot] = time,
                None => times.cold_lane = time,
            }
            first = Some(first.map_or(from, |first| first.min(from)));
            last = Some(last.map_or(to, |last| last.max(to)));
            if lane != LaneIndex::Cold {
                first_hot_end = Some(first_hot_end.map_or(to, |end| end.min(to)));
            }
        }
        if let (Some(first), Some(last)) = (first, last) {
            times.region = between(first, last);
            times.join_wait = first_hot_end.map_or(0, |end| between(end, last));
            times.merge = between(last, ended);
        }
        Ok(times)
    }
}

/// Times of a call that are computed at the end of the pass.
pub(crate) struct PendingTimes {
    pub layer: LayerId,
    pub times: CallTimes,
    pub ended: TimePoint,
}

fn ns(time: Duration) -> u64 {
    time.as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_small_passes_stand_for_those_that_are_not_timed() {
        let mut sampling = Sampling::default();
        let timed: Vec<u64> = (0..18).map(|_| sampling.begin(1)).collect();
        assert_eq!(
            timed,
            [1, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 8, 0]
        );
        assert_eq!(sampling.begin(LARGE_PASS), 1);
        assert_eq!(sampling.begin(LARGE_PASS - 1), 0);
    }

    #[test]
    fn computes_times_of_lanes_region_wait_and_merge() {
        let start = Instant::now();
        let at = |us| TimePoint::Cpu(start + Duration::from_micros(us));
        let mut times = CallTimes {
            began: Some(at(0)),
            routed: Some(at(10)),
            worklist: Duration::from_micros(2),
            ..CallTimes::default()
        };
        times.gpu_lanes[0] = Some((at(15), at(45)));
        times.gpu_lanes[2] = Some((at(16), at(40)));
        times.cpu = Some((at(20), at(60)));
        times.cpu_entries = [0, 1, 0, 3];
        let devices = Devices::cpu();
        let resolved = times.resolve(at(67), &devices).unwrap();
        let us = |n: u64| n * 1000;
        let expected = LayerTimes {
            total: us(67),
            routing: us(10),
            worklist: us(2),
            hot_lanes: [us(30), us(10), us(24)],
            cold_lane: us(30),
            join_wait: us(20),
            region: us(45),
            merge: us(7),
        };
        assert_eq!(resolved, expected);
        // Only the cold lane.
        times.gpu_lanes = [None; N_LANES];
        times.cpu_entries = [0, 0, 0, 4];
        let resolved = times.resolve(at(67), &devices).unwrap();
        let expected = LayerTimes {
            hot_lanes: [0; 3],
            cold_lane: us(40),
            join_wait: 0,
            region: us(40),
            ..expected
        };
        assert_eq!(resolved, expected);
    }
}
