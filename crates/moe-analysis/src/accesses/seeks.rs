//! Whether the file is read on, or elsewhere.

use super::Event;

/// Distances at which a bucket of the histogram begins, bytes.
const BOUNDS: [u64; 8] = [0, 1, 32, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20];

/// Where an access lies, seen from the end of the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Behind it.
    Forward,
    /// Its beginning lies before.
    Backward,
    /// In another file; there is no distance.
    OtherFile,
}

/// Accesses at some distance from the one before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeekBucket {
    /// Which way.
    pub direction: Direction,
    /// Least distance, bytes.
    pub from: u64,
    /// The distance is below; `None` = any.
    pub below: Option<u64>,
    /// Accesses.
    pub accesses: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// How far apart accesses that follow one another are. The distance of an access is from the end of the access before it, in
/// the order of the trace, to its beginning; the first access has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seeks {
    /// Accesses with one before them.
    pub accesses: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Accesses that read on: forward by less than 32 bytes, the padding between tensors under GGUF's alignment.
    pub sequential: u64,
    /// Their bytes.
    pub sequential_bytes: u64,
    /// Sum of the distances of all others in the same file.
    pub distance: u64,
    /// The histogram; empty buckets are left out.
    pub buckets: Vec<SeekBucket>,
}

#[derive(Default)]
pub(super) struct SeekCounter {
    /// File and end of the last access.
    last: Option<(u16, u64)>,
    /// `[forward, backward][bound]`: accesses and bytes.
    counts: [[(u64, u64); BOUNDS.len()]; 2],
    other_file: (u64, u64),
    distance: u64,
}

impl SeekCounter {
    pub(super) fn access(&mut self, event: &Event) {
        let end = event.file_offset.saturating_add(event.size_bytes);
        let Some((file, last_end)) = self.last.replace((event.file, end)) else {
            return;
        };
        let distance = event.file_offset.abs_diff(last_end);
        let count = if file != event.file {
            &mut self.other_file
        } else {
            let direction = usize::from(event.file_offset < last_end);
            let bucket = BOUNDS.partition_point(|&bound| bound <= distance) - 1;
            if direction == 1 || distance >= 32 {
                self.distance = self.distance.saturating_add(distance);
            }
            &mut self.counts[direction][bucket]
        };
        count.0 += 1;
        count.1 = count.1.saturating_add(event.size_bytes);
    }

    pub(super) fn finish(self) -> Seeks {
        let [forward, backward] = self.counts;
        let of = |direction, counts: [(u64, u64); BOUNDS.len()]| {
            let bounds = BOUNDS.iter().enumerate().zip(counts);
            let buckets = bounds.map(move |((i, &from), (accesses, bytes))| SeekBucket {
                direction,
                from,
                below: BOUNDS.get(i + 1).copied(),
                accesses,
                bytes,
            });
            buckets.collect::<Vec<_>>()
        };
        let mut buckets = of(Direction::Backward, backward);
        buckets.reverse();
        buckets.extend(of(Direction::Forward, forward));
        buckets.push(SeekBucket {
            direction: Direction::OtherFile,
            from: 0,
            below: None,
            accesses: self.other_file.0,
            bytes: self.other_file.1,
        });
        buckets.retain(|bucket| bucket.accesses > 0);
        let sum = |of: fn(&SeekBucket) -> u64, keep: fn(&SeekBucket) -> bool| {
            let kept = buckets.iter().filter(|bucket| keep(bucket));
            kept.map(of).fold(0, u64::saturating_add)
        };
        let is_sequential =
            |bucket: &SeekBucket| bucket.direction == Direction::Forward && bucket.from < 32;
        Seeks {
            accesses: sum(|bucket| bucket.accesses, |_| true),
            bytes: sum(|bucket| bucket.bytes, |_| true),
            sequential: sum(|bucket| bucket.accesses, is_sequential),
            sequential_bytes: sum(|bucket| bucket.bytes, is_sequential),
            distance: self.distance,
            buckets,
        }
    }
}
