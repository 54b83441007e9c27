//! Counts the experts that inputs select.

pub mod inputs;
pub mod sentences;

use std::path::Path;

use anyhow::bail;
use moe_analysis::hotness::{ExpertBytes, Hotness, RowCounter};
use moe_analysis::survey::Survey;
use moe_foreign::{ForeignError, ImportOptions, Input, import};

use crate::context::Context;
use crate::progress::Progress;
use crate::traces;

/// Counts one input. `options` describe a trace of another tool.
pub fn read(path: &Path, options: &ImportOptions, ctx: &Context) -> anyhow::Result<Hotness> {
    read_with(path, options, None, &mut ExpertBytes::default(), ctx)
}

/// Like [`read`]. Also fills the survey, if there is one, and the expert sizes, if `bytes` is empty.
pub fn read_with(
    path: &Path,
    options: &ImportOptions,
    survey: Option<&mut Survey>,
    bytes: &mut ExpertBytes,
    ctx: &Context,
) -> anyhow::Result<Hotness> {
    let hotness = match traces::open(path, options)? {
        Input::Run(run) => {
            traces::print_warnings(&run, ctx)?;
            if let Some(map) = run.map.as_ref().filter(|_| bytes.is_empty()) {
                *bytes = ExpertBytes::from_map(map);
            }
            let _progress = Progress::of_run(ctx, &run);
            Hotness::from_run(&run, survey)?
        }
        Input::Tables(path) => {
            let _progress = Progress::reading(ctx, &path);
            Hotness::from_routing_table(&path, survey)?
        }
        Input::Foreign(trace) => {
            let mut counter = RowCounter::new(path, survey);
            let progress = Progress::reading(ctx, path);
            let summary = import(trace.importer, &trace.source, options, &mut counter)?;
            let hotness = counter.finish(&summary.model_info)?;
            drop(progress);
            traces::report_import(ctx, path, &summary);
            if bytes.is_empty() {
                *bytes = ExpertBytes::from_layers(summary.model_info.expert_bytes);
            }
            hotness
        }
    };
    let model = options.model.as_ref();
    if let Some(mismatch) = model.and_then(|model| hotness.mismatch(model)) {
        bail!(ForeignError::OtherModel {
            path: path.to_owned(),
            mismatch
        });
    }
    Ok(hotness)
}
