//! Reads the inputs of `overlap`: transfers, sizes of gate and up matrices, GPUs.

use std::path::Path;

use anyhow::bail;
use moe_analysis::overlap::{MemoryTraffic, gate_up_bytes};
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_trace::bounded::is_present;
use moe_trace::manifest::{Gpu, Manifest};
use moe_trace::transfers::{self, Transfer};
use moe_trace::{ModelInfo, map_table};

use crate::context::Context;
use crate::progress::Progress;
use crate::traces;

/// Advice for a run without transfers.
const RECORD: &str = "record a run with `moe-analyze record --device cuda --policy post-fetch`";

/// Inputs of the analysis.
pub struct Input {
    /// Transfers of all passes, in order; not empty.
    pub transfers: Vec<Transfer>,
    /// Bytes that gate and up read, and the memory bandwidth.
    pub memory: MemoryTraffic,
    /// The GPUs, if the run has a manifest that describes them.
    pub gpus: Vec<Gpu>,
}

impl Input {
    /// Reads a run directory or a `transfers.jsonl`. Sizes come from `model`, else from the run's map.
    ///
    /// # Errors
    /// The run has no transfers, or a file is damaged.
    pub fn read(
        run: &Path,
        model: Option<&Path>,
        memory_gb_s: Option<f64>,
        ctx: &Context,
    ) -> anyhow::Result<Input> {
        let is_run = run.is_dir();
        let manifest = if is_run { Manifest::of_run(run)? } else { None };
        let path = if is_run {
            run.join(transfers::FILE_NAME)
        } else {
            run.to_owned()
        };
        if is_run && !is_present(&path) {
            bail!(
                "{} has no {}; {RECORD}",
                run.display(),
                transfers::FILE_NAME
            );
        }
        let progress = Progress::reading(ctx, &path);
        let transfers = transfers::read(&path)?;
        drop(progress);
        if let Some(warning) = transfers::truncation(&path)? {
            ctx.note(warning);
        }
        if transfers.is_empty() {
            bail!("{} contains no transfers; {RECORD}", path.display());
        }
        let file_of_run = |name: &str| {
            let path = run.join(name);
            (is_run && is_present(&path)).then_some(path)
        };
        let map = match (model, file_of_run(map_table::FILE_NAME)) {
            (Some(model), _) => {
                let gguf = Gguf::open(model)?;
                let named = ModelInfo::from_gguf(&model.to_string_lossy(), &gguf)?;
                traces::check_model(run, manifest.as_ref(), &named)?;
                Some(OffsetMap::new(&gguf))
            }
            (None, Some(map)) => Some(map_table::read(&map)?),
            (None, None) => None,
        };
        let memory = MemoryTraffic {
            gate_up_bytes: map.as_ref().map(gate_up_bytes).unwrap_or_default(),
            memory_bytes_per_s: memory_gb_s.map(|gb_s| gb_s * 1e9),
        };
        let is_known = |run: &Transfer| memory.gate_up_bytes.contains_key(&run.layer_id);
        if memory_gb_s.is_some() && !transfers.iter().all(is_known) {
            let advice = match model {
                Some(_) => "pass the model that the run used to --model",
                None => "pass --model FILE.gguf",
            };
            ctx.note(format_args!(
                "warning: expert sizes are unknown for some layers, so the summary does not contain the use of memory bandwidth; {advice}"
            ));
        }
        Ok(Input {
            transfers,
            memory,
            gpus: manifest.map_or(Vec::new(), |manifest| manifest.gpus().to_vec()),
        })
    }
}
