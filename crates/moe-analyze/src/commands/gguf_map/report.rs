//! The findings of the checks, as text and as JSON.

use std::fmt::Write as _;
use std::io::{self, Write};

use moe_files::text::counted;
use moe_gguf::Gguf;
use moe_gguf::check::{LayoutReport, check};
use moe_gguf::layers::{LayerOrder, layer_order};
use moe_gguf::map::OffsetMap;
use serde::{Serialize, Serializer};

use super::data::Data;
use crate::layout::{layers, verdict};
use crate::output::{Format, Table, fixed, human_bytes};

/// Everything that is reported about a model in addition to its map.
#[derive(Serialize)]
pub struct Survey<'a> {
    #[serde(rename = "files", serialize_with = "files")]
    pub gguf: &'a Gguf,
    pub check: LayoutReport,
    pub layers: LayerOrder,
    /// Results of `--verify`.
    pub data: Option<Data>,
}

impl Survey<'_> {
    /// Checks the headers.
    pub fn of(gguf: &Gguf) -> Survey<'_> {
        Survey {
            gguf,
            check: check(gguf),
            layers: layer_order(gguf),
            data: None,
        }
    }

    /// Returns whether the data of all tensors is in the file and does not overlap. With overlaps, a small file could declare more
    /// data than any machine can read.
    pub fn is_readable(&self) -> bool {
        self.check.past_end.is_empty() && self.check.overlaps.is_empty()
    }

    pub fn is_sound(&self) -> bool {
        self.check.is_sound() && self.data.as_ref().is_none_or(Data::is_sound)
    }
}

/// Serializes the names and sizes of the model's files, in the order of the column `file`.
fn files<S: Serializer>(gguf: &Gguf, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct File<'a> {
        name: &'a str,
        size_bytes: u64,
        header_bytes: u64,
        alignment: u64,
    }
    serializer.collect_seq(gguf.files().iter().map(|file| File {
        name: &file.name,
        size_bytes: file.size_bytes,
        header_bytes: file.header_size,
        alignment: file.alignment,
    }))
}

/// Returns a summary of the model's tensors and their layout.
pub fn summary(survey: &Survey, map: &OffsetMap) -> String {
    let (gguf, check) = (survey.gguf, &survey.check);
    let mut text = format!(
        "{}, {}, {} of tensor data after {} of header\n",
        counted(gguf.tensors().len(), "tensor"),
        counted(map.rows.len(), "row"),
        human_bytes(check.tensor_bytes),
        human_bytes(check.header_bytes),
    );
    if gguf.files().len() > 1 {
        for (index, file) in gguf.files().iter().enumerate() {
            let size = human_bytes(file.size_bytes);
            // Writing to a string cannot fail.
            let _ = writeln!(text, "file {index}: {:?}, {size}", file.name);
        }
    }
    if let Some(layers) = layers(&survey.layers) {
        let _ = writeln!(text, "layers: {layers}");
    }
    text + shares(check).trim_end()
}

/// Returns the table of sizes by category.
fn shares(check: &LayoutReport) -> String {
    let total = check.tensor_bytes.max(1) as f64;
    let mut text = Vec::new();
    Table::of(&check.category_sizes)
        .shown("category", |share| share.category.as_str())
        .shown("tensors", |share| share.n_tensors)
        .shown("size (bytes)", |share| share.size_bytes)
        .shown("size", |share| human_bytes(share.size_bytes))
        .shown("of all tensors (%)", |share| {
            fixed(100.0 * share.size_bytes as f64 / total, 1)
        })
        .write(&mut text, Format::Table)
        .expect("writing to memory cannot fail");
    String::from_utf8_lossy(&text).into_owned()
}

/// Writes the findings of the checks, one per line, and a verdict.
pub fn write_findings(out: &mut dyn Write, survey: &Survey, verify: bool) -> io::Result<()> {
    let (gguf, check) = (survey.gguf, &survey.check);
    for found in &check.overlaps {
        writeln!(out, "overlap: {}", found.describe(gguf))?;
    }
    for found in &check.gaps {
        writeln!(out, "gap: {}", found.describe(gguf))?;
    }
    for found in &check.past_end {
        writeln!(out, "past end: {}", found.describe(gguf))?;
    }
    for found in &check.llama_cpp_refuses {
        writeln!(out, "note: {}", found.describe(gguf))?;
    }
    if survey.layers.string_sorted {
        writeln!(
            out,
            "note: the layers are sorted as strings (10 before 2), so a forward pass seeks; `relayout --order numeric` fixes it"
        )?;
    }
    if let Some(data) = &survey.data {
        write_data_findings(out, gguf, data)?;
    }
    writeln!(out, "{}", verdict(check))?;
    match &survey.data {
        Some(data) => writeln!(out, "{}", data_verdict(data)),
        None if verify => writeln!(
            out,
            "FAULTY data: not read, because tensors overlap or reach past the end of the file"
        ),
        None => Ok(()),
    }
}

fn write_data_findings(out: &mut dyn Write, gguf: &Gguf, data: &Data) -> io::Result<()> {
    for verified in &data.tensors {
        let tensor = gguf.tensors().get(verified.tensor as usize);
        if let (Some(tensor), Some(found)) = (tensor, verified.non_finite) {
            let file = gguf.files().get(usize::from(tensor.file));
            writeln!(
                out,
                "not finite: {:?} has {} values or block scales that are not finite, the first at byte {} of {}",
                tensor.name,
                found.count,
                found.first_offset,
                file.map_or("", |file| &file.name),
            )?;
        }
    }
    for difference in data.differences.iter().flatten() {
        writeln!(out, "manifest: {difference}")?;
    }
    Ok(())
}

/// Describes on one line whether the data is sound.
fn data_verdict(data: &Data) -> String {
    let unchecked = data.tensors.iter().filter(|t| !t.values_checked).count();
    let mut text = format!(
        "{} data: {} read, {} of them with values that are not finite",
        if data.is_sound() { "sound" } else { "FAULTY" },
        counted(data.tensors.len(), "tensor"),
        data.n_impossible(),
    );
    // Writing to a string cannot fail.
    if unchecked > 0 {
        let _ = write!(text, ", {unchecked} of types whose values are not checked");
    }
    if data.differences.is_some() {
        let _ = write!(
            text,
            "; {} from the manifest ({})",
            counted(data.n_different(), "difference"),
            data.hash
        );
    }
    text
}
