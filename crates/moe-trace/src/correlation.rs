//! Which entry of the model's map an access to the model's file is.
//!
//! A source is found by its index in the tensor table, as this crate's recorders write it; else by its name, without what
//! ggml appends for views; else by its place in the file. In the first two cases its bytes must be the tensor's: a name that
//! fits and a place that does not are two models.

use std::collections::{BTreeMap, HashMap};

use moe_gguf::map::OffsetMap;

use crate::names::base_name;
use crate::record::{NO_TENSOR, TensorAccessLog};
use crate::run::Run;

/// Sources that are listed; a damaged trace could name as many as it has records.
const MAX_LISTED: usize = 10_000;

/// The tensors of a map, to be found by index, name and place. Empty: no model is known.
#[derive(Debug, Default)]
pub struct Correlation<'a> {
    tensors: HashMap<u32, Extent>,
    by_name: HashMap<&'a str, u32>,
    /// Tensors by file and first byte.
    by_place: Vec<(u16, u64, u32)>,
}

/// Where a tensor is.
#[derive(Clone, Copy, Debug)]
struct Extent {
    file: u16,
    begin: u64,
    /// One past the last byte.
    end: u64,
}

impl Extent {
    fn holds(&self, range: &Extent) -> bool {
        self.file == range.file && self.begin <= range.begin && range.end <= self.end
    }
}

impl<'a> Correlation<'a> {
    /// The tensors of `map`.
    pub fn new(map: &'a OffsetMap) -> Self {
        let mut tensors: HashMap<u32, Extent> = HashMap::new();
        let mut by_name = HashMap::new();
        for row in &map.rows {
            let end = row.file_offset.saturating_add(row.size_bytes);
            let extent = tensors.entry(row.tensor_idx).or_insert(Extent {
                file: row.file,
                begin: row.file_offset,
                end,
            });
            extent.begin = extent.begin.min(row.file_offset);
            extent.end = extent.end.max(end);
            by_name.insert(&*row.tensor, row.tensor_idx);
        }
        let places = tensors
            .iter()
            .map(|(&index, extent)| (extent.file, extent.begin, index));
        let mut by_place: Vec<_> = places.collect();
        by_place.sort_unstable();
        Self {
            tensors,
            by_name,
            by_place,
        }
    }

    /// The index of the tensor that source `i` of a record reads; `None` for a buffer, and for what the map does not have.
    pub fn resolve(&self, record: &TensorAccessLog, i: usize) -> Option<u32> {
        let source = record.sources().get(i).filter(|source| source.is_disk())?;
        let range = range(record, i);
        let index = source.tensor_idx.get();
        if self
            .tensors
            .get(&index)
            .is_some_and(|tensor| tensor.holds(&range))
        {
            return Some(index);
        }
        let name = source.name();
        if let Some(&index) = self.by_name.get(base_name(&name)) {
            // The header is at the beginning of a file, so nothing is read from there: the recorder did not know the place.
            let is_known = range.begin > 0;
            let holds = self
                .tensors
                .get(&index)
                .is_some_and(|tensor| tensor.holds(&range));
            return (holds || !is_known).then_some(index);
        }
        let after = self
            .by_place
            .partition_point(|&(file, begin, _)| (file, begin) <= (range.file, range.begin));
        let &(_, _, index) = self.by_place.get(after.checked_sub(1)?)?;
        let tensor = self.tensors.get(&index)?;
        (tensor.holds(&range) && range.begin < range.end).then_some(index)
    }

    /// Whether source `i` of a record reads what it says, as far as a record of this crate's says it: the index of a
    /// tensor that is at that place.
    pub(crate) fn holds(&self, record: &TensorAccessLog, i: usize) -> bool {
        let Some(source) = record.sources().get(i) else {
            return true;
        };
        let index = source.tensor_idx.get();
        if self.tensors.is_empty() || !source.is_disk() || index == NO_TENSOR {
            return true;
        }
        let tensor = self.tensors.get(&index);
        tensor.is_some_and(|tensor| tensor.holds(&range(record, i)))
            // The indices of other recorders count in tables of their own.
            || !record.has_extension()
    }
}

fn range(record: &TensorAccessLog, i: usize) -> Extent {
    let begin = record.sources[i].offset_or_buffer_id.get();
    let file = if record.has_extension() {
        record.source_file[i].get()
    } else {
        0
    };
    Extent {
        file,
        begin,
        end: begin.saturating_add(record.source_size(i)),
    }
}

/// A source of the model's file that is no entry of the map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unresolved {
    /// Its name.
    pub name: String,
    /// Where its first access begins.
    pub file_offset: u64,
    /// Bytes of its first access.
    pub size_bytes: u64,
    /// Operations that read it.
    pub n_accesses: u64,
}

/// The sources of a run that are in the model's file by their own word and not in its map, by name; and the operations'
/// accesses to the file that were looked at. Nothing is looked at where there is no map.
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
    /// What the run reads from the model's file that its map does not have, in one line; `None` if all of it is there.
    pub fn unresolved_remark(&self) -> Option<String> {
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
            "{n} of {n_accesses} accesses to the model's file are not in its map: {}{more}; is it the map of this model?",
            names.join(", ")
        ))
    }
}
