//! Comparison of the weights that two runs read.

use std::collections::{BTreeMap, HashMap};

use moe_trace::{ExpertId, ExpertRanges, ExpertTensor, LayerId};
use moe_trace::{Operation, Run, TensorAccessLog};

use super::Error;
use super::passes::Step;

/// Maximum number of ranges, several times that of the largest models. Damaged traces may contain any number of names.
const MAX_RANGES: usize = 1 << 21;

/// Weights that two runs read, as byte ranges. A range is a tensor, or an expert's part of a tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BytesDiff {
    /// Whether experts have their own ranges. If a run has no offset map, the entire expert tensor is one range.
    pub split_experts: bool,
    /// By layer; `None` for tensors that belong to no layer.
    pub layers: BTreeMap<Option<LayerId>, LayerBytes>,
    /// The first differences of each kind.
    pub first: Vec<RangeDifference>,
}

/// Weights of one layer that two runs read. Arrays are `[A, B]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerBytes {
    /// Bytes read; repeated reads count repeatedly.
    pub read: [u64; 2],
    /// Number of ranges.
    pub ranges: [u64; 2],
    /// Number of ranges that only this run read.
    pub only: [u64; 2],
    /// Number of ranges with different sizes.
    pub different_size: u64,
    /// Number of ranges with equal sizes and different file offsets.
    pub different_offset: u64,
    /// Number of equal ranges with different numbers of reads.
    pub different_reads: u64,
}

/// Kind of difference, in the order of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RangeDifferenceKind {
    /// Only A read the range.
    OnlyA,
    /// Only B read the range.
    OnlyB,
    /// The sizes differ.
    Size,
    /// The offsets differ.
    Offset,
    /// The numbers of reads differ.
    Reads,
}

impl RangeDifferenceKind {
    const N: usize = 5;
}

/// A range that differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeDifference {
    /// Kind of difference.
    pub kind: RangeDifferenceKind,
    /// Name of the tensor.
    pub tensor: String,
    /// Layer of the tensor.
    pub layer: Option<LayerId>,
    /// Expert of the range, if it belongs to one.
    pub expert_id: Option<ExpertId>,
    /// Range and number of reads, `[A, B]`.
    pub reads: [Option<RangeReads>; 2],
}

/// A byte range of a model file, and its number of reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeReads {
    /// Index of the file (shard) of the model, from 0.
    pub file: u16,
    /// Offset of the first byte in the shard.
    pub file_offset: u64,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Number of operations that read the range.
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
        self.only == [0, 0]
            && self.different_size + self.different_offset + self.different_reads == 0
    }

    fn add(&mut self, more: &LayerBytes) {
        for side in 0..2 {
            self.read[side] = self.read[side].saturating_add(more.read[side]);
            self.ranges[side] += more.ranges[side];
            self.only[side] += more.only[side];
        }
        self.different_size += more.different_size;
        self.different_offset += more.different_offset;
        self.different_reads += more.different_reads;
    }
}

impl BytesDiff {
    /// Sum over all layers.
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

/// Reads of one tensor.
#[derive(Default)]
struct TensorReads {
    layer: Option<LayerId>,
    /// By expert (`None`: the entire tensor): ranges `[A, B]`. In an undamaged trace each list has at most one range.
    ranges: BTreeMap<Option<ExpertId>, [Vec<RangeReads>; 2]>,
}

/// Compares step by step.
pub(super) struct BytesComparer<'r> {
    runs: [&'r Run; 2],
    limit: usize,
    /// Ranges of experts, `[A, B]`, if both runs have an offset map.
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
            // Experts that the model does not have are skipped; the check of a run reports them.
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
        let mut first: [Vec<RangeDifference>; RangeDifferenceKind::N] = Default::default();
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
    /// Counts the differences between the ranges of a tensor or expert, and calls `found` for each.
    fn compare(
        &mut self,
        ranges: [Vec<RangeReads>; 2],
        mut found: impl FnMut(RangeDifferenceKind, [Option<RangeReads>; 2]),
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
                        self.different_reads += 1;
                        found(RangeDifferenceKind::Reads, [Some(a), Some(b)]);
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
                    RangeDifferenceKind::OnlyA
                }
                [None, Some(_)] => {
                    self.only[1] += 1;
                    RangeDifferenceKind::OnlyB
                }
                [Some(a), Some(b)] if a.size_bytes != b.size_bytes => {
                    self.different_size += 1;
                    RangeDifferenceKind::Size
                }
                [Some(_), Some(_)] => {
                    self.different_offset += 1;
                    RangeDifferenceKind::Offset
                }
            };
            found(kind, pair);
        }
    }
}

/// The range of an expert: the tensor's offset in the record plus the expert's relative offset in the map.
fn expert_range(tensor: &ExpertTensor, expert: ExpertId, whole: &RangeReads) -> Option<RangeReads> {
    let (first, range) = (tensor.range(ExpertId(0))?, tensor.range(expert)?);
    let before = range.file_offset.saturating_sub(first.file_offset);
    Some(RangeReads {
        file_offset: whole.file_offset.saturating_add(before),
        size_bytes: range.size_bytes,
        ..*whole
    })
}

/// The distinct experts that an operation read, sorted.
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
