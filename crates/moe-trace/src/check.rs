//! Consistency checks of a run: of each record, of records and model, and of the run's files.

#[cfg(feature = "parquet")]
mod tables;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{File, TryLockError};
use std::ops::Bound;
use std::path::{Path, PathBuf};

use moe_files::text::counted;

use crate::buffers;
use crate::correlation::Correlation;
use crate::error::Error;
use crate::lines;
use crate::operations::{Operation, TokenExperts};
use crate::phase::Phase;
use crate::record::{
    FLAG_CONTINUATION, MAX_EXPERTS, NAME_SIZE, SOURCE_BUFFER, TensorAccessLog, lane,
};
use crate::run::Run;
use crate::transfers;

#[cfg(feature = "parquet")]
pub use tables::{mismatched_map, stale_tables};

/// A rule that records violate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleViolation {
    /// Field of the record, or several, separated by commas.
    pub field: &'static str,
    /// What is wrong, as the predicate of a sentence with the subject "records": `start before the preceding record`.
    pub message: &'static str,
    /// Number of records that violate the rule.
    pub n_records: u64,
    /// Index in the trace of the first of these records.
    pub first_record: u64,
}

impl fmt::Display for RuleViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "records {} (number of such records: {}; first: record {}; field: {})",
            self.message, self.n_records, self.first_record, self.field
        )
    }
}

/// Results of one pass over the records of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// The rules that records violate, ordered by the first such record.
    pub violations: Vec<RuleViolation>,
    /// Warnings about expert counts that would be misleading. They concern records without extension: warm-up passes, which use
    /// all experts, and prompts of which only the first token's experts were recorded.
    pub misleading_counts: Vec<String>,
    /// Number of records.
    pub n_records: u64,
    /// Number of records with an extension.
    pub n_extended: u64,
}

/// Checks all records of a run. Reads each record once, because a trace may be larger than memory.
pub fn report(run: &Run) -> CheckReport {
    let rules = Rules::of(run);
    let mut faults = Faults::default();
    let mut misleading_counts = MisleadingCounts::new(run);
    let (mut n_records, mut n_extended) = (0u64, 0u64);
    let mut last_timestamp = 0;
    for operation in run.trace.operations() {
        misleading_counts.add(&operation);
        for (index, record) in (operation.first_record()..).zip(operation.records()) {
            n_records += 1;
            n_extended += u64::from(record.has_extension());
            faults.record = index;
            if record.timestamp_ns.get() < last_timestamp {
                faults.add("timestamp_ns", "start before the preceding record");
            }
            last_timestamp = record.timestamp_ns.get();
            rules.check_record(record, &mut faults);
        }
        faults.record = operation.first_record();
        for token in operation.tokens() {
            rules.check_experts(&token, &mut faults);
            faults.record += token.records().len() as u64;
        }
    }
    keep_record_count(run, n_records);
    CheckReport {
        violations: faults.found,
        misleading_counts: misleading_counts.finish(),
        n_records,
        n_extended,
    }
}

/// The rules that records violate; see [`CheckReport::violations`].
pub fn check(run: &Run) -> Vec<RuleViolation> {
    report(run).violations
}

/// Stores the number of records, so that the trace is not read again for it.
fn keep_record_count(run: &Run, n_records: u64) {
    let n = usize::try_from(n_records).unwrap_or(usize::MAX);
    run.trace.keep_record_count(n);
}

#[derive(Default)]
struct Faults {
    found: Vec<RuleViolation>,
    /// Index of the record that is being checked.
    record: u64,
}

impl Faults {
    fn add(&mut self, field: &'static str, message: &'static str) {
        match self.found.iter_mut().find(|fault| fault.message == message) {
            Some(fault) => fault.n_records += 1,
            None => self.found.push(RuleViolation {
                field,
                message,
                n_records: 1,
                first_record: self.record,
            }),
        }
    }
}

/// Limits from the run's manifest and map. Without them, any value is accepted.
struct Rules<'a> {
    run: &'a Run,
    n_layer: u32,
    n_expert: u32,
    expert_operations: [Option<u8>; 2],
    tensors: Correlation<'a>,
}

impl<'a> Rules<'a> {
    fn of(run: &'a Run) -> Self {
        let model = run.manifest.as_ref().map(|manifest| &manifest.model);
        let known = |n: Option<u32>| n.filter(|&n| n > 0).unwrap_or(u32::MAX);
        Self {
            run,
            n_layer: known(model.map(|model| model.n_layer)),
            n_expert: known(model.map(|model| model.n_expert)),
            expert_operations: ["MUL_MAT_ID", "ADD_ID"].map(|name| run.ops().number(name)),
            tensors: run.map.as_ref().map(Correlation::new).unwrap_or_default(),
        }
    }

    fn check_record(&self, record: &TensorAccessLog, faults: &mut Faults) {
        if !record.counts_fit() {
            faults.add(
                "num_sources, num_experts",
                "have more sources or experts than a record can contain",
            );
        }
        if !record.is_version_known() {
            faults.add("ext_version", "have an unknown extension");
        }
        if record.phase().is_none() {
            faults.add("phase", "have an unknown phase");
        }
        if self.run.ops().name(record.operation_type).is_none() {
            faults.add(
                "operation_type",
                "have an operation that is not in the run's table of operations",
            );
        }
        if record
            .layer()
            .is_some_and(|layer| u32::from(layer.0) >= self.n_layer)
        {
            faults.add("layer_id", "name a layer that the model does not have");
        }
        let sources = record.sources();
        if record.dst_name_bytes().len() == NAME_SIZE
            || sources.iter().any(|s| s.name_bytes().len() == NAME_SIZE)
        {
            faults.add(
                "dst_name, sources.name",
                "have a name without a terminating NUL",
            );
        }
        if sources.iter().any(|s| s.memory_source > SOURCE_BUFFER) {
            faults.add("sources.memory_source", "have an unknown memory source");
        }
        if !(0..sources.len()).all(|i| self.tensors.is_consistent(record, i)) {
            faults.add(
                "sources.offset_or_buffer_id",
                "read bytes outside the named tensor",
            );
        }
    }

    fn check_experts(&self, token: &TokenExperts<'_>, faults: &mut Faults) {
        let head = token.head();
        if token.records().iter().any(|record| !record.counts_fit()) {
            return;
        }
        if head.num_experts == 0 {
            if self.expert_operations.contains(&Some(head.operation_type)) {
                faults.add("num_experts", "are expert operations without experts");
            }
            return;
        }
        let ids = || token.records().iter().flat_map(|r| r.expert_ids());
        if ids().any(|id| id.get() < 0) {
            faults.add("expert_ids", "name an expert below 0");
        }
        if ids().any(|id| i64::from(id.get()) >= i64::from(self.n_expert)) {
            faults.add("expert_ids", "name an expert that the model does not have");
        }
        let mut distinct: Vec<i32> = ids().map(|id| id.get()).filter(|&id| id >= 0).collect();
        let n = distinct.len();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() < n && !head.reads_chunk_experts() {
            faults.add("expert_ids", "name an expert twice for one token");
        }
        if !head.has_extension() {
            return;
        }
        if head.has_flag(FLAG_CONTINUATION) {
            faults.add("flags", "are continuation records without a first record");
        }
        let mut slot_base = head.expert_slot_base;
        for record in token.records() {
            let n = record.expert_ids().len();
            if record.expert_weights[..n]
                .iter()
                .any(|w| !w.get().is_finite())
            {
                faults.add("expert_weights", "have a weight that is not a number");
            }
            if record.expert_lane[..n]
                .iter()
                .any(|&lane| usize::from(lane) >= lane::NAMES.len())
            {
                faults.add("expert_lane", "have an unknown lane");
            }
            if slot_base != record.expert_slot_base || head.expert_slot_base != 0 {
                faults.add(
                    "expert_slot_base",
                    "do not continue the slots of the token's preceding record",
                );
            }
            slot_base = slot_base.wrapping_add(record.num_experts);
        }
    }
}

/// Collects [`CheckReport::misleading_counts`] from operations in the order of the trace.
struct MisleadingCounts {
    mul_mat_id: Option<u8>,
    /// Experts selected for a token (`n_expert_used`), if the manifest contains it.
    n_expert_used: Option<u32>,
    /// Number of expert operations.
    n: u64,
    /// Number of them with as many experts as a record can contain.
    n_full: u64,
    /// Minimum number of expert ids of a generated token.
    ids_of_a_token: u64,
    /// Operations of a prompt with one record that has fewer distinct experts than expert ids.
    n_prompt: u64,
    /// Full operations of a prompt with one record, by number of ids. The number of ids of a token is known only at the end.
    full_prompts: BTreeMap<u64, u64>,
}

impl MisleadingCounts {
    fn new(run: &Run) -> Self {
        let manifest = run.manifest.as_ref();
        Self {
            mul_mat_id: run.ops().number("MUL_MAT_ID"),
            n_expert_used: manifest
                .map(|manifest| manifest.model.n_expert_used)
                .filter(|&n| n > 0),
            n: 0,
            n_full: 0,
            ids_of_a_token: u64::MAX,
            n_prompt: 0,
            full_prompts: BTreeMap::new(),
        }
    }

    fn add(&mut self, operation: &Operation<'_>) {
        let head = operation.head();
        if Some(head.operation_type) != self.mul_mat_id
            || head.has_extension()
            || head.num_experts == 0
            || head.reads_chunk_experts()
        {
            return;
        }
        let n_ids = head.source_size(2) / 4;
        let is_full = usize::from(head.num_experts) >= MAX_EXPERTS;
        self.n += 1;
        self.n_full += u64::from(is_full);
        if head.phase() == Some(Phase::Generate) && n_ids > 0 {
            self.ids_of_a_token = self.ids_of_a_token.min(n_ids);
        }
        if head.phase() == Some(Phase::Prompt) && operation.records().len() == 1 {
            if is_full {
                *self.full_prompts.entry(n_ids).or_default() += 1;
            } else {
                self.n_prompt += u64::from(n_ids > u64::from(head.num_experts));
            }
        }
    }

    fn finish(self) -> Vec<String> {
        let (n, ids_of_a_token) = (self.n, self.ids_of_a_token);
        let mut misleading_counts = Vec::new();
        let too_many = self.n_expert_used.map_or(
            ids_of_a_token != u64::MAX && ids_of_a_token > MAX_EXPERTS as u64,
            |used| (used as usize) < MAX_EXPERTS,
        );
        if n > 0 && self.n_full == n && too_many {
            misleading_counts.push(format!(
                "all {n} expert operations name 16 experts, more than the router selects for a token: this looks like a warm-up graph, which uses every expert, not like routing"
            ));
        }
        let above = (Bound::Excluded(ids_of_a_token), Bound::Unbounded);
        let n_prompt = self.n_prompt + self.full_prompts.range(above).map(|(_, n)| n).sum::<u64>();
        if n_prompt > 0 {
            misleading_counts.push(format!(
                "prompt tokens are undercounted: {} of prompts contain only the experts of the first token of the batch",
                counted(n_prompt, "expert operation")
            ));
        }
        misleading_counts
    }
}

/// The state of a run whose recorder still runs; see [`unfinished_state`].
pub const STILL_RECORDED: &str = "still being recorded";

/// Why the manifest of a run contains no number of records, in words that follow "the run is": `still being recorded`, or `incomplete`
/// with the reason.
pub fn unfinished_state(run: &Run) -> &'static str {
    match is_locked(&run.path) {
        Some(true) => STILL_RECORDED,
        Some(false) => "incomplete: its recorder was killed, or the disk was full",
        None => "still being recorded, or its recorder was killed, or the disk was full",
    }
}

/// Whether a recorder is writing the directory; `None` if the file system cannot report it.
fn is_locked(dir: &Path) -> Option<bool> {
    let file = File::open(dir).ok()?;
    match file.try_lock_shared() {
        Ok(()) => Some(false),
        Err(TryLockError::WouldBlock) => Some(true),
        Err(TryLockError::Error(_)) => None,
    }
}

/// Warnings about `buffers.jsonl` and `transfers.jsonl` that cannot be read, or whose last line is incomplete.
pub fn truncated_files(run: &Run) -> Vec<String> {
    if run.manifest.is_none() {
        return Vec::new();
    }
    let paths = [buffers::FILE_NAME, transfers::FILE_NAME].map(|name| run.path.join(name));
    let warning = |path: &PathBuf| {
        let warning = lines::truncation(path);
        warning.unwrap_or_else(|error| Some(error.to_string()))
    };
    paths.iter().filter_map(warning).collect()
}

impl Run {
    /// Warnings about the run: whether it is incomplete, and whether expert counts of its records would be misleading.
    /// `stale_tables` lists tables in its directory that belong to another run.
    ///
    /// # Errors
    /// The map belongs to another model; a record has more sources or experts than it can contain, or an unknown extension.
    pub fn warnings(&self) -> Result<Vec<String>, Error> {
        #[cfg(feature = "parquet")]
        if let Some(error) = mismatched_map(self)? {
            return Err(error);
        }
        // One pass for all checks, because a trace may be larger than memory.
        let mut misleading_counts = MisleadingCounts::new(self);
        let mut n_records = 0u64;
        for operation in self.trace.operations() {
            for log in operation.records() {
                log.check_readable()
                    .map_err(|fault| Error::record(self.trace.path(), n_records, fault))?;
                n_records += 1;
            }
            misleading_counts.add(&operation);
        }
        keep_record_count(self, n_records);
        let trace = self.trace.path().display();
        let mut warnings = Vec::new();
        let cut = self.trace.truncated_bytes();
        if cut > 0 {
            warnings.push(format!(
                "{trace}: the last record is truncated to {}; the {n_records} complete records before it are used",
                counted(cut, "byte")
            ));
        }
        match self.manifest.as_ref().map(|manifest| manifest.records) {
            Some(Some(promised)) if promised != n_records => warnings.push(format!(
                "manifest.json states {}, but {trace} contains {n_records}; these are used",
                counted(promised, "record")
            )),
            Some(None) => warnings.push(format!(
                "{trace} is {}; the {} in it are used",
                unfinished_state(self),
                counted(n_records, "record")
            )),
            _ => {}
        }
        warnings.extend(self.trace.rest_note().map(str::to_owned));
        warnings.extend(truncated_files(self));
        warnings.extend(misleading_counts.finish());
        Ok(warnings)
    }
}
