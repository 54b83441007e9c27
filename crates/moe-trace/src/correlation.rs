//! Matches accesses to the model's files with tensors of the offset map.
//!
//! A source is found by its index in the tensor table, which this crate's recorders write; otherwise by its name, without
//! the suffix that ggml appends for views; otherwise by its file offset. In the first two cases its bytes must lie in the
//! tensor: a matching name with another offset means that trace and map belong to different models.

use std::collections::{BTreeMap, HashMap};

use moe_gguf::map::OffsetMap;

use crate::names::base_name;
use crate::record::{NO_TENSOR, TensorAccessLog};
use crate::run::Run;

/// Maximum number of listed sources. A damaged trace could contain a new name in each record.
const MAX_LISTED: usize = 10_000;

/// Index of the tensors of a map by tensor index, name and file offset. Empty if the model is unknown.
#[derive(Debug, Default)]
pub struct Correlation<'a> {
    tensors: HashMap<u32, Extent>,
    by_name: HashMap<&'a str, u32>,
    /// (file, offset of the first byte, tensor index), sorted.
    by_place: Vec<(u16, u64, u32)>,
}

/// A byte range in a file.
#[derive(Clone, Copy, Debug)]
struct Extent {
    file: u16,
    start: u64,
    /// One past the last byte.
    end: u64,
}

impl Extent {
    fn contains(&self, range: &Extent) -> bool {
        self.file == range.file && self.start <= range.start && range.end <= self.end
    }
}

impl<'a> Correlation<'a> {
    /// Indexes the tensors of `map`.
    pub fn new(map: &'a OffsetMap) -> Self {
        let mut tensors: HashMap<u32, Extent> = HashMap::new();
        let mut by_name = HashMap::new();
        for row in &map.rows {
            let end = row.file_offset.saturating_add(row.size_bytes);
            let extent = tensors.entry(row.tensor_idx).or_insert(Extent {
                file: row.file,
                start: row.file_offset,
                end,
            });
            extent.start = extent.start.min(row.file_offset);
            extent.end = extent.end.max(end);
            by_name.insert(&*row.tensor, row.tensor_idx);
        }
        let places = tensors
            .iter()
            .map(|(&index, extent)| (extent.file, extent.start, index));
        let mut by_place: Vec<_> = places.collect();
        by_place.sort_unstable();
        Self {
            tensors,
            by_name,
            by_place,
        }
    }

    /// The index in the tensor table of the tensor that source `i` of a record reads. `None` for a buffer, or if the map does not
    /// contain the tensor.
    pub fn resolve(&self, record: &TensorAccessLog, i: usize) -> Option<u32> {
        let source = record.sources().get(i).filter(|source| source.is_disk())?;
        let range = range(record, i);
        let index = source.tensor_idx.get();
        if self
            .tensors
            .get(&index)
            .is_some_and(|tensor| tensor.contains(&range))
        {
            return Some(index);
        }
        let name = source.name();
        if let Some(&index) = self.by_name.get(base_name(&name)) {
            // The header is at the start of a file, so offset 0 means that the recorder did not know the offset.
            let is_known = range.start > 0;
            let is_inside = self
                .tensors
                .get(&index)
                .is_some_and(|tensor| tensor.contains(&range));
            return (is_inside || !is_known).then_some(index);
        }
        let after = self
            .by_place
            .partition_point(|&(file, start, _)| (file, start) <= (range.file, range.start));
        let &(_, _, index) = self.by_place.get(after.checked_sub(1)?)?;
        let tensor = self.tensors.get(&index)?;
        (tensor.contains(&range) && range.start < range.end).then_some(index)
    }

    /// Whether source `i` of a record lies in the tensor whose index the record contains. True for records of other recorders.
    pub(crate) fn is_consistent(&self, record: &TensorAccessLog, i: usize) -> bool {
        let Some(source) = record.sources().get(i) else {
            return true;
        };
        let index = source.tensor_idx.get();
        if self.tensors.is_empty() || !source.is_disk() || index == NO_TENSOR {
            return true;
        }
        let tensor = self.tensors.get(&index);
        tensor.is_some_and(|tensor| tensor.contains(&range(record, i)))
            // Other recorders have their own tensor tables, so their indices differ.
            || !record.has_extension()
    }
}

fn range(record: &TensorAccessLog, i: usize) -> Extent {
    let start = record.sources[i].offset_or_buffer_id.get();
    let file = if record.has_extension() {
        record.source_file[i].get()
    } else {
        0
    };
    Extent {
        file,
        start,
        end: start.saturating_add(record.source_size(i)),
    }
}

/// A source in a file of the model that the map does not contain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unresolved {
    /// Name of the source.
    pub name: String,
    /// File offset of the first access, in bytes.
    pub file_offset: u64,
    /// Size of the first access, in bytes.
    pub size_bytes: u64,
    /// Number of operations that read it.
    pub n_accesses: u64,
}

/// The sources of a run whose memory source is a file of the model, but which the map does not contain, sorted by name; and
/// the number of accesses that were checked. Both are empty without a map.
pub fn unresolved(run: &Run) -> (Vec<Unresolved>, u64) {
    let Some(map) = &run.map else {
        return (Vec::new(), 0);
    };
    let correlation = Correlation::new(map);
    let mut found: BTreeMap<String, Unresolved> = BTreeMap::new();
    let mut n_accesses = 0;
    for operation in run.trace.operations() {
        let head = operation.head();
        for (i, source) in head.sources().iter().enumerate() {
            if !source.is_disk() {
                continue;
            }
            n_accesses += 1;
            if correlation.resolve(head, i).is_some() {
                continue;
            }
            let name = source.name();
            if let Some(found) = found.get_mut(&*name) {
                found.n_accesses += 1;
            } else if found.len() < MAX_LISTED {
                let name = name.into_owned();
                let unresolved = Unresolved {
                    name: name.clone(),
                    file_offset: source.offset_or_buffer_id.get(),
                    size_bytes: head.source_size(i),
                    n_accesses: 1,
                };
                found.insert(name, unresolved);
            }
        }
    }
    (found.into_values().collect(), n_accesses)
}

impl Run {
    /// A warning that lists the accesses to the model's files that the map does not contain; `None` if it contains all.
    pub fn unresolved_warning(&self) -> Option<String> {
        const N_NAMED: usize = 4;
        let (unresolved, n_accesses) = unresolved(self);
        let n: u64 = unresolved.iter().map(|source| source.n_accesses).sum();
        if n == 0 {
            return None;
        }
        let names = unresolved
            .iter()
            .take(N_NAMED)
            .map(|source| source.name.as_str());
        let names: Vec<&str> = names.collect();
        let more = match unresolved.len().saturating_sub(N_NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        Some(format!(
            "the offset map does not contain {n} of {n_accesses} accesses to the model's files: {}{more}; check that the map belongs to this model",
            names.join(", ")
        ))
    }
}
