//! Writes tracks, slices and counters of a Perfetto trace one packet at a time.

use std::collections::BTreeMap;
use std::io::{self, Write};

use prost::Message;

use super::proto::{
    CounterDescriptor, DebugAnnotation, ORDERING_EXPLICIT, PACKET_KEY,
    SEQ_INCREMENTAL_STATE_CLEARED, TracePacket, TrackDescriptor, TrackEvent, UNIT_SIZE_BYTES, kind,
};

/// Id of the track that contains all other tracks.
const ROOT: u64 = 1;
/// Id of the only sequence of packets.
const SEQUENCE: u32 = 1;
/// Highest time: Perfetto's are signed.
pub(super) const MAX_NS: u64 = u64::MAX >> 1;

/// A track of the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Track(u64);

/// A track that contains the tracks of one kind. It has no events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Group {
    Layers,
    Lanes,
    Devices,
    PostFetch,
    Counters,
}

impl Group {
    /// Its name, and its rank among the tracks of the trace. Passes have the rank 0.
    fn name_and_rank(self) -> (&'static str, i32) {
        match self {
            Self::Counters => ("counters", 1),
            Self::PostFetch => ("Post-Fetch", 2),
            Self::Lanes => ("lanes of experts", 3),
            Self::Devices => ("devices by memory of the inputs", 4),
            Self::Layers => ("layers", 5),
        }
    }
}

/// Start and end in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Times {
    pub start_ns: u64,
    pub end_ns: u64,
}

impl Times {
    /// Times within the limits of Perfetto.
    fn new(start_ns: u64, end_ns: u64) -> Self {
        let start_ns = start_ns.min(MAX_NS);
        Self {
            start_ns,
            end_ns: end_ns.clamp(start_ns, MAX_NS),
        }
    }

    /// `amount` divided by the duration in seconds; `None` if the duration is 0.
    pub(super) fn per_second(self, amount: u64) -> Option<f64> {
        let ns = self.end_ns - self.start_ns;
        (ns > 0).then(|| amount as f64 * 1e9 / ns as f64)
    }
}

/// A trace that is being written.
pub(super) struct Timeline<'a> {
    out: &'a mut dyn Write,
    groups: BTreeMap<Group, Track>,
    last_track: u64,
    last_flow: u64,
    n_clamped: u64,
}

/// The first packet of every trace that [`Timeline`] writes, with its key and length.
pub(crate) fn head() -> Vec<u8> {
    encode(&TracePacket {
        sequence_flags: Some(SEQ_INCREMENTAL_STATE_CLEARED),
        first_packet_on_sequence: Some(true),
        ..packet_of_track(TrackDescriptor {
            uuid: Some(ROOT),
            name: Some("moe-analyze".into()),
            child_ordering: Some(ORDERING_EXPLICIT),
            ..TrackDescriptor::default()
        })
    })
}

fn packet_of_track(descriptor: TrackDescriptor) -> TracePacket {
    TracePacket {
        trusted_packet_sequence_id: Some(SEQUENCE),
        track_descriptor: Some(descriptor),
        ..TracePacket::default()
    }
}

fn encode(packet: &TracePacket) -> Vec<u8> {
    let mut bytes = vec![PACKET_KEY];
    bytes.extend(packet.encode_length_delimited_to_vec());
    bytes
}

impl<'a> Timeline<'a> {
    /// Writes the first packet.
    pub(super) fn new(out: &'a mut dyn Write) -> io::Result<Self> {
        out.write_all(&head())?;
        Ok(Self {
            out,
            groups: BTreeMap::new(),
            last_track: ROOT,
            last_flow: 0,
            n_clamped: 0,
        })
    }

    /// Times within the limits of Perfetto. Counts the events whose times are not.
    pub(super) fn times(&mut self, start_ns: u64, end_ns: u64) -> Times {
        self.n_clamped += u64::from(start_ns.max(end_ns) > MAX_NS);
        Times::new(start_ns, end_ns)
    }

    /// Number of events so far with a time above [`MAX_NS`].
    pub(super) fn n_clamped(&self) -> u64 {
        self.n_clamped
    }

    /// An id for an arrow from one slice to another.
    pub(super) fn flow(&mut self) -> u64 {
        self.last_flow += 1;
        self.last_flow
    }

    fn group(&mut self, group: Group) -> io::Result<Track> {
        if let Some(&track) = self.groups.get(&group) {
            return Ok(track);
        }
        let (name, rank) = group.name_and_rank();
        let track = self.track(TrackDescriptor {
            name: Some(name.to_owned()),
            parent_uuid: Some(ROOT),
            child_ordering: Some(ORDERING_EXPLICIT),
            sibling_order_rank: Some(rank),
            ..TrackDescriptor::default()
        })?;
        self.groups.insert(group, track);
        Ok(track)
    }

    /// Adds a track below a group, or below the root.
    fn track_in(&mut self, group: Option<Group>, descriptor: TrackDescriptor) -> io::Result<Track> {
        let parent = match group {
            Some(group) => self.group(group)?,
            None => Track(ROOT),
        };
        self.track(TrackDescriptor {
            parent_uuid: Some(parent.0),
            ..descriptor
        })
    }

    fn track(&mut self, descriptor: TrackDescriptor) -> io::Result<Track> {
        self.last_track += 1;
        let packet = packet_of_track(TrackDescriptor {
            uuid: Some(self.last_track),
            ..descriptor
        });
        self.out.write_all(&encode(&packet))?;
        Ok(Track(self.last_track))
    }

    fn event(&mut self, track: Track, at_ns: u64, kind: i32, event: TrackEvent) -> io::Result<()> {
        let packet = TracePacket {
            timestamp: Some(at_ns),
            trusted_packet_sequence_id: Some(SEQUENCE),
            track_event: Some(TrackEvent {
                r#type: Some(kind),
                track_uuid: Some(track.0),
                ..event
            }),
            ..TracePacket::default()
        };
        self.out.write_all(&encode(&packet))
    }
}

/// An event without a track and a time.
pub(super) fn event(
    category: &str,
    name: impl Into<String>,
    annotations: Vec<DebugAnnotation>,
) -> TrackEvent {
    TrackEvent {
        categories: vec![category.to_owned()],
        name: Some(name.into()),
        debug_annotations: annotations,
        ..TrackEvent::default()
    }
}

/// Slices of one kind, in the order of their starts.
///
/// Slices of a track must not overlap, unless one contains the other. If slices of the row overlap, the row has several tracks of
/// the same name, which Perfetto displays as one.
pub(super) struct Row {
    group: Option<Group>,
    name: String,
    rank: i32,
    description: Option<String>,
    /// The tracks, each with the time of its last event.
    tracks: Vec<(Track, u64)>,
}

/// A slice of a [`Row`] that has started and not ended: the index of its track.
#[derive(Clone, Copy, Debug)]
pub(super) struct Open(usize);

impl Row {
    /// A row below a group, or below the root. `rank` is its rank among the rows of the group.
    pub(super) fn new(group: Option<Group>, name: impl Into<String>, rank: i32) -> Self {
        Self {
            group,
            name: name.into(),
            rank,
            description: None,
            tracks: Vec::new(),
        }
    }

    pub(super) fn with_description(self, description: String) -> Self {
        Self {
            description: Some(description),
            ..self
        }
    }

    /// The index of a track without events after `at_ns`.
    fn free_track(&mut self, timeline: &mut Timeline<'_>, at_ns: u64) -> io::Result<usize> {
        let is_free = |&(_, last_ns): &(Track, u64)| last_ns <= at_ns;
        if let Some(i) = self.tracks.iter().position(is_free) {
            return Ok(i);
        }
        let descriptor = TrackDescriptor {
            name: Some(self.name.clone()),
            sibling_order_rank: Some(self.rank),
            description: self.description.clone(),
            ..TrackDescriptor::default()
        };
        let track = timeline.track_in(self.group, descriptor)?;
        self.tracks.push((track, at_ns));
        Ok(self.tracks.len() - 1)
    }

    /// Starts a slice that can contain others.
    pub(super) fn open(
        &mut self,
        timeline: &mut Timeline<'_>,
        at_ns: u64,
        event: TrackEvent,
    ) -> io::Result<Open> {
        let i = self.free_track(timeline, at_ns)?;
        let (track, last_ns) = &mut self.tracks[i];
        *last_ns = at_ns;
        timeline.event(*track, at_ns, kind::SLICE_BEGIN, event)?;
        Ok(Open(i))
    }

    /// Ends a slice at `at_ns`, or at the end of the last slice that it contains if that is later.
    pub(super) fn close(
        &mut self,
        timeline: &mut Timeline<'_>,
        Open(i): Open,
        at_ns: u64,
    ) -> io::Result<()> {
        let (track, last_ns) = &mut self.tracks[i];
        *last_ns = at_ns.max(*last_ns);
        timeline.event(*track, *last_ns, kind::SLICE_END, TrackEvent::default())
    }

    /// Adds a slice, or an instant if the duration is 0. If possible, the slice is contained in the slice `within`.
    pub(super) fn slice(
        &mut self,
        timeline: &mut Timeline<'_>,
        within: Option<Open>,
        times: Times,
        event: TrackEvent,
    ) -> io::Result<()> {
        let Times { start_ns, end_ns } = times;
        let i = match within {
            Some(Open(i)) if self.tracks[i].1 <= start_ns => i,
            _ => self.free_track(timeline, start_ns)?,
        };
        let (track, last_ns) = &mut self.tracks[i];
        *last_ns = end_ns;
        if start_ns == end_ns {
            return timeline.event(*track, start_ns, kind::INSTANT, event);
        }
        timeline.event(*track, start_ns, kind::SLICE_BEGIN, event)?;
        timeline.event(*track, end_ns, kind::SLICE_END, TrackEvent::default())
    }
}

/// The unit of a counter.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unit {
    Bytes,
    Other(&'static str),
}

/// A value over time. Its track is written with the first value.
pub(super) struct Counter {
    name: String,
    unit: Unit,
    rank: i32,
    track: Option<Track>,
    last_ns: u64,
}

impl Counter {
    /// A counter with a rank among the counters.
    pub(super) fn new(name: impl Into<String>, unit: Unit, rank: i32) -> Self {
        Self {
            name: name.into(),
            unit,
            rank,
            track: None,
            last_ns: 0,
        }
    }

    /// Sets the value from `at_ns` on, or from the time of the last value if that is later.
    pub(super) fn set(
        &mut self,
        timeline: &mut Timeline<'_>,
        at_ns: u64,
        value: f64,
    ) -> io::Result<()> {
        let track = match self.track {
            Some(track) => track,
            None => *self.track.insert(timeline.track_in(
                Some(Group::Counters),
                TrackDescriptor {
                    name: Some(self.name.clone()),
                    sibling_order_rank: Some(self.rank),
                    counter: Some(match self.unit {
                        Unit::Bytes => CounterDescriptor {
                            unit: Some(UNIT_SIZE_BYTES),
                            unit_name: None,
                        },
                        Unit::Other(name) => CounterDescriptor {
                            unit: None,
                            unit_name: Some(name.to_owned()),
                        },
                    }),
                    ..TrackDescriptor::default()
                },
            )?),
        };
        self.last_ns = self.last_ns.max(at_ns.min(MAX_NS));
        let event = TrackEvent {
            double_counter_value: Some(value),
            ..TrackEvent::default()
        };
        timeline.event(track, self.last_ns, kind::COUNTER, event)
    }
}
