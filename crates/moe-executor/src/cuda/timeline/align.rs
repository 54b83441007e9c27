//! Aligns the clocks of GPUs with the CPU clock: a pure function from what is known of a pass to the times of its events.
//!
//! # Limits of an event
//!
//! - It is not before the call that recorded it.
//! - It is not after the return of a wait that covers it.
//! - On the compute stream, it is not before the event recorded before it.
//! - If it follows a copy from another GPU, it is not before the last event that the other GPU recorded before the copy. The next
//!   event of the other GPU is not before this one, because its stream waits for the copy.
//!
//! # Offset of a clock
//!
//! The offset of a GPU is the CPU time minus the GPU time of an event. Every lower limit of an event is a lower limit of the
//! offset. [`align`] returns the times of the smallest offsets that satisfy all limits and are constant throughout the pass. Then
//! all durations and gaps are as measured.
//!
//! The clocks may disagree by more than the limits leave room for, because they drift:
//!
//! - Between two waits of the CPU, the offset is reduced until the wait covers its events.
//! - If no constant offsets satisfy the limits between GPUs, an offset grows at the events that follow copies, until the end of
//!   the segment. So the time that a GPU waits for a copy absorbs the drift, and durations of kernels stay as measured.
//! - If neither is enough, an event is moved to its own limit.
//!
//! So the limits above always hold. If they contradict each other (a copy from events that the CPU recorded after it had waited
//! for the copy, which cannot happen), the waits take precedence.

/// The events of one GPU in a pass. All times are in ns; CPU times have the same origin on all GPUs.
#[derive(Clone, Default, Debug)]
pub(super) struct GpuPass {
    /// By index; `None` if it was never recorded.
    pub events: Vec<Option<Recorded>>,
    /// CPU time at which each wait for the compute stream returned. A wait ends a segment; the end of the pass ends the last one.
    pub waits: Vec<i64>,
    /// CPU time at which the wait for all streams at the end of the pass returned.
    pub end: i64,
}

/// A recorded event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recorded {
    /// CPU time at the start of the call that recorded it.
    pub issued: i64,
    /// GPU time since the first event of the GPU.
    pub gpu: i64,
    /// Number of waits before the call.
    pub segment: usize,
    /// Where it was recorded.
    pub stream: Stream,
}

/// The stream of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::cuda) enum Stream {
    /// The compute stream, which the waits of the segments cover.
    Compute,
    /// The compute stream, right after a copy from the GPU with this index.
    AfterCopyFrom(usize),
    /// A stream that only the wait at the end of the pass covers.
    Transfer,
}

impl Stream {
    fn source(self) -> Option<usize> {
        match self {
            Stream::AfterCopyFrom(gpu) => Some(gpu),
            Stream::Compute | Stream::Transfer => None,
        }
    }
}

/// CPU time of each event of each GPU; `None` for those that were never recorded.
pub(super) fn align(passes: &[GpuPass]) -> Vec<Vec<Option<i64>>> {
    let pass = Pass::new(passes);
    let alone: Vec<i64> = passes.iter().map(offset_alone).collect();
    let mut offsets = alone.clone();
    // A chain of limits leads through each other GPU at most once, unless it is a cycle: then the clocks drift.
    for _ in passes {
        let placed = pass.place(&offsets);
        let required = placed.required.iter().zip(&offsets);
        if required
            .clone()
            .all(|(required, offset)| required <= offset)
        {
            return placed.times;
        }
        offsets = required
            .map(|(&required, &offset)| required.max(offset))
            .collect();
    }
    pass.place(&alone).times
}

/// The smallest offset of a GPU with which no event is before the call that recorded it.
fn offset_alone(pass: &GpuPass) -> i64 {
    let recorded = pass.events.iter().flatten();
    let offsets = recorded.map(|event| event.issued - event.gpu);
    offsets.max().unwrap_or(0)
}

/// The limits of all events, apart from those that depend on the times of other events.
struct Pass<'p> {
    passes: &'p [GpuPass],
    /// GPU and index of each recorded event, in the order of the calls.
    calls: Vec<(usize, usize)>,
    /// CPU time that each event, in the order of `calls`, is not after.
    latest: Vec<i64>,
    /// Smallest and largest offset in each segment of each GPU.
    offsets: Vec<Vec<(i64, i64)>>,
}

/// Times that satisfy all limits.
struct Placed {
    times: Vec<Vec<Option<i64>>>,
    /// Largest offset that the limits between GPUs require of each GPU.
    required: Vec<i64>,
}

impl<'p> Pass<'p> {
    fn new(passes: &'p [GpuPass]) -> Pass<'p> {
        let mut calls: Vec<(i64, usize, usize)> = Vec::new();
        for (gpu, pass) in passes.iter().enumerate() {
            let recorded = pass.events.iter().enumerate();
            calls.extend(recorded.filter_map(|(i, event)| Some((event.as_ref()?.issued, gpu, i))));
        }
        calls.sort_unstable();
        let mut pass = Pass {
            passes,
            calls: calls.into_iter().map(|(_, gpu, i)| (gpu, i)).collect(),
            latest: Vec::new(),
            offsets: passes.iter().map(offset_limits).collect(),
        };
        pass.latest = pass.latest();
        pass
    }

    /// The recorded events in the order of the calls, with GPU and index.
    fn recorded(&self) -> impl DoubleEndedIterator<Item = (usize, usize, &'p Recorded)> {
        let passes = self.passes;
        let calls = self.calls.iter();
        calls.filter_map(move |&(gpu, i)| Some((gpu, i, passes[gpu].events[i].as_ref()?)))
    }

    fn latest(&self) -> Vec<i64> {
        // Limit of the compute stream of each GPU: whatever it runs is not after its later events and copies.
        let mut streams = vec![i64::MAX; self.passes.len()];
        let mut latest = Vec::with_capacity(self.calls.len());
        for (gpu, _, event) in self.recorded().rev() {
            let pass = &self.passes[gpu];
            if event.stream == Stream::Transfer {
                latest.push(pass.end);
                continue;
            }
            let wait = pass.waits.get(event.segment).copied();
            let source = event.stream.source().map_or(i64::MAX, |from| streams[from]);
            let limit = wait.unwrap_or(pass.end).min(streams[gpu]).min(source);
            streams[gpu] = limit;
            if let Some(from) = event.stream.source() {
                streams[from] = limit;
            }
            latest.push(limit);
        }
        latest.reverse();
        latest
    }

    /// Places the events in the order of the calls with these offsets. Where a limit between GPUs requires it, an offset grows
    /// for the rest of the segment.
    fn place(&self, offsets: &[i64]) -> Placed {
        let n_gpus = self.passes.len();
        let mut times: Vec<Vec<Option<i64>>> = self.passes.iter().map(unplaced).collect();
        let mut required = vec![i64::MIN; n_gpus];
        // Offset of each GPU that is required so far in its segment.
        let mut grown = vec![(0, i64::MIN); n_gpus];
        // Time of the last event on each compute stream, and end of the last copy that another GPU made from it.
        let mut last = vec![i64::MIN; n_gpus];
        let mut copied = last.clone();
        for ((gpu, i, event), &latest) in self.recorded().zip(&self.latest) {
            let is_awaited = event.stream != Stream::Transfer;
            let source = event.stream.source();
            let limit = match source {
                Some(from) => last[from].max(copied[gpu]),
                None if is_awaited => copied[gpu],
                None => i64::MIN,
            };
            if grown[gpu].0 != event.segment {
                grown[gpu] = (event.segment, i64::MIN);
            }
            let offset = &mut grown[gpu].1;
            *offset = (*offset).max(limit.saturating_sub(event.gpu));
            required[gpu] = required[gpu].max(*offset);
            let (low, high) = self.offsets[gpu][event.segment];
            let offset = offsets[gpu].min(high).max(low).max(*offset);
            let mut at = (offset + event.gpu).max(event.issued).max(limit);
            if is_awaited {
                at = at.max(last[gpu]);
            }
            at = at.min(latest);
            if is_awaited {
                last[gpu] = at;
            }
            times[gpu][i] = Some(at);
            if let Some(from) = source {
                copied[from] = copied[from].max(at);
            }
        }
        Placed { times, required }
    }
}

fn unplaced(pass: &GpuPass) -> Vec<Option<i64>> {
    vec![None; pass.events.len()]
}

/// Smallest and largest offset in each segment with which its compute stream's events are neither before their calls nor after
/// the wait.
fn offset_limits(pass: &GpuPass) -> Vec<(i64, i64)> {
    let mut limits = vec![(i64::MIN, i64::MAX); pass.waits.len() + 1];
    let recorded = pass.events.iter().flatten();
    for event in recorded.filter(|event| event.stream != Stream::Transfer) {
        let wait = pass.waits.get(event.segment).copied().unwrap_or(pass.end);
        let (low, high) = &mut limits[event.segment];
        *low = (*low).max(event.issued - event.gpu);
        *high = (*high).min(wait - event.gpu);
    }
    limits
}

#[cfg(test)]
mod tests;
