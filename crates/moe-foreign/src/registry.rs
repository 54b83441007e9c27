//! The list of all formats, and the detection of the format of a file.

use std::path::Path;

use moe_files::text::without_byte_order_mark;
use moe_gguf::content::Content;
use xxhash_rust::xxh3::Xxh3;

use crate::error::ForeignError;
use crate::export::{Exporter, FilesExporter};
use crate::source::{self, Source};
use crate::{Importer, exporters, importers, outline};

/// All importers, in the order in which [`detect`] tries them. The first one that recognizes a file reads it, so importers with
/// strict checks are first.
pub const IMPORTERS: &[&dyn Importer] = &[
    &importers::learn::Learn,
    &importers::thesis::ThesisJson,
    &importers::bigmoeonedge::BigMoeOnEdge,
    &importers::mesh_llm::MeshLlm,
    &importers::mbolt::Mbolt,
    &importers::rtrace::RouterTrace,
    &importers::iku1::Iku1,
    &importers::imatrix::Imatrix,
    &importers::npy::Npy,
    &importers::sglang_pt::SglangPt,
    &importers::thesis::Thesis,
    &importers::responses::SglangResponse,
    &importers::responses::Vllm,
    &importers::sglang_json::SglangJson,
    &importers::eplb::Eplb,
    &importers::ds4_hotlist::Ds4Hotlist,
    &importers::expert_tracer::ExpertTracer,
    &importers::lattice::Lattice,
    &importers::megatron::Megatron,
    &importers::moe_balance::MoeBalance,
    &importers::jsonl::Jsonl,
    &importers::layer_expert::LayerExpert,
    &importers::colibri_trace::ColibriTrace,
    &importers::coli_usage::ColiUsage,
];

/// All exporters that write one file.
pub const EXPORTERS: &[&dyn Exporter] = &[
    &exporters::bigmoeonedge::BigMoeOnEdge,
    &exporters::coli_usage::ColiUsage,
    &exporters::ds4::Ds4,
    &exporters::matrix::Eplb,
    &exporters::matrix::EplbCsv,
    &exporters::jsonl::Jsonl,
    &exporters::npy_routing::NpyRouting,
    &exporters::matrix::NpyCounts,
    &exporters::matrix::Sglang,
    &exporters::learn::Learn,
    &exporters::perfetto::Perfetto,
];

/// All exporters that write a directory of files.
pub const FILES_EXPORTERS: &[&dyn FilesExporter] =
    &[&exporters::mesh_llm::MeshLlm, &exporters::thesis::Thesis];

/// A trace whose format was recognized.
pub struct Detected {
    /// The importer of its format.
    pub importer: &'static dyn Importer,
    /// The files of the trace.
    pub source: Source,
}

impl Detected {
    /// Identifier of the trace in datasets: `FORMAT-HASH`, with a hash of the names, sizes and samples of its files.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn run_id(&self) -> Result<String, ForeignError> {
        let mut hash = Xxh3::new();
        for file in self.source.files() {
            let name = file.file_name().unwrap_or_default();
            hash.update(name.as_encoded_bytes());
            hash.update(&source::size(file)?.to_le_bytes());
            hash.update(&source::sample(file)?);
        }
        Ok(format!("{}-{:016x}", self.importer.name(), hash.digest()))
    }
}

/// Finds the importer of a file, or of a directory of files of one format; `None` if no importer recognizes it.
///
/// # Errors
/// The path cannot be read.
pub fn detect(path: &Path) -> Result<Option<Detected>, ForeignError> {
    if path.is_dir() {
        return detect_directory(path);
    }
    let sample = sample(path)?;
    let importer = IMPORTERS
        .iter()
        .find(|&&importer| recognizes(importer, &sample));
    Ok(importer.map(|&importer| Detected {
        importer,
        source: Source::file(path),
    }))
}

/// Whether a file may have been written by the exporter `name` of [`EXPORTERS`]. An empty file has every format.
///
/// # Errors
/// The file cannot be read.
pub fn has_format(path: &Path, name: &str) -> Result<bool, ForeignError> {
    let sample = sample(path)?;
    let is_number = |byte: &u8| byte.is_ascii_digit() || b", \r\n".contains(byte);
    let importer = match name {
        _ if sample.is_empty() => return Ok(true),
        // No importer reads it.
        "eplb-csv" => return Ok(sample.iter().all(is_number)),
        "perfetto" => return Ok(sample.starts_with(&exporters::perfetto::head())),
        "npy-counts" => "npy",
        name => name,
    };
    Ok(IMPORTERS
        .iter()
        .any(|&known| known.name() == importer && recognizes(known, &sample)))
}

/// The first bytes of a file. If no importer recognizes them, and they are the start of a longer JSON document, its outline, which
/// contains keys after the first bytes.
fn sample(path: &Path) -> Result<Vec<u8>, ForeignError> {
    let sample = source::sample(path)?;
    let is_known = || {
        IMPORTERS
            .iter()
            .any(|&importer| recognizes(importer, &sample))
    };
    if source::is_partial(&sample)
        && !is_known()
        && let Some(outline) = outline::read(path)?
    {
        return Ok(outline);
    }
    Ok(sample)
}

/// Whether `importer` recognizes a file that starts with `sample`; text may start with a byte order mark. Of the containers that
/// [`Content`] identifies, only GGUF (importance matrices) and ZIP (files of `torch.save`) can be traces.
fn recognizes(importer: &dyn Importer, sample: &[u8]) -> bool {
    if !matches!(
        Content::of(sample),
        None | Some(Content::Gguf | Content::Zip)
    ) {
        return false;
    }
    let text = if importer.is_binary() {
        sample
    } else {
        without_byte_order_mark(sample)
    };
    importer.is_applicable(text)
}

/// The first file that an importer recognizes determines the format. Files of other formats are skipped.
fn detect_directory(path: &Path) -> Result<Option<Detected>, ForeignError> {
    let mut found: Option<&'static dyn Importer> = None;
    let mut files = Vec::new();
    let mut n_skipped = 0;
    for file in source::files(path)? {
        let sample = sample(&file)?;
        let importer = found.or_else(|| {
            let mut candidates = IMPORTERS.iter().copied();
            candidates
                .find(|importer| importer.takes_directories() && recognizes(*importer, &sample))
        });
        match importer {
            Some(importer) if recognizes(importer, &sample) => {
                found = Some(importer);
                files.push(file);
            }
            _ => n_skipped += 1,
        }
    }
    Ok(found.map(|importer| Detected {
        importer,
        source: Source::directory(path, files, n_skipped),
    }))
}
