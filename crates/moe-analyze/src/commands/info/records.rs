//! Whether the records of a trace make sense, each by itself and against the run's model.

use std::collections::HashMap;

use moe_trace::record::{MAX_EXPERTS, MAX_SOURCES, NO_TENSOR, PHASE_GENERATE, SOURCE_BUFFER};
use moe_trace::{Run, TensorAccessLog};

use super::Findings;

/// A rule that records can break.
struct Rule {
    says: &'static str,
    n_broken: u64,
    first: u64,
}

/// Reads every record and adds a fault for each rule that some record breaks.
pub fn check(run: &Run, findings: &mut Findings) {
    let bounds = Bounds::of(run);
    let mut rules: Vec<Rule> = Vec::new();
    let mut last_timestamp = 0;
    for (index, record) in (0u64..).zip(run.trace.records()) {
        let mut broken = |says| match rules.iter_mut().find(|rule| rule.says == says) {
            Some(rule) => rule.n_broken += 1,
            None => rules.push(Rule {
                says,
                n_broken: 1,
                first: index,
            }),
        };
        if record.timestamp_ns.get() < last_timestamp {
            broken("begin before the record in front of them");
        }
        last_timestamp = record.timestamp_ns.get();
        if usize::from(record.num_sources) > MAX_SOURCES
            || usize::from(record.num_experts) > MAX_EXPERTS
        {
            broken("count more sources or experts than a record holds");
        }
        if record.phase > PHASE_GENERATE {
            broken("are of a phase that does not exist");
        }
        if run.ops().name(record.operation_type).is_none() {
            broken("are of an operation that the run does not name");
        }
        if record
            .layer()
            .is_some_and(|layer| u32::from(layer) >= bounds.n_layer)
        {
            broken("are of a layer that the model does not have");
        }
        if record
            .expert_ids()
            .iter()
            .any(|id| i64::from(id.get()) >= i64::from(bounds.n_expert))
        {
            broken("name an expert that the model does not have");
        }
        if !bounds.hold_sources(record) {
            broken("read bytes that are not the named tensor's");
        }
    }
    for Rule {
        says,
        n_broken,
        first,
    } in rules
    {
        findings.fault(format!(
            "{n_broken} records {says} (the first is record {first})"
        ));
    }
}

/// What the run says of its model; without a manifest or a map everything is possible.
struct Bounds {
    n_layer: u32,
    n_expert: u32,
    /// tensor index → (file, first byte, one past the last byte)
    tensors: Option<HashMap<u32, (u16, u64, u64)>>,
}

impl Bounds {
    fn of(run: &Run) -> Bounds {
        let model = run.manifest.as_ref().map(|manifest| &manifest.model);
        let known = |n: Option<u32>| n.filter(|&n| n > 0).unwrap_or(u32::MAX);
        let tensors = run.map.as_ref().map(|map| {
            let mut tensors = HashMap::new();
            for row in &map.rows {
                let end = row.file_offset.saturating_add(row.size_bytes);
                let range =
                    tensors
                        .entry(row.tensor_idx)
                        .or_insert((row.file, row.file_offset, end));
                range.1 = range.1.min(row.file_offset);
                range.2 = range.2.max(end);
            }
            tensors
        });
        Bounds {
            n_layer: known(model.map(|model| model.n_layer)),
            n_expert: known(model.map(|model| model.n_expert)),
            tensors,
        }
    }

    /// Whether every range that the record reads from the model's files lies inside its tensor.
    fn hold_sources(&self, record: &TensorAccessLog) -> bool {
        let Some(tensors) = &self.tensors else {
            return true;
        };
        (0..).zip(record.sources()).all(|(i, source)| {
            if source.memory_source == SOURCE_BUFFER || source.tensor_idx.get() == NO_TENSOR {
                return true;
            }
            let Some(&(file, begin, end)) = tensors.get(&source.tensor_idx.get()) else {
                return false;
            };
            let offset = source.offset_or_buffer_id.get();
            let source_end = offset.saturating_add(record.source_size(i));
            let source_file = if record.has_extension() {
                record.source_file[i].get()
            } else {
                0
            };
            source_file == file && begin <= offset && source_end <= end
        })
    }
}
