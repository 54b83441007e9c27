//! Which bytes of their models two runs read.

use std::collections::{BTreeMap, HashMap};

use moe_trace::{ExpertId, ExpertRanges, ExpertTensor, LayerId};
use moe_trace::{Operation, Run, TensorAccessLog};

use super::Error;
use super::passes::Step;

/// The most ranges that are kept: several times those of the largest models of today. Names come from the traces.
const MAX_RANGES: usize = 1 << 21;

/// Weights that two runs read. A range is a tensor, or an expert of one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BytesDiff {
    /// Whether experts are ranges of their own; else a tensor of experts is one range, as a run has no offset map.
    pub split_experts: bool,
    /// By block number; none for tensors that belong to no layer.
    pub layers: BTreeMap<Option<LayerId>, LayerBytes>,
    /// The first ranges that differ, of each kind.
    pub first: Vec<RangeDifference>,
}

/// Weights of one layer that two runs read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerBytes {
    /// Bytes read, over and over, `[by A, by B]`.
    pub read: [u64; 2],
    /// Ranges `[of A, of B]`.
    pub ranges: [u64; 2],
    /// Ranges that the other run did not read, `[of A, of B]`.
    pub only: [u64; 2],
    /// Ranges of another size.
    pub other_size: u64,
    /// Ranges of the same size in another place.
    pub other_place: u64,
    /// Ranges that are the same and were read another number of times.
    pub other_reads: u64,
}

/// How a range differs; in the order in which differences are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RangeKind {
    /// A alone read it.
    OnlyA,
    /// B alone read it.
    OnlyB,
    /// It has another size.
    Size,
    /// It lies elsewhere.
    Place,
    /// It was read another number of times.
    Reads,
}

impl RangeKind {
    const N: usize = 5;
}

/// A range that differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeDifference {
    /// How.
    pub kind: RangeKind,
    /// The tensor.
    pub tensor: String,
    /// Its layer.
    pub layer: Option<LayerId>,
    /// The expert, where the range is one's.
    pub expert_id: Option<ExpertId>,
    /// Where it is and how often it was read, `[in A, in B]`.
    pub reads: [Option<RangeReads>; 2],
}

/// A range of a model's file, and how often it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeReads {
    /// Shard of the model.
    pub file: u16,
    /// First byte in it.
    pub file_offset: u64,
    /// Bytes.
    pub size_bytes: u64,
    /// Operations that read it.
    pub n: u64,
}

impl RangeReads {
    fn is_same_range(&self, other: &RangeReads) -> bool {
        (self.file, self.file_offset, self.size_bytes)
            == (other.file, other.file_offset, other.size_bytes)
    }
}

impl LayerBytes {
    /// Whether both runs read the same ranges equally often.
    pub fn is_equal(&self) -> bool {
        self.only == [0, 0] && self.other_size + self.other_place + self.other_reads == 0
    }

    fn add(&mut self, more: &LayerBytes) {
        for side in 0..2 {
            self.read[side] = self.read[side].saturating_add(more.read[side]);
            self.ranges[side] += more.ranges[side];
            self.only[side] += more.only[side];
        }
        self.other_size += more.other_size;
        self.other_place += more.other_place;
        self.other_reads += more.other_reads;
    }
}

impl BytesDiff {
    /// All layers together.
    pub fn total(&self) -> LayerBytes {
        let mut total = LayerBytes::default();
        self.layers.values().for_each(|layer| total.add(layer));
        total
    }

    /// Whether both runs read the same ranges equally often.
    pub fn is_equal(&self) -> bool {
        self.layers.values().all(LayerBytes::is_equal)
    }
}

/// What was read of one tensor.
#[derive(Default)]
struct TensorReads {
    layer: Option<LayerId>,
    /// By expert, none for the whole tensor: the ranges `[of A, of B]`; each has one, unless a trace is damaged.
    ranges: BTreeMap<Option<ExpertId>, [Vec<RangeReads>; 2]>,
}

/// Collects step by step.
pub(super) struct BytesComparer<'r> {
    runs: [&'r Run; 2],
    limit: usize,
    /// Where the experts are, `[of A, of B]`, where both runs tell it.
    experts: Option<[ExpertRanges<'r>; 2]>,
    tensors: HashMap<&'r [u8], TensorReads>,
    n_ranges: usize,
}

impl<'r> BytesComparer<'r> {
    pub fn new(runs: [&'r Run; 2], limit: usize) -> Self {
        let experts = match runs.map(|run| run.map.as_ref()) {
            [Some(a), Some(b)] => Some([a, b].map(ExpertRanges::new)),
            _ => None,
        };
        BytesComparer {
            runs,
            limit,
            experts,
            tensors: HashMap::new(),
            n_ranges: 0,
        }
    }

    pub fn step(&mut self, step: &Step<'_>) -> Result<(), Error> {
        for side in 0..2 {
            let run = self.runs[side];
            for pass in step.passes[side] {
                for operation in run.trace.operations_in(pass.records.clone()) {
                    self.operation(side, &operation)?;
                }
            }
        }
        Ok(())
    }

    fn operation(&mut self, side: usize, operation: &Operation<'r>) -> Result<(), Error> {
        let head = operation.head();
        let mut experts = None;
        for (i, source) in head.sources().iter().enumerate() {
            if !source.is_disk() {
                continue;
            }
            let whole = RangeReads {
                file: if head.has_extension() {
                    head.source_file[i].get()
                } else {
                    0
                },
                file_offset: source.offset_or_buffer_id.get(),
                size_bytes: head.source_size(i),
                n: 1,
            };
            let ranges = match &self.experts {
                Some(of_experts) if head.num_experts > 0 => {
                    of_experts[side].get(source.tensor_idx.get())
                }
                _ => None,
            };
            let Some(ranges) = ranges else {
                self.read(side, head, i, None, whole)?;
                continue;
            };
            // An expert that the model does not have is a fault of its own, see `info`.
            let ranges: Vec<(ExpertId, RangeReads)> = experts
                .get_or_insert_with(|| distinct_experts(operation))
                .iter()
                .filter_map(|&expert| Some((expert, expert_range(ranges, expert, &whole)?)))
                .collect();
            for (expert, range) in ranges {
                self.read(side, head, i, Some(expert), range)?;
            }
        }
        Ok(())
    }

    fn read(
        &mut self,
        side: usize,
        head: &'r TensorAccessLog,
        i: usize,
        expert: Option<ExpertId>,
        range: RangeReads,
    ) -> Result<(), Error> {
        let source = &head.sources()[i];
        let tensor = self.tensors.entry(source.name_bytes()).or_default();
        tensor.layer = tensor.layer.or(source.layer());
        let ranges = &mut tensor.ranges.entry(expert).or_default()[side];
        match ranges.iter_mut().find(|seen| seen.is_same_range(&range)) {
            Some(seen) => seen.n += 1,
            None => {
                ranges.push(range);
                self.n_ranges += 1;
            }
        }
        if self.n_ranges > MAX_RANGES {
            return Err(Error::TooManyRanges {
                path: self.runs[side].path.clone(),
                limit: MAX_RANGES,
            });
        }
        Ok(())
    }

    pub fn finish(self) -> BytesDiff {
        let mut tensors: Vec<(&[u8], TensorReads)> = self.tensors.into_iter().collect();
        tensors.sort_by_key(|(name, tensor)| (tensor.layer, *name));
        let mut layers: BTreeMap<Option<LayerId>, LayerBytes> = BTreeMap::new();
        let mut first: [Vec<RangeDifference>; RangeKind::N] = Default::default();
        for (name, tensor) in tensors {
            let counts = layers.entry(tensor.layer).or_default();
            for (expert_id, ranges) in tensor.ranges {
                counts.compare(ranges, |kind, reads| {
                    let first = &mut first[kind as usize];
                    if first.len() < self.limit {
                        first.push(RangeDifference {
                            kind,
                            tensor: String::from_utf8_lossy(name).into_owned(),
                            layer: tensor.layer,
                            expert_id,
                            reads,
                        });
                    }
                });
            }
        }
        BytesDiff {
            split_experts: self.experts.is_some(),
            layers,
            first: first.into_iter().flatten().collect(),
        }
    }
}

impl LayerBytes {
    /// Counts how the ranges of a tensor, or of an expert of it, differ, and tells each difference to `found`.
    fn compare(
        &mut self,
        ranges: [Vec<RangeReads>; 2],
        mut found: impl FnMut(RangeKind, [Option<RangeReads>; 2]),
    ) {
        for (side, ranges) in ranges.iter().enumerate() {
            self.ranges[side] += ranges.len() as u64;
            let bytes = ranges
                .iter()
                .map(|range| range.size_bytes.saturating_mul(range.n));
            self.read[side] = bytes.fold(self.read[side], u64::saturating_add);
        }
        let [a, mut b] = ranges;
        let mut rest = Vec::new();
        for a in a {
            match b.iter().position(|b| a.is_same_range(b)) {
                Some(at) => {
                    let b = b.remove(at);
                    if a.n != b.n {
                        self.other_reads += 1;
                        found(RangeKind::Reads, [Some(a), Some(b)]);
                    }
                }
                None => rest.push(a),
            }
        }
        let (mut a, mut b) = (rest.into_iter(), b.into_iter());
        loop {
            let pair = [a.next(), b.next()];
            let kind = match pair {
                [None, None] => return,
                [Some(_), None] => {
                    self.only[0] += 1;
                    RangeKind::OnlyA
                }
                [None, Some(_)] => {
                    self.only[1] += 1;
                    RangeKind::OnlyB
                }
                [Some(a), Some(b)] if a.size_bytes != b.size_bytes => {
                    self.other_size += 1;
                    RangeKind::Size
                }
                [Some(_), Some(_)] => {
                    self.other_place += 1;
                    RangeKind::Place
                }
            };
            found(kind, pair);
        }
    }
}

/// The range of an expert in a tensor that lies where the record says, laid out as the map says.
fn expert_range(tensor: &ExpertTensor, expert: ExpertId, whole: &RangeReads) -> Option<RangeReads> {
    let (first, range) = (tensor.range(ExpertId(0))?, tensor.range(expert)?);
    let before = range.file_offset.saturating_sub(first.file_offset);
    Some(RangeReads {
        file_offset: whole.file_offset.saturating_add(before),
        size_bytes: range.size_bytes,
        ..*whole
    })
}

/// The experts that an operation read, each once, by number.
fn distinct_experts(operation: &Operation) -> Vec<ExpertId> {
    let tokens = operation.tokens();
    let mut experts: Vec<ExpertId> = tokens
        .flat_map(|token| token.experts())
        .map(|expert| expert.expert_id)
        .collect();
    experts.sort_unstable();
    experts.dedup();
    experts
}
