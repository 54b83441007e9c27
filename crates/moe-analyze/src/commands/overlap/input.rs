//! What is read of a run: its transfers, what gate and up read, the GPU's memory.

use std::path::Path;

use anyhow::bail;
use moe_analysis::overlap::{Reads, gate_up_bytes};
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_trace::manifest::{Gpu, Manifest};
use moe_trace::transfers::{self, Transfer};
use moe_trace::{Facts, map_table};

use crate::context::Context;
use crate::progress::Progress;
use crate::traces;

/// How to get what is missing.
const RECORD: &str = "record a run with `moe-analyze record --device cuda --policy post-fetch`";

/// What was read.
pub struct Input {
    /// Of all passes, in order; not empty.
    pub transfers: Vec<Transfer>,
    /// What gate and up read, and the memory's bandwidth.
    pub reads: Reads,
    /// The GPUs, if the run has a manifest that describes them.
    pub gpus: Vec<Gpu>,
}

impl Input {
    /// Reads a run directory, or a `transfers.jsonl` alone. The model is the one that is named, else the run's map.
    ///
    /// # Errors
    /// There are no transfers, or a file is damaged.
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
        if is_run && !path.is_file() {
            bail!(
                "{} has no {}, which Post-Fetch writes; {RECORD}",
                run.display(),
                transfers::FILE_NAME
            );
        }
        let progress = Progress::reading(ctx, &path);
        let transfers = transfers::read(&path)?;
        drop(progress);
        if let Some(remark) = transfers::truncation(&path)? {
            ctx.remark(remark);
        }
        if transfers.is_empty() {
            bail!("{} holds no transfers; {RECORD}", path.display());
        }
        let beside = |name: &str| {
            let path = run.join(name);
            (is_run && path.is_file()).then_some(path)
        };
        let map = match (model, beside(map_table::FILE_NAME)) {
            (Some(model), _) => {
                let gguf = Gguf::open(model)?;
                let named = Facts::of_model(&model.to_string_lossy(), &gguf)?;
                traces::check_model(run, manifest.as_ref(), &named)?;
                Some(OffsetMap::new(&gguf))
            }
            (None, Some(map)) => Some(map_table::read(&map)?),
            (None, None) => None,
        };
        let reads = Reads {
            gate_up_bytes: map.as_ref().map(gate_up_bytes).unwrap_or_default(),
            memory_bytes_per_s: memory_gb_s.map(|gb_s| gb_s * 1e9),
        };
        let is_known = |run: &Transfer| reads.gate_up_bytes.contains_key(&run.layer_id);
        if memory_gb_s.is_some() && !transfers.iter().all(is_known) {
            ctx.remark(
                "what gate and up read is not known of every layer, so that their share of the memory's bandwidth is not told: name the model with --model",
            );
        }
        Ok(Input {
            transfers,
            reads,
            gpus: manifest.map_or(Vec::new(), |manifest| manifest.gpus().to_vec()),
        })
    }
}
