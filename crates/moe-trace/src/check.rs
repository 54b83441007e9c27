//! Whether a run makes sense: its records each by itself and against the model, and its files among each other.

use std::fmt;

use moe_gguf::text::counted;

use crate::correlation::Correlation;
use crate::error::Error;
use crate::map_table;
use crate::operations::TokenExperts;
use crate::parquet_file::metadata_value;
use crate::record::{
    FLAG_CONTINUATION, MAX_EXPERTS, NAME_SIZE, PHASE_GENERATE, PHASE_PROMPT, SOURCE_BUFFER,
    TensorAccessLog, lane,
};
use crate::run::Run;
use crate::tables::{RUN_ID_KEY, TABLES};

/// A rule that records break.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Field of the record.
    pub field: &'static str,
    /// What is wrong with it.
    pub says: &'static str,
    /// Records that break the rule.
    pub n_records: u64,
    /// The first of them.
    pub first_record: u64,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "records {}: {} ({}; the first is record {})",
            self.says, self.n_records, self.field, self.first_record
        )
    }
}

/// Reads every record; gives the rules that some record breaks, in the order of the first such record.
pub fn check(run: &Run) -> Vec<Fault> {
    let rules = Rules::of(run);
    let mut faults = Faults::default();
    let mut last_timestamp = 0;
    for operation in run.trace.operations() {
        for (index, record) in (operation.first_record()..).zip(operation.records()) {
            faults.record = index;
            if record.timestamp_ns.get() < last_timestamp {
                faults.add("timestamp_ns", "begin before the record in front of them");
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
    faults.found
}

#[derive(Default)]
struct Faults {
    found: Vec<Fault>,
    /// The record being looked at.
    record: u64,
}

impl Faults {
    fn add(&mut self, field: &'static str, says: &'static str) {
        match self.found.iter_mut().find(|fault| fault.says == says) {
            Some(fault) => fault.n_records += 1,
            None => self.found.push(Fault {
                field,
                says,
                n_records: 1,
                first_record: self.record,
            }),
        }
    }
}

/// What the run says of its model; without a manifest or a map everything is possible.
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
                "count more sources or experts than a record holds",
            );
        }
        if !record.is_version_known() {
            faults.add("ext_version", "have an extension that is not known");
        }
        if record.phase > PHASE_GENERATE {
            faults.add("phase", "are of a phase that does not exist");
        }
        if self.run.ops().name(record.operation_type).is_none() {
            faults.add(
                "operation_type",
                "are of an operation that the run does not name",
            );
        }
        if record
            .layer()
            .is_some_and(|layer| u32::from(layer) >= self.n_layer)
        {
            faults.add("layer_id", "are of a layer that the model does not have");
        }
        let sources = record.sources();
        if record.dst_name_bytes().len() == NAME_SIZE
            || sources.iter().any(|s| s.name_bytes().len() == NAME_SIZE)
        {
            faults.add("dst_name, sources.name", "have a name without its NUL");
        }
        if sources.iter().any(|s| s.memory_source > SOURCE_BUFFER) {
            faults.add(
                "sources.memory_source",
                "read from a memory source that does not exist",
            );
        }
        if !(0..sources.len()).all(|i| self.tensors.holds(record, i)) {
            faults.add(
                "sources.offset_or_buffer_id",
                "read bytes that are not the named tensor's",
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
                faults.add("num_experts", "are of an expert operation without experts");
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
        if distinct.len() < n {
            faults.add("expert_ids", "name an expert of the token twice");
        }
        if !head.has_extension() {
            return;
        }
        if head.has_flag(FLAG_CONTINUATION) {
            faults.add("flags", "go on with a token that no record begins");
        }
        let mut slot_base = head.expert_slot_base;
        for record in token.records() {
            let n = record.expert_ids().len();
            if record.expert_weights[..n]
                .iter()
                .any(|w| !w.get().is_finite())
            {
                faults.add("expert_weights", "have a weight that is no number");
            }
            if record.expert_lane[..n]
                .iter()
                .any(|&lane| usize::from(lane) >= lane::NAMES.len())
            {
                faults.add("expert_lane", "name a lane that does not exist");
            }
            if slot_base != record.expert_slot_base || head.expert_slot_base != 0 {
                faults.add(
                    "expert_slot_base",
                    "count slots from elsewhere than the token's experts so far",
                );
            }
            slot_base = slot_base.wrapping_add(record.num_experts);
        }
    }
}

/// Why the map of the run is another model's; `None` if nothing says so.
pub fn foreign_map(run: &Run) -> Result<Option<Error>, Error> {
    let (Some(manifest), Some(_)) = (&run.manifest, &run.map) else {
        return Ok(None);
    };
    let path = run.path.join(map_table::FILE_NAME);
    let identity = map_table::identity(&path)?;
    let header = identity.model.as_ref().map(|model| &model.header_xxh3);
    let own_header = &manifest.model.header_xxh3;
    let sizes = |files: &[crate::manifest::ModelFile]| -> Vec<u64> {
        files.iter().map(|file| file.size_bytes).collect()
    };
    let own_files = &manifest.model.files;
    let is_foreign = match header {
        Some(header) if !header.is_empty() && !own_header.is_empty() => header != own_header,
        _ => {
            !identity.files.is_empty()
                && !own_files.is_empty()
                && sizes(&identity.files) != sizes(own_files)
        }
    };
    let reason = "it is the map of another model than the run's; write the right one with `moe-analyze gguf-map`";
    Ok(is_foreign.then(|| Error::Parquet {
        path,
        reason: reason.to_owned(),
    }))
}

/// Patterns of plain v4 records whose counts mislead: warm-up graphs, and prompts with their first token alone.
pub fn v4_traps(run: &Run) -> Vec<String> {
    let mul_mat_id = run.ops().number("MUL_MAT_ID");
    let n_expert_used = run
        .manifest
        .as_ref()
        .map(|manifest| manifest.model.n_expert_used)
        .filter(|&n| n > 0);
    let operations = || {
        run.trace
            .operations()
            .filter(|op| Some(op.head().operation_type) == mul_mat_id)
            .filter(|op| !op.head().has_extension() && op.head().num_experts > 0)
    };
    let n_ids = |record: &TensorAccessLog| record.source_size(2) / 4;
    let full = |record: &TensorAccessLog| usize::from(record.num_experts) >= MAX_EXPERTS;
    let (mut n, mut n_full, mut ids_of_a_token) = (0u64, 0u64, u64::MAX);
    for operation in operations() {
        let head = operation.head();
        n += 1;
        n_full += u64::from(full(head));
        if head.phase == PHASE_GENERATE && n_ids(head) > 0 {
            ids_of_a_token = ids_of_a_token.min(n_ids(head));
        }
    }
    let mut traps = Vec::new();
    let too_many = n_expert_used.map_or(
        ids_of_a_token != u64::MAX && ids_of_a_token > MAX_EXPERTS as u64,
        |used| (used as usize) < MAX_EXPERTS,
    );
    if n > 0 && n_full == n && too_many {
        traps.push(format!(
            "all expert operations ({n}) name 16 experts, more than a token is routed to: this looks like a warm-up graph, which goes to every expert, not like routing"
        ));
    }
    let n_prompt = operations()
        .filter(|operation| {
            let head = operation.head();
            let of_a_token = if full(head) {
                ids_of_a_token
            } else {
                head.num_experts.into()
            };
            head.phase == PHASE_PROMPT && operation.records().len() == 1 && n_ids(head) > of_a_token
        })
        .count();
    if n_prompt > 0 {
        traps.push(format!(
            "prompt tokens are counted too low: {} of prompts with the experts of their batch's first token alone",
            counted(n_prompt, "expert operation")
        ));
    }
    traps
}

/// Tables in the run's directory that are of another run, such as the one that this run replaced.
pub fn stale_tables(run: &Run) -> Vec<String> {
    let id = run.id();
    let directories = [run.path.clone(), run.path.join("tables")];
    let files = directories
        .iter()
        .flat_map(|dir| TABLES.map(|table| dir.join(format!("{table}.parquet"))));
    files
        .filter(|file| file.is_file())
        .filter_map(|file| {
            let other = metadata_value(&file, RUN_ID_KEY).ok()??;
            (other != id).then(|| {
                format!(
                    "{} is of run {other}, not of this one; write it again with `moe-analyze parquet`",
                    file.display()
                )
            })
        })
        .collect()
}

impl Run {
    /// What to know before counting on the run: that it is not whole, and patterns of its records that mislead.
    ///
    /// Errors: the map is another model's; a record counts more sources or experts than it holds, or has an extension
    /// that is not known.
    pub fn remarks(&self) -> Result<Vec<String>, Error> {
        if let Some(error) = foreign_map(self)? {
            return Err(error);
        }
        for (record, log) in (0..).zip(self.trace.records()) {
            log.check_readable()
                .map_err(|reason| Error::record(self.trace.path(), record, reason))?;
        }
        let trace = self.trace.path().display();
        let n_records = self.trace.records().len() as u64;
        let mut remarks = Vec::new();
        let cut = self.trace.cut_bytes();
        if cut > 0 {
            remarks.push(format!(
                "{trace} ends in a cut record of {}; the whole ones before it, {n_records}, are used",
                counted(cut, "byte")
            ));
        }
        match self.manifest.as_ref().map(|manifest| manifest.records) {
            Some(Some(promised)) if promised != n_records => remarks.push(format!(
                "manifest.json promises {}, {trace} holds {n_records}; these are used",
                counted(promised, "record")
            )),
            Some(None) => remarks.push(format!(
                "{trace} is still being recorded, or its recorder was killed; what it holds, {}, is used",
                counted(n_records, "record")
            )),
            _ => {}
        }
        remarks.extend(v4_traps(self));
        remarks.extend(stale_tables(self));
        Ok(remarks)
    }
}
