//! Seek distances between consecutive accesses.

use super::Event;

/// Lower bounds of the histogram buckets in bytes.
const BOUNDS: [u64; 8] = [0, 1, 32, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20];

/// Position of an access relative to the end of the previous access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// At or after the end of the previous access.
    Forward,
    /// Before the end of the previous access.
    Backward,
    /// In another file; the distance is undefined.
    OtherFile,
}

/// Accesses whose seek distance is in a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeekBucket {
    /// Direction of the seek.
    pub direction: Direction,
    /// Lower bound of the distance in bytes.
    pub from: u64,
    /// Exclusive upper bound in bytes; `None` if it is unlimited.
    pub below: Option<u64>,
    /// Number of accesses.
    pub accesses: u64,
    /// Bytes of the accesses.
    pub bytes: u64,
}

/// Seek distances. The distance of an access is from the end of the previous access in the trace to its first byte. The
/// first access has no distance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seeks {
    /// Number of accesses with a previous access.
    pub accesses: u64,
    /// Bytes of these accesses.
    pub bytes: u64,
    /// Sequential accesses: forward by less than 32 bytes, the padding between tensors at GGUF's default alignment.
    pub sequential: u64,
    /// Bytes of the sequential accesses.
    pub sequential_bytes: u64,
    /// Total distance of all other accesses within a file, in bytes.
    pub distance: u64,
    /// Histogram without empty buckets.
    pub buckets: Vec<SeekBucket>,
}

#[derive(Default)]
pub(super) struct SeekCounter {
    /// File and end offset of the last access.
    last: Option<(u16, u64)>,
    /// `[forward, backward][bucket]`: accesses and bytes.
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
