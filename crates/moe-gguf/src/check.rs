//! Whether the map fits the files: overlaps, gaps, bytes past the end.

use serde::Serialize;

use crate::gguf::{Gguf, GgufFile, Tensor};
use crate::map::Category;
use crate::names::Role;
use crate::text::counted;
use crate::types::GgmlType;

/// What [`check`] found. Tensors are named by their index in the table.
///
/// For every file, header + padding + tensors - overlaps + gaps + trailing - missing is its size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LayoutReport {
    /// Pairs of tensors that claim the same bytes.
    pub overlaps: Vec<Overlap>,
    /// Bytes of a data section, beyond alignment padding, that belong to no tensor.
    pub gaps: Vec<Gap>,
    /// Tensors whose data the file does not wholly hold.
    pub past_end: Vec<PastEnd>,
    /// Why llama.cpp will refuse the model, if it will: of each reason, the first tensor in a file.
    pub llama_cpp_refuses: Vec<Refusal>,
    /// Bytes of alignment padding, that after the headers included.
    pub padding_bytes: u64,
    /// Bytes after the last tensor and its padding; no fault.
    pub trailing_bytes: u64,
    /// Bytes of the headers.
    pub header_bytes: u64,
    /// Bytes that the tensors claim.
    pub tensor_bytes: u64,
    /// Bytes of each category, those with none left out.
    pub shares: Vec<Share>,
}

/// Two tensors that claim the same bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Overlap {
    /// Index of the file.
    pub file: u16,
    /// The tensor that begins first, or reaches farthest.
    pub first: u32,
    /// The tensor that begins inside it.
    pub second: u32,
    /// First byte claimed twice.
    pub offset: u64,
    /// Bytes claimed twice.
    pub size_bytes: u64,
}

/// Bytes that belong to no tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gap {
    /// Index of the file.
    pub file: u16,
    /// The tensor before it; none at the start of the data section.
    pub after: Option<u32>,
    /// The tensor behind it.
    pub before: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub size_bytes: u64,
}

/// A tensor that its file does not wholly hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PastEnd {
    /// Index of the file.
    pub file: u16,
    /// The tensor.
    pub tensor: u32,
    /// Bytes that are missing.
    pub missing_bytes: u64,
}

/// What llama.cpp does not load, though the file can be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Refusal {
    /// llama.cpp demands that a tensor begins where the one before it in the table ends, padded.
    Misplaced {
        /// Index of the file.
        file: u16,
        /// The first such tensor.
        tensor: u32,
        /// Where it lies, relative to the data section as in the file.
        offset: u64,
        /// Where llama.cpp demands it.
        expected: u64,
    },
    /// A type that only ik_llama.cpp knows.
    IkType {
        /// Index of the file.
        file: u16,
        /// The first such tensor.
        tensor: u32,
        /// Its type.
        ty: GgmlType,
    },
}

/// Bytes of one category.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Share {
    /// The category.
    pub category: Category,
    /// Its tensors.
    pub n_tensors: u32,
    /// Their bytes.
    pub size_bytes: u64,
}

impl LayoutReport {
    /// Whether nothing was found: no overlap, no gap, nothing past an end.
    pub fn is_sound(&self) -> bool {
        self.overlaps.is_empty() && self.gaps.is_empty() && self.past_end.is_empty()
    }
}

impl Overlap {
    /// One line for people.
    pub fn describe(&self, gguf: &Gguf) -> String {
        let (first, second) = (name(gguf, self.first), name(gguf, self.second));
        format!(
            "{second} overlaps {first} by {} from offset {}",
            counted(self.size_bytes, "byte"),
            self.offset
        ) + &in_file(gguf, self.file)
    }
}

impl Gap {
    /// One line for people.
    pub fn describe(&self, gguf: &Gguf) -> String {
        let after = self
            .after
            .map_or("the header".to_owned(), |tensor| name(gguf, tensor));
        let before = name(gguf, self.before);
        format!(
            "{} at offset {} between {after} and {before} {} to no tensor",
            counted(self.size_bytes, "byte"),
            self.offset,
            if self.size_bytes == 1 {
                "belongs"
            } else {
                "belong"
            }
        ) + &in_file(gguf, self.file)
    }
}

impl PastEnd {
    /// One line for people.
    pub fn describe(&self, gguf: &Gguf) -> String {
        let tensor = name(gguf, self.tensor);
        format!(
            "{tensor} lacks {}: the file ends before it does",
            counted(self.missing_bytes, "byte")
        ) + &in_file(gguf, self.file)
    }
}

impl Refusal {
    /// One line for people.
    pub fn describe(&self, gguf: &Gguf) -> String {
        match self {
            Refusal::Misplaced {
                file,
                tensor,
                offset,
                expected,
            } => {
                let tensor = name(gguf, *tensor);
                format!(
                    "llama.cpp will refuse the file: {tensor} has offset {offset}, where the tensors before it in the table end at {expected}"
                ) + &in_file(gguf, *file)
            }
            Refusal::IkType { file, tensor, ty } => {
                let tensor = name(gguf, *tensor);
                format!(
                    "llama.cpp will refuse the file: {tensor} is of type {ty}, which only ik_llama.cpp knows"
                ) + &in_file(gguf, *file)
            }
        }
    }
}

fn name(gguf: &Gguf, tensor: u32) -> String {
    gguf.tensors()
        .get(tensor as usize)
        .map_or_else(|| format!("tensor {tensor}"), |t| format!("{:?}", t.name))
}

/// Where a model has several files, which one is meant.
fn in_file(gguf: &Gguf, file: u16) -> String {
    match gguf.files() {
        [_, _, ..] => gguf
            .files()
            .get(usize::from(file))
            .map_or_else(String::new, |f| format!(" (in {})", f.name)),
        _ => String::new(),
    }
}

/// Checks every file of a model against its tensor table. Reads no data.
pub fn check(gguf: &Gguf) -> LayoutReport {
    let mut report = LayoutReport {
        shares: shares(gguf.tensors()),
        ..LayoutReport::default()
    };
    let mut by_file = vec![Vec::new(); gguf.files().len()];
    for tensor in gguf.tensors() {
        by_file[usize::from(tensor.file)].push(tensor);
    }
    for (index, (file, tensors)) in (0..).zip(gguf.files().iter().zip(by_file)) {
        check_file(&mut report, index, file, tensors);
    }
    report
}

fn check_file(report: &mut LayoutReport, index: u16, file: &GgufFile, mut tensors: Vec<&Tensor>) {
    report.header_bytes += file.header_size;
    report.tensor_bytes += tensors.iter().map(|t| t.size_bytes).sum::<u64>();
    let refusals = [misplaced(index, file, &tensors), ik_type(index, &tensors)];
    report
        .llama_cpp_refuses
        .extend(refusals.into_iter().flatten());

    tensors.retain(|t| t.size_bytes > 0); // nothing lies nowhere
    tensors.sort_by_key(|t| (t.offset, t.index));

    // The tensor that reaches farthest so far, and how far.
    let mut last: Option<&Tensor> = None;
    let mut end = file.header_size;
    for tensor in tensors {
        let tensor_end = tensor.offset + tensor.size_bytes;
        if tensor.offset < end {
            report.overlaps.push(Overlap {
                file: index,
                first: last.map_or(tensor.index, |t| t.index),
                second: tensor.index,
                offset: tensor.offset,
                size_bytes: end.min(tensor_end) - tensor.offset,
            });
        } else {
            let padded = end.next_multiple_of(file.alignment).min(tensor.offset);
            report.padding_bytes += padded - end;
            if tensor.offset > padded {
                report.gaps.push(Gap {
                    file: index,
                    after: last.map(|t| t.index),
                    before: tensor.index,
                    offset: padded,
                    size_bytes: tensor.offset - padded,
                });
            }
        }
        if tensor_end > file.size_bytes {
            report.past_end.push(PastEnd {
                file: index,
                tensor: tensor.index,
                missing_bytes: tensor_end - file.size_bytes.max(tensor.offset),
            });
        }
        if tensor_end > end {
            end = tensor_end;
            last = Some(tensor);
        }
    }

    let padded = end.next_multiple_of(file.alignment);
    report.padding_bytes += padded.min(file.size_bytes).saturating_sub(end);
    report.trailing_bytes += file.size_bytes.saturating_sub(padded);
}

fn misplaced(index: u16, file: &GgufFile, tensors: &[&Tensor]) -> Option<Refusal> {
    let mut expected = file.data_offset;
    for tensor in tensors {
        if tensor.offset != expected {
            return Some(Refusal::Misplaced {
                file: index,
                tensor: tensor.index,
                offset: tensor.offset - file.data_offset,
                expected: expected - file.data_offset,
            });
        }
        expected += tensor.size_bytes.next_multiple_of(file.alignment);
    }
    None
}

fn ik_type(index: u16, tensors: &[&Tensor]) -> Option<Refusal> {
    let tensor = tensors.iter().find(|t| t.ty.is_ik())?;
    Some(Refusal::IkType {
        file: index,
        tensor: tensor.index,
        ty: tensor.ty,
    })
}

fn shares(tensors: &[Tensor]) -> Vec<Share> {
    let mut shares = Category::ALL.map(|category| Share {
        category,
        n_tensors: 0,
        size_bytes: 0,
    });
    for tensor in tensors {
        let category = Role::of(&tensor.name).category;
        if let Some(share) = shares.iter_mut().find(|share| share.category == category) {
            share.n_tensors += 1;
            share.size_bytes += tensor.size_bytes;
        }
    }
    shares
        .into_iter()
        .filter(|share| share.n_tensors > 0)
        .collect()
}
