//! `info` of a run directory or a trace.bin.

use std::path::Path;

use moe_files::text::counted;
use moe_trace::check::{
    CheckReport, STILL_RECORDED, mismatched_map, report, stale_tables, truncated_files,
    unfinished_state,
};
use moe_trace::dynamic_cache::DynamicCache;
use moe_trace::hot_cache::HotCache;
use moe_trace::manifest::{self, Tokens};
use moe_trace::{Manifest, ModelInfo, Run};

use super::Findings;
use crate::advice;
use crate::context::Context;
use crate::progress::Progress;
use crate::recording;

pub fn describe(path: &Path, findings: &mut Findings, ctx: &Context) -> anyhow::Result<()> {
    describe_run(&Run::open(path)?, findings, ctx)
}

/// Describes an open run, without reading compressed records again.
pub fn describe_run(run: &Run, findings: &mut Findings, ctx: &Context) -> anyhow::Result<()> {
    let path = run.path.as_path();
    let _progress = Progress::of_run(ctx, run);
    let is_directory = path.is_dir();
    findings.fact(
        "kind",
        if is_directory {
            "run directory"
        } else {
            "trace without a run directory"
        },
    );
    findings.fact("run id", run.id());
    match &run.manifest {
        Some(manifest) => {
            describe_manifest(manifest, findings);
            let missing = Manifest::missing_keys(&path.join(manifest::FILE_NAME))?;
            if !missing.is_empty() {
                findings.fault(format!(
                    "manifest.json lacks {} that the schema requires: {}",
                    counted(missing.len(), "key"),
                    missing.join(", ")
                ));
            }
        }
        None if is_directory => findings
            .fault("manifest.json is missing: the model and the operations' names are unknown"),
        None => {}
    }
    if is_directory && run.map.is_none() {
        findings.fault("gguf-map.parquet is missing: byte ranges of experts are unknown; write the file with `moe-analyze gguf-map`");
    }

    let report = report(run);
    let n_records = report.n_records;
    findings.fact("records", n_records);
    findings.fact("record format", record_format(&report));
    findings.size("trace size", run.trace.size_bytes());
    let cut = run.trace.truncated_bytes();
    if cut > 0 {
        findings.fault(format!(
            "trace.bin is truncated: {} of an incomplete record at the end are ignored",
            counted(cut, "byte")
        ));
    }
    let zeros = run
        .trace
        .size_bytes()
        .saturating_sub(cut + n_records * 1024);
    if zeros > 0 {
        findings.size("after last record", zeros);
    }
    match run.manifest.as_ref().map(|manifest| manifest.records) {
        Some(Some(promised)) if promised != n_records => findings.fault(format!(
            "manifest.json declares {} but trace.bin contains {n_records}; the others are lost",
            counted(promised, "record")
        )),
        Some(None) => {
            let state = unfinished_state(run);
            findings.fact("state", state);
            let is_stopped = run.manifest.as_ref().is_some_and(|m| m.stopped.is_some());
            if n_records == 0 && !is_stopped && state != STILL_RECORDED {
                findings.fault("trace.bin contains no records: the run ended before its first pass was recorded; record it again");
            }
        }
        _ => {}
    }
    if let Some(note) = run.trace.rest_note() {
        findings.fault(note);
    }
    if let Some(error) = mismatched_map(run)? {
        findings.fault(advice::with_advice(&error));
    }
    for fault in &report.violations {
        findings.fault(fault.to_string());
    }
    for fault in truncated_files(run) {
        findings.fault(fault);
    }
    for warning in report.misleading_counts {
        findings.note(warning);
    }
    for error in stale_tables(run) {
        findings.note(advice::with_advice(&error));
    }
    Ok(())
}

/// Describes the layout that the records declare.
fn record_format(report: &CheckReport) -> &'static str {
    match report.n_extended {
        0 if report.n_records == 0 => "no records",
        0 => "plain v4: no durations, sequences, router weights or lanes",
        n if n == report.n_records => "v4 with extension 1",
        _ => "v4, some records with extension 1",
    }
}

fn describe_hot_cache(hot_cache: &HotCache, findings: &mut Findings) {
    let lanes = hot_cache.lanes.iter();
    let experts = lanes.clone().flat_map(|lane| lane.experts.values());
    findings.fact("hot cache source", hot_cache.source.clone());
    findings.fact("hot cache lanes", hot_cache.lanes.len() as u64);
    findings.fact(
        "hot cache experts",
        experts.map(|experts| experts.len() as u64).sum::<u64>(),
    );
    let bytes = lanes.map(|lane| lane.bytes);
    findings.size("hot cache size", bytes.fold(0, u64::saturating_add));
    let requests = hot_cache.requests.iter();
    let sum = |slots: u64, more: u64| slots.saturating_add(more);
    let hot = requests.clone().map(|request| request.hot_slots);
    let hot = hot.fold(0, sum);
    let slots = requests.map(|request| request.cold_slots).fold(hot, sum);
    if slots > 0 {
        let hit_rate = 100.0 * hot as f64 / slots as f64;
        findings.fact(
            "hot cache hit rate",
            format!("{hit_rate:.1} % (counters in perf.json)"),
        );
    }
}

fn describe_dynamic_cache(cache: &DynamicCache, findings: &mut Findings) {
    findings.fact("dynamic cache policy", cache.policy.clone());
    if let Some(predictor) = &cache.predictor {
        findings.fact("dynamic cache predictor", predictor.clone());
    }
    findings.fact("dynamic cache device", cache.device.clone());
    findings.fact("dynamic cache slots", cache.n_slots);
    findings.size("dynamic cache size", cache.bytes);
    let Some(counts) = &cache.counts else {
        return;
    };
    let sum = |[prompt, generate]: [u64; 2]| prompt.saturating_add(generate);
    let (look_ups, hits) = (sum(counts.look_ups), sum(counts.hits));
    if look_ups > 0 {
        let hit_rate = 100.0 * hits as f64 / look_ups as f64;
        findings.fact(
            "dynamic cache hit rate",
            format!("{hit_rate:.1} % of lookups"),
        );
    }
    if let Some(prefetch) = &counts.prefetch {
        findings.fact(
            "prefetched experts",
            format!(
                "{} timely, {} late, {} wasted",
                prefetch.timely, prefetch.late, prefetch.wasted
            ),
        );
    }
}

fn describe_manifest(manifest: &Manifest, findings: &mut Findings) {
    let model = &manifest.model;
    findings.fact(
        "engine",
        format!("{} {}", manifest.engine.name, manifest.engine.version),
    );
    findings.fact("model", model.path.clone());
    for adapter in &manifest.adapters {
        let scaled = format!("{} (scale {})", adapter.path, adapter.scale);
        findings.fact("adapter", scaled);
    }
    findings.fact("architecture", model.arch.clone());
    findings.fact("layers", model.n_layer);
    if model.n_nextn_layer > 0 {
        findings.fact("nextn layers", model.n_nextn_layer);
    }
    findings.fact("experts per layer", model.n_expert);
    findings.fact("experts per token", model.n_expert_used);
    if let Some(reason) = ModelInfo::from_manifest(model).invalid() {
        findings.fault(format!("manifest.json: {reason}"));
    }
    findings.fact("policy", manifest.policy.clone());
    if let Some(cache) = &manifest.kv_cache {
        findings.fact(
            "KV cache",
            format!("keys {}, values {}", cache.type_k, cache.type_v),
        );
        if let Some(bytes) = cache.size_bytes {
            findings.size("KV cache size", bytes);
        }
        if let Some(bytes) = cache.state_bytes {
            findings.size("recurrent states", bytes);
        }
    }
    if let Some(hot_cache) = &manifest.hot_cache {
        describe_hot_cache(hot_cache, findings);
    }
    if let Some(cache) = &manifest.dynamic_cache {
        describe_dynamic_cache(cache, findings);
    }
    findings.fact("started", manifest.started.clone());
    // Counts are written at the end. After a kill or on a full disk they are zero.
    if manifest.tokens != Tokens::default() {
        findings.fact("prompt tokens", manifest.tokens.prompt);
        findings.fact("generated tokens", manifest.tokens.generated);
        findings.fact("sequences", manifest.tokens.sequences);
    }
    if let Some(expansion) = manifest.expansion {
        findings.fact("expansion", recording::describe(expansion));
    }
    if let Some(reason) = &manifest.stopped {
        findings.fact("stopped", reason.clone());
    }
}
