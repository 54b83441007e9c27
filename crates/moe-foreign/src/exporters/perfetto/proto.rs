//! The messages of Perfetto's trace format that the exporter writes, with the fields that it uses.
//!
//! The numbers are those of `trace_packet.proto` and of `track_event/*.proto` in
//! <https://github.com/google/perfetto/tree/main/protos/perfetto/trace>. A test decodes the output with the complete definitions,
//! which are in PyPI's package `perfetto`.

use prost::Message;

/// Key of a packet in the file: field 1 (`packet`) of the message `Trace`, with wire type 2 (a length and bytes).
pub(super) const PACKET_KEY: u8 = 0x0a;

/// `TracePacket.SequenceFlags.SEQ_INCREMENTAL_STATE_CLEARED`.
pub(super) const SEQ_INCREMENTAL_STATE_CLEARED: u32 = 1;
/// `TrackDescriptor.ChildTracksOrdering.EXPLICIT`: children are ordered by `sibling_order_rank`.
pub(super) const ORDERING_EXPLICIT: i32 = 3;
/// `CounterDescriptor.Unit.UNIT_SIZE_BYTES`.
pub(super) const UNIT_SIZE_BYTES: i32 = 3;

/// Values of `TrackEvent.Type`.
pub(super) mod kind {
    pub const SLICE_BEGIN: i32 = 1;
    pub const SLICE_END: i32 = 2;
    pub const INSTANT: i32 = 3;
    pub const COUNTER: i32 = 4;
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TracePacket {
    /// Nanoseconds.
    #[prost(uint64, optional, tag = "8")]
    pub timestamp: Option<u64>,
    #[prost(uint32, optional, tag = "10")]
    pub trusted_packet_sequence_id: Option<u32>,
    #[prost(message, optional, tag = "11")]
    pub track_event: Option<TrackEvent>,
    #[prost(uint32, optional, tag = "13")]
    pub sequence_flags: Option<u32>,
    #[prost(message, optional, tag = "60")]
    pub track_descriptor: Option<TrackDescriptor>,
    #[prost(bool, optional, tag = "87")]
    pub first_packet_on_sequence: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TrackDescriptor {
    #[prost(uint64, optional, tag = "1")]
    pub uuid: Option<u64>,
    #[prost(string, optional, tag = "2")]
    pub name: Option<String>,
    #[prost(uint64, optional, tag = "5")]
    pub parent_uuid: Option<u64>,
    #[prost(message, optional, tag = "8")]
    pub counter: Option<CounterDescriptor>,
    /// [`ORDERING_EXPLICIT`].
    #[prost(int32, optional, tag = "11")]
    pub child_ordering: Option<i32>,
    #[prost(int32, optional, tag = "12")]
    pub sibling_order_rank: Option<i32>,
    #[prost(string, optional, tag = "14")]
    pub description: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct CounterDescriptor {
    /// [`UNIT_SIZE_BYTES`].
    #[prost(int32, optional, tag = "3")]
    pub unit: Option<i32>,
    #[prost(string, optional, tag = "6")]
    pub unit_name: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TrackEvent {
    #[prost(message, repeated, tag = "4")]
    pub debug_annotations: Vec<DebugAnnotation>,
    /// A value of [`kind`].
    #[prost(int32, optional, tag = "9")]
    pub r#type: Option<i32>,
    #[prost(uint64, optional, tag = "11")]
    pub track_uuid: Option<u64>,
    #[prost(string, repeated, tag = "22")]
    pub categories: Vec<String>,
    #[prost(string, optional, tag = "23")]
    pub name: Option<String>,
    #[prost(double, optional, tag = "44")]
    pub double_counter_value: Option<f64>,
    // Fields of proto2 are not packed unless their definition says so.
    #[prost(fixed64, repeated, packed = "false", tag = "47")]
    pub flow_ids: Vec<u64>,
    #[prost(fixed64, repeated, packed = "false", tag = "48")]
    pub terminating_flow_ids: Vec<u64>,
}

/// A named value of an event, or an element of an array.
#[derive(Clone, PartialEq, Message)]
pub(super) struct DebugAnnotation {
    #[prost(bool, optional, tag = "2")]
    pub bool_value: Option<bool>,
    #[prost(uint64, optional, tag = "3")]
    pub uint_value: Option<u64>,
    #[prost(double, optional, tag = "5")]
    pub double_value: Option<f64>,
    #[prost(string, optional, tag = "6")]
    pub string_value: Option<String>,
    #[prost(string, optional, tag = "10")]
    pub name: Option<String>,
    #[prost(message, repeated, tag = "12")]
    pub array_values: Vec<DebugAnnotation>,
}

impl DebugAnnotation {
    fn named(name: &str) -> Self {
        Self {
            name: Some(name.to_owned()),
            ..Self::default()
        }
    }

    pub(super) fn flag(name: &str) -> Self {
        Self {
            bool_value: Some(true),
            ..Self::named(name)
        }
    }

    pub(super) fn number(name: &str, value: impl Into<u64>) -> Self {
        Self {
            uint_value: Some(value.into()),
            ..Self::named(name)
        }
    }

    pub(super) fn text(name: &str, value: &str) -> Self {
        Self {
            string_value: Some(value.to_owned()),
            ..Self::named(name)
        }
    }

    pub(super) fn numbers(name: &str, values: impl IntoIterator<Item = u32>) -> Self {
        let element = |value: u32| Self {
            uint_value: Some(value.into()),
            ..Self::default()
        };
        Self {
            array_values: values.into_iter().map(element).collect(),
            ..Self::named(name)
        }
    }

    pub(super) fn fractions(name: &str, values: impl IntoIterator<Item = f32>) -> Self {
        let element = |value: f32| Self {
            double_value: Some(value.into()),
            ..Self::default()
        };
        Self {
            array_values: values.into_iter().map(element).collect(),
            ..Self::named(name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes are computed by hand from the encoding rules of <https://protobuf.dev/programming-guides/encoding/>.
    #[test]
    fn encodes_fields_with_their_numbers() {
        let packet = TracePacket {
            timestamp: Some(300),
            track_event: Some(TrackEvent {
                r#type: Some(kind::SLICE_BEGIN),
                track_uuid: Some(2),
                name: Some("a".into()),
                flow_ids: vec![5],
                ..TrackEvent::default()
            }),
            ..TracePacket::default()
        };
        let event = [
            &[0x48, 1][..],                            // 9: type
            &[0x58, 2],                                // 11: track_uuid
            &[0xba, 0x01, 1, b'a'],                    // 23: name
            &[0xf9, 0x02, 5, 0, 0, 0, 0, 0, 0, 0][..], // 47: flow_ids, fixed64
        ]
        .concat();
        let mut expected: Vec<u8> = vec![0x40, 0xac, 0x02]; // 8: timestamp
        expected.extend([0x5a, 18]); // 11: track_event
        expected.extend(&event);
        assert_eq!(event.len(), 18);
        assert_eq!(packet.encode_to_vec(), expected);
    }
}
