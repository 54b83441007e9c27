//! The tables `records` and `routing` of a trace of every operation.

use std::collections::HashMap;

use moe_gguf::map::{Category, OffsetMap};
use moe_trace::correlation::Correlation;
use moe_trace::names::base_name;
use moe_trace::passes::PassStarts;
use moe_trace::record::FLAG_CPU_FALLBACK;
use moe_trace::{
    ExpertId, ExpertRanges, ExpertTensor, Operation, Run, TablePass, TensorAccessLog, TokenExperts,
};

use crate::document::{index, layer_or_none, renumber};
use crate::model::ModelTable;
use crate::routing::{Routing, Selected};
use crate::table::Column;
use crate::tokens::{TokenList, TokenPlace};

/// Maximum number of distinct names of results. A damaged trace could contain a new name in each record.
const MAX_NAMES: usize = 1 << 16;

/// Columns of `records`, and the names that they refer to.
#[derive(Debug, Default)]
pub(crate) struct Records {
    pub token: Vec<i32>,
    pub layer: Vec<i32>,
    pub op: Vec<i32>,
    pub name: Vec<i32>,
    pub tensor: Vec<i32>,
    pub start: Vec<i64>,
    pub duration: Vec<i32>,
    pub bytes: Vec<f64>,
    pub route: Vec<i32>,
    /// Empty if unknown.
    pub thread: Vec<i32>,
    /// Empty if unknown.
    pub fallback: Vec<i32>,
    pub ops: Vec<String>,
    pub names: Vec<String>,
}

impl Records {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.token.len()
    }

    /// Makes all times relative to `first`.
    pub fn rebase(&mut self, first: i64) {
        for start in &mut self.start {
            *start = start.saturating_sub(first).max(0);
        }
    }

    /// Replaces the numbers of rows of `routing`.
    pub fn renumber_routes(&mut self, places: &[i32]) {
        renumber(&mut self.route, places);
    }

    /// Replaces the numbers of tokens.
    pub fn renumber_tokens(&mut self, places: &[i32]) {
        renumber(&mut self.token, places);
    }

    /// Sorts the rows by start; equal rows keep their order. Returns whether the order changed.
    pub fn sort(&mut self) -> bool {
        if self.start.is_sorted() {
            return false;
        }
        let mut order: Vec<usize> = (0..self.len()).collect();
        order.sort_by_key(|&row| self.start.get(row).copied());
        let integers = [
            &mut self.token,
            &mut self.layer,
            &mut self.op,
            &mut self.name,
            &mut self.tensor,
            &mut self.duration,
            &mut self.route,
            &mut self.thread,
            &mut self.fallback,
        ];
        for column in integers {
            if !column.is_empty() {
                *column = order.iter().map(|&row| column[row]).collect();
            }
        }
        self.start = order.iter().map(|&row| self.start[row]).collect();
        self.bytes = order.iter().map(|&row| self.bytes[row]).collect();
        true
    }

    /// The columns of the first `n_rows` rows.
    pub fn columns(&self, n_rows: usize) -> Vec<Column> {
        let n = n_rows.min(self.len());
        let mut columns = vec![
            Column::dictionary("token", self.token[..n].to_vec()),
            Column::dictionary("layer", self.layer[..n].to_vec()),
            Column::dictionary("op", self.op[..n].to_vec()),
            Column::dictionary("name", self.name[..n].to_vec()),
            Column::dictionary("tensor", self.tensor[..n].to_vec()),
            Column::times("start", self.start[..n].to_vec()),
            Column::delta("duration", self.duration[..n].to_vec()),
            Column::numbers("bytes", self.bytes[..n].to_vec()),
            Column::delta("route", self.route[..n].to_vec()),
        ];
        for (name, values) in [("thread", &self.thread), ("fallback", &self.fallback)] {
            if !values.is_empty() {
                columns.push(Column::dictionary(name, values[..n].to_vec()));
            }
        }
        columns
    }

    /// Rows of a trace without operations: one for each row of `routing`. `bytes` returns the size of an expert of a layer.
    pub fn of_routing(routing: &Routing, bytes: impl Fn(i32, i32) -> Option<f64>) -> Records {
        let n = routing.len();
        let row_bytes = |row: usize| {
            let layer = routing.layers()[row];
            let experts = routing.row(row).iter();
            let bytes: Option<f64> = experts.map(|e| bytes(layer, e.expert)).sum();
            bytes.unwrap_or(-1.0)
        };
        Records {
            token: routing.tokens().to_vec(),
            layer: routing.layers().to_vec(),
            op: vec![0; n],
            name: vec![0; n],
            tensor: vec![-1; n],
            start: routing.starts().to_vec(),
            duration: vec![-1; n],
            bytes: (0..n).map(row_bytes).collect(),
            route: (0..index(n)).collect(),
            thread: Vec::new(),
            fallback: Vec::new(),
            ops: vec!["ROUTING".to_owned()],
            names: vec!["routing".to_owned()],
        }
    }
}

/// What was read of a trace of every operation. Times are absolute.
#[derive(Debug, Default)]
pub(crate) struct Recorded {
    pub records: Records,
    pub routing: Routing,
    pub tokens: TokenList,
    /// Whether the trace has more records than were read.
    pub is_truncated: bool,
}

/// Reads the first `max_records` records of a run.
pub(crate) fn read(
    run: &Run,
    map: Option<&OffsetMap>,
    model: &ModelTable,
    max_records: usize,
) -> Recorded {
    let files = Files::new(map);
    let mut reader = Reader::new(run, model, &files);
    // The operations that count as routing are the same as for hotness.
    let mut routing_operations = run.routing();
    let mut next_routing = routing_operations.next();
    for operation in run.trace.operations() {
        let n_records = reader.recorded.records.len();
        if n_records > 0 && n_records + operation.records().len() > max_records {
            reader.recorded.is_truncated = true;
            break;
        }
        let first = operation.first_record();
        let is_routing = next_routing.is_some_and(|next| next.first_record() == first);
        if is_routing {
            next_routing = routing_operations.next();
        }
        reader.add(&operation, is_routing);
    }
    let mut recorded = reader.recorded;
    if !reader.has_extension {
        recorded.records.fallback.clear();
    }
    recorded
}

/// Finds the bytes of the model's files that operations read.
struct Files<'a> {
    correlation: Correlation<'a>,
    ranges: ExpertRanges<'a>,
}

/// Sources of an operation in files of the model.
#[derive(Default)]
struct Sources<'a> {
    /// Index in the tensor table of the first tensor.
    tensor_idx: Option<u32>,
    /// Bytes of tensors that are read independently of the experts.
    shared_bytes: u64,
    /// Tensors whose bytes belong to experts.
    experts: Vec<&'a ExpertTensor<'a>>,
    /// Whether the sizes of the experts are unknown.
    is_unknown: bool,
}

impl<'a> Files<'a> {
    fn new(map: Option<&'a OffsetMap>) -> Files<'a> {
        Files {
            correlation: map.map(Correlation::new).unwrap_or_default(),
            ranges: map.map(ExpertRanges::new).unwrap_or_default(),
        }
    }

    fn sources(&self, head: &TensorAccessLog) -> Sources<'_> {
        let mut found = Sources::default();
        for (i, source) in head.sources().iter().enumerate() {
            if !source.is_disk() {
                continue;
            }
            let tensor_idx = self.correlation.resolve(head, i);
            found.tensor_idx = found.tensor_idx.or(tensor_idx);
            let has_experts = head.num_experts > 0;
            let experts = tensor_idx.filter(|_| has_experts);
            match experts.and_then(|index| self.ranges.get(index)) {
                Some(tensor) => found.experts.push(tensor),
                None => {
                    found.is_unknown |=
                        has_experts && Category::of(base_name(&source.name())) == Category::Expert;
                    let bytes = head.source_size(i);
                    found.shared_bytes = found.shared_bytes.saturating_add(bytes);
                }
            }
        }
        found
    }
}

impl Sources<'_> {
    /// Bytes that a record reads, for the experts in it; -1 if they are unknown. The tensors without experts count in the first
    /// record of an operation.
    fn bytes(&self, record: &TensorAccessLog, is_first: bool) -> f64 {
        if self.is_unknown {
            return -1.0;
        }
        let mut bytes = if is_first { self.shared_bytes } else { 0 };
        for id in record.expert_ids() {
            let Ok(expert) = ExpertId::try_from(id.get()) else {
                continue;
            };
            for tensor in &self.experts {
                let range = tensor.range(expert);
                bytes = bytes.saturating_add(range.map_or(0, |range| range.size_bytes));
            }
        }
        bytes as f64
    }
}

/// Converts operations to rows.
struct Reader<'a> {
    run: &'a Run,
    model: &'a ModelTable,
    files: &'a Files<'a>,
    starts: PassStarts<'a>,
    /// First record of the current pass, for a trace with a table of passes.
    table_pass: Option<u64>,
    recorded: Recorded,
    has_extension: bool,
    /// Index in `ops` by operation number.
    ops: HashMap<u8, i32>,
    /// Index in `names` by the name in records.
    names: HashMap<&'a [u8], i32>,
    /// Index in `names` by the name without the suffix of a view.
    base_names: HashMap<String, i32>,
    /// Row of `routing` of each token and layer of the current pass.
    routes: HashMap<(i32, u16), i32>,
}

impl<'a> Reader<'a> {
    fn new(run: &'a Run, model: &'a ModelTable, files: &'a Files<'a>) -> Reader<'a> {
        Reader {
            run,
            model,
            files,
            starts: PassStarts::new(),
            table_pass: None,
            recorded: Recorded::default(),
            has_extension: false,
            ops: HashMap::new(),
            names: HashMap::new(),
            base_names: HashMap::new(),
            routes: HashMap::new(),
        }
    }

    /// Adds the records of an operation. `is_routing`: whether its experts are the routing of its layer.
    fn add(&mut self, operation: &Operation<'a>, is_routing: bool) {
        let head = operation.head();
        let passes = self.run.passes();
        let pass = passes.and_then(|passes| passes.at(operation.first_record()));
        let pass = pass.copied();
        let start = i64::try_from(head.timestamp_ns.get()).unwrap_or(i64::MAX);
        self.begin_pass(operation, pass, start);
        // The experts of a warm-up pass were not selected by the router.
        let is_routing = is_routing && pass.is_none_or(|pass| !pass.is_warm_up);
        let op = self.op(head.operation_type);
        let name = self.name(head.dst_name_bytes());
        let files = self.files;
        let sources = files.sources(head);
        let tensor = sources.tensor_idx;
        let tensor = tensor.map_or(-1, |tensor| self.model.by_index(tensor));
        self.has_extension |= head.has_extension();
        let mut is_first = true;
        for token in operation.tokens() {
            let place = place(token.head(), pass);
            let tokens = &mut self.recorded.tokens;
            let token_index = tokens.in_pass(place, token.head().phase());
            let route = self.route(token_index, &token, is_routing, start);
            for record in token.records() {
                let records = &mut self.recorded.records;
                records.token.push(token_index);
                records.layer.push(layer_or_none(head.layer()));
                records.op.push(op);
                records.name.push(name);
                records.tensor.push(tensor);
                records.start.push(start);
                records.duration.push(duration(head));
                records.bytes.push(sources.bytes(record, is_first));
                records.route.push(route);
                records.thread.push(record.thread_id.get().into());
                let is_fallback = record.has_flag(FLAG_CPU_FALLBACK);
                records.fallback.push(is_fallback.into());
                is_first = false;
            }
        }
    }

    /// Starts a pass if the operation is the first of a pass.
    fn begin_pass(&mut self, operation: &Operation<'a>, pass: Option<TablePass>, start: i64) {
        let head = operation.head();
        let is_start = self.starts.is_start(operation);
        let tokens = &mut self.recorded.tokens;
        let is_start = match pass {
            Some(pass) => self.table_pass.replace(pass.first_record) != Some(pass.first_record),
            // Records of several threads may go back to a lower layer of the same token.
            None => is_start && (head.layer().is_none() || !tokens.is_in_pass(place(head, None))),
        };
        if is_start {
            tokens.begin_pass(start);
            self.routes.clear();
        }
    }

    /// The row of `routing` of a token in an operation; -1 without experts. Adds the row if the operation is the routing.
    fn route(
        &mut self,
        token: i32,
        experts: &TokenExperts<'a>,
        is_routing: bool,
        start: i64,
    ) -> i32 {
        let head = experts.head();
        let Some(layer) = head.layer().filter(|_| head.num_experts > 0) else {
            return -1;
        };
        let key = (token, layer.0);
        if !is_routing {
            return self.routes.get(&key).copied().unwrap_or(-1);
        }
        let routing = &mut self.recorded.routing;
        let row = routing.begin_row(token, layer.0, start);
        for expert in experts.experts() {
            let id = expert.expert_id.0;
            routing.push(Selected::new(id, expert.weight, Some(expert.lane)));
        }
        self.routes.insert(key, row);
        row
    }

    /// Index in `ops` of an operation number.
    fn op(&mut self, number: u8) -> i32 {
        let names = &mut self.recorded.records.ops;
        let run = self.run;
        *self.ops.entry(number).or_insert_with(|| {
            let name = run.ops().name(number).map(str::to_owned);
            names.push(name.unwrap_or_else(|| format!("op_{number}")));
            index(names.len() - 1)
        })
    }

    /// Index in `names` of the name of a result; -1 if there are too many names.
    fn name(&mut self, bytes: &'a [u8]) -> i32 {
        if let Some(&known) = self.names.get(bytes) {
            return known;
        }
        let names = &mut self.recorded.records.names;
        if names.len() >= MAX_NAMES {
            return -1;
        }
        let name = String::from_utf8_lossy(bytes);
        let base = base_name(&name);
        let place = *self.base_names.entry(base.to_owned()).or_insert_with(|| {
            names.push(base.to_owned());
            index(names.len() - 1)
        });
        self.names.insert(bytes, place);
        place
    }
}

/// Sequence and position of a record's token.
fn place(record: &TensorAccessLog, pass: Option<TablePass>) -> TokenPlace {
    let sequence = if record.has_extension() {
        record.sequence_id.get()
    } else {
        0
    };
    let position = pass.map_or(record.token(), |pass| pass.token_id);
    (sequence, position.0)
}

/// Duration in nanoseconds; -1 if it is unknown.
fn duration(record: &TensorAccessLog) -> i32 {
    let ns = record.duration_ns.get();
    if record.has_extension() && ns > 0 {
        i32::try_from(ns).unwrap_or(i32::MAX)
    } else {
        -1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorts_records_and_renumbers_routes() {
        let mut records = Records {
            token: vec![0, 1, 2],
            layer: vec![3, 4, 5],
            op: vec![0; 3],
            name: vec![0; 3],
            tensor: vec![-1; 3],
            start: vec![20, 10, 20],
            duration: vec![1, 2, 3],
            bytes: vec![1.0, 2.0, 3.0],
            route: vec![0, 1, -1],
            ..Records::default()
        };
        records.renumber_routes(&[1, 0]);
        assert!(records.sort());
        assert!(!records.sort());
        assert_eq!(records.token, [1, 0, 2]);
        assert_eq!(records.layer, [4, 3, 5]);
        assert_eq!(records.start, [10, 20, 20]);
        assert_eq!(records.bytes, [2.0, 1.0, 3.0]);
        assert_eq!(records.route, [0, 1, -1]);
        // Without threads and fallbacks.
        assert_eq!(records.columns(2).len(), 9);
    }

    #[test]
    fn trace_without_operations_has_a_record_for_each_row() {
        let mut routing = Routing::default();
        for (token, layer) in [(0, 1), (0, 2)] {
            routing.begin_row(token, layer, 0);
            routing.push(Selected::new(3, None, None));
            routing.push(Selected::new(5, None, None));
        }
        let bytes = |layer: i32, _: i32| (layer == 1).then_some(10.0);
        let records = Records::of_routing(&routing, bytes);
        assert_eq!(records.bytes, [20.0, -1.0]);
        assert_eq!(records.route, [0, 1]);
        assert_eq!(records.ops, ["ROUTING"]);
    }
}
