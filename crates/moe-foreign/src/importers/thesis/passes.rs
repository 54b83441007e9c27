//! The passes of a TensorAccessLog v4 trace: first record, position of the first token, and whether the pass is the warm-up.
//!
//! The thesis numbers the generated tokens; our records have token positions. The number of tokens of a pass is the size of the
//! input of its first expert operation divided by the size in a pass of one token.

use moe_files::text::counted;
use moe_trace::ops::OpTable;
use moe_trace::record::{MAX_EXPERTS, TensorAccessLog};
use moe_trace::{Operation, PassTable, Phase, TablePass, TokenId, Trace};

use crate::ImportOptions;

/// What the records of a pass contain.
#[derive(Clone, Copy, Default)]
struct Pass {
    first_record: u64,
    is_decode: bool,
    /// Number of experts in the record of the first expert operation; 0 if there is no expert operation.
    n_experts: u8,
    /// Size of the input of that operation in bytes.
    input_bytes: u64,
    /// Size of the expert ids of that operation in bytes: 4 per token and expert.
    ids_bytes: u64,
    /// Size of the input of the router's ARGSORT or TOP_K in bytes: 4 per token and expert of the layer.
    sorted_bytes: u64,
}

/// The passes of a trace, and notes about them.
///
/// # Errors
/// The number of the operation that has expert ids, if it is not MUL_MAT_ID in the table of operations.
pub(super) fn table(
    trace: &Trace,
    mul_mat_id: Option<u8>,
    options: &ImportOptions,
) -> Result<(PassTable, Vec<String>), u8> {
    let default = OpTable::default();
    let ops = options.ops.as_ref().unwrap_or(&default);
    let sorts = ["ARGSORT", "TOP_K"].map(|name| ops.number(name));
    let mut seen: Vec<Pass> = Vec::new();
    let mut before: Option<&TensorAccessLog> = None;
    let mut first: Option<&TensorAccessLog> = None;
    let mut other_op = None;
    for operation in trace.operations() {
        let head = operation.head();
        let first = *first.get_or_insert(head);
        if before.is_none_or(|before| is_next_pass(first, before, head)) {
            seen.push(Pass {
                first_record: operation.first_record(),
                is_decode: head.phase() == Some(Phase::Generate),
                ..Pass::default()
            });
        }
        before = Some(head);
        if let Some(pass) = seen.last_mut() {
            let op = Some(head.operation_type);
            if sorts.contains(&op) {
                pass.sorted_bytes = pass.sorted_bytes.max(head.source_size(0));
            } else if op == mul_mat_id && pass.n_experts == 0 {
                pass.read_expert_operation(&operation);
            } else if op != mul_mat_id && head.num_experts > 0 {
                // The first one: ADD_ID follows with the same expert ids.
                other_op = other_op.or(op);
            }
        }
    }
    if let Some(op) = other_op
        && seen.iter().all(|pass| pass.n_experts == 0)
    {
        return Err(op);
    }
    Ok(compare(&seen, options))
}

/// Determines token positions and the warm-up from a comparison of the passes.
fn compare(seen: &[Pass], options: &ImportOptions) -> (PassTable, Vec<String>) {
    let one_token = one_token(seen);
    let is_warm_up = |pass: &Pass| pass.is_warm_up(seen, one_token, options);
    let mut notes = Vec::new();
    let mut passes = Vec::with_capacity(seen.len());
    let (mut token_id, mut n_warm_up, mut n_batches, mut n_full) = (0u32, 0u64, 0u64, 0u64);
    for pass in seen {
        let n_tokens = pass.n_tokens(one_token);
        let is_warm_up = is_warm_up(pass);
        passes.push(TablePass {
            first_record: pass.first_record,
            token_id: TokenId(token_id),
            is_warm_up,
        });
        if is_warm_up {
            n_warm_up += 1;
            continue;
        }
        token_id = token_id.saturating_add(n_tokens.unwrap_or(1));
        n_batches += u64::from(n_tokens.is_none_or(|n| n > 1) && pass.n_experts > 0);
        let is_full = usize::from(pass.n_experts) == MAX_EXPERTS;
        n_full += u64::from(is_full && pass.ids_bytes > 4 * MAX_EXPERTS as u64);
    }
    if n_warm_up > 0 {
        notes.push(format!(
            "skipped the routing of {n_warm_up} of {}: the warm-up of llama.cpp, which routes to all experts",
            counted(seen.len() as u64, "pass")
        ));
    }
    if n_batches > 0 {
        notes.push(format!(
            "in {} of several tokens, only the experts of the first token are recorded",
            counted(n_batches, "pass")
        ));
    }
    if n_full > 0 {
        notes.push(format!(
            "records of {} contain sixteen experts, the maximum, and may be the warm-up; specify the model or the top-k to recognize it",
            counted(n_full, "pass")
        ));
    }
    if one_token.is_none() && seen.len() > 1 {
        notes.push("no pass has a single token, so the number of tokens of a pass is unknown; token_id counts passes".into());
    }
    notes.push("router weights, sequences and lanes are not recorded".into());
    (PassTable::new(passes), notes)
}

/// `input_bytes` of a pass of one token: the smallest of all passes, if there is a decode pass.
fn one_token(seen: &[Pass]) -> Option<u64> {
    let routed = || seen.iter().filter(|pass| pass.input_bytes > 0);
    routed().find(|pass| pass.is_decode)?;
    routed().map(|pass| pass.input_bytes).min()
}

impl Pass {
    fn read_expert_operation(&mut self, operation: &Operation<'_>) {
        let head = operation.head();
        self.n_experts = head.num_experts;
        self.input_bytes = head.source_size(1);
        self.ids_bytes = head.source_size(2);
    }

    /// Number of tokens of the pass, if known.
    fn n_tokens(&self, one_token: Option<u64>) -> Option<u32> {
        let one_token = one_token.filter(|&bytes| bytes > 0)?;
        let is_multiple = self.input_bytes > 0 && self.input_bytes.is_multiple_of(one_token);
        let n_tokens = u32::try_from(self.input_bytes / one_token).ok();
        n_tokens.filter(|_| is_multiple)
    }

    /// Whether the pass routes to all experts.
    ///
    /// If the top-k is known, the pass has more experts per token. Otherwise it has more experts than another pass, or as many ids
    /// as the router sorted values.
    fn is_warm_up(&self, seen: &[Pass], one_token: Option<u64>, options: &ImportOptions) -> bool {
        if self.n_experts == 0 {
            return false;
        }
        let full = MAX_EXPERTS as u64;
        if let Some(used) = options.max_expert_used() {
            let used = u64::from(used);
            if u64::from(self.n_experts) > used {
                return true;
            }
            // A record contains at most sixteen experts, but the size of the ids shows how many there are.
            let ids = self.ids_bytes / 4 / u64::from(self.n_tokens(one_token).unwrap_or(1));
            let all = options.n_expert().map(u64::from);
            return used >= full && all.is_some_and(|all| all > used && ids == all);
        }
        let fewest = seen
            .iter()
            .map(|pass| pass.n_experts)
            .filter(|&n| n > 0)
            .min();
        fewest.is_some_and(|fewest| self.n_experts > fewest)
            || self.sorted_bytes > 0 && self.sorted_bytes == self.ids_bytes
    }
}

/// Whether `head` starts a pass: it is the first operation of the trace again, or its token or phase differs from the previous one.
fn is_next_pass(first: &TensorAccessLog, before: &TensorAccessLog, head: &TensorAccessLog) -> bool {
    let is_first = head.operation_type == first.operation_type
        && head.dst_name_bytes() == first.dst_name_bytes();
    is_first || head.phase != before.phase || head.token_id != before.token_id
}
