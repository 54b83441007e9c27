//! Checks the layout of tensors in the files of a model: overlaps, gaps, and data past the end of a file.

use serde::Serialize;

use crate::gguf::{Gguf, GgufFile, Tensor};
use crate::map::Category;
use crate::names::Role;
use crate::types::GgmlType;
use moe_files::text::counted;

/// The result of [`check`]. Sums are over all files of the model.
///
/// In this report, a tensor is its index in [`Gguf::tensors`], and a file its index in [`Gguf::files`].
///
/// For every file, header + padding + tensors - overlaps + gaps + trailing - missing bytes is the size of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LayoutReport {
    /// Pairs of tensors that share bytes.
    pub overlaps: Vec<Overlap>,
    /// Bytes of a data section, except alignment padding, that belong to no tensor.
    pub gaps: Vec<Gap>,
    /// Tensors whose data is not completely inside the file.
    pub past_end: Vec<PastEnd>,
    /// Reasons why llama.cpp does not load the model. For each file and reason, only the first tensor is listed.
    pub llama_cpp_refuses: Vec<Refusal>,
    /// Bytes of alignment padding, including the padding after the headers.
    pub padding_bytes: u64,
    /// Bytes after the last tensor of a file and its padding. They are not an error.
    pub trailing_bytes: u64,
    /// Bytes of the headers.
    pub header_bytes: u64,
    /// Sum of the tensor sizes in bytes.
    pub tensor_bytes: u64,
    /// Number of tensors and bytes of each category, in the order of [`Category::ALL`]. Categories without tensors are omitted.
    #[serde(rename = "shares")]
    pub category_sizes: Vec<CategorySize>,
}

/// Two tensors that share bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Overlap {
    /// Index of the file.
    pub file: u16,
    /// Index of the tensor with the largest end offset among those that start before `second`. If `second` overlaps only the
    /// header of the file, `first` is equal to `second`.
    pub first: u32,
    /// Index of the tensor that starts inside `first`.
    pub second: u32,
    /// Offset of the first shared byte from the start of the file.
    pub offset: u64,
    /// Number of shared bytes.
    pub size_bytes: u64,
}

/// Bytes that belong to no tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gap {
    /// Index of the file.
    pub file: u16,
    /// Index of the tensor before the gap; `None` if the gap is at the start of the data section.
    pub after: Option<u32>,
    /// Index of the tensor after the gap.
    pub before: u32,
    /// Offset of the first byte of the gap from the start of the file.
    pub offset: u64,
    /// Size in bytes.
    pub size_bytes: u64,
}

/// A tensor that is not completely inside its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PastEnd {
    /// Index of the file.
    pub file: u16,
    /// Index of the tensor.
    pub tensor: u32,
    /// Number of bytes of the tensor that are not in the file.
    pub missing_bytes: u64,
}

/// A reason why llama.cpp does not load a file that this crate can read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Refusal {
    /// A tensor does not start at the padded end of the preceding tensor in the table.
    Misplaced {
        /// Index of the file.
        file: u16,
        /// Index of the first such tensor.
        tensor: u32,
        /// Its offset in bytes, relative to the data section.
        offset: u64,
        /// The offset that llama.cpp requires, relative to the data section, in bytes.
        expected: u64,
    },
    /// A tensor has a type that only ik_llama.cpp supports.
    IkType {
        /// Index of the file.
        file: u16,
        /// Index of the first such tensor.
        tensor: u32,
        /// Its type.
        ty: GgmlType,
    },
}

/// Number of tensors and bytes of one category.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CategorySize {
    /// The category.
    pub category: Category,
    /// Number of its tensors.
    pub n_tensors: u32,
    /// Sum of their sizes in bytes.
    pub size_bytes: u64,
}

impl LayoutReport {
    /// Whether the files have no overlap, no gap, and no tensor past the end. [`Self::llama_cpp_refuses`] is ignored.
    pub fn is_sound(&self) -> bool {
        self.overlaps.is_empty() && self.gaps.is_empty() && self.past_end.is_empty()
    }
}

impl Overlap {
    /// Describes the overlap in one line.
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
    /// Describes the gap in one line.
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
    /// Describes the tensor in one line.
    pub fn describe(&self, gguf: &Gguf) -> String {
        let tensor = name(gguf, self.tensor);
        format!(
            "{tensor} extends {} past the end of the file",
            counted(self.missing_bytes, "byte")
        ) + &in_file(gguf, self.file)
    }
}

impl Refusal {
    /// Describes the reason in one line.
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
                    "llama.cpp rejects the file: {tensor} has offset {offset} in the data section, but the preceding tensor in the table ends at {expected}"
                ) + &in_file(gguf, *file)
            }
            Refusal::IkType { file, tensor, ty } => {
                let tensor = name(gguf, *tensor);
                format!(
                    "llama.cpp rejects the file: {tensor} has type {ty}, which only ik_llama.cpp supports"
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

/// Returns ` (in FILE)` if the model has several files, otherwise an empty string.
fn in_file(gguf: &Gguf, file: u16) -> String {
    match gguf.files() {
        [_, _, ..] => gguf
            .files()
            .get(usize::from(file))
            .map_or_else(String::new, |f| format!(" (in {})", f.name)),
        _ => String::new(),
    }
}

/// Checks the tensor table of every file of a model. Does not read tensor data.
pub fn check(gguf: &Gguf) -> LayoutReport {
    let mut report = LayoutReport {
        category_sizes: category_sizes(gguf.tensors()),
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

    tensors.retain(|t| t.size_bytes > 0); // An empty tensor may have any offset.
    tensors.sort_by_key(|t| (t.offset, t.index));

    // The tensor with the largest end offset so far, and that offset.
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

fn category_sizes(tensors: &[Tensor]) -> Vec<CategorySize> {
    let mut category_sizes = Category::ALL.map(|category| CategorySize {
        category,
        n_tensors: 0,
        size_bytes: 0,
    });
    for tensor in tensors {
        let category = Role::of(&tensor.name).category;
        if let Some(size) = category_sizes
            .iter_mut()
            .find(|size| size.category == category)
        {
            size.n_tensors += 1;
            size.size_bytes += tensor.size_bytes;
        }
    }
    category_sizes
        .into_iter()
        .filter(|size| size.n_tensors > 0)
        .collect()
}
