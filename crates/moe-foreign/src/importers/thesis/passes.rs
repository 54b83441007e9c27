//! The passes of a trace of the thesis: where each begins, the position of its first token, and whether it warms up.
//!
//! The thesis numbers generated tokens; here a token has its position in the sequence. How many tokens a pass has follows from
//! the bytes of its first expert operation's input, against those of a pass of one token.

use moe_gguf::text::counted;
use moe_trace::ops::OpTable;
use moe_trace::record::{MAX_EXPERTS, TensorAccessLog};
use moe_trace::{Operation, PassTable, Phase, TablePass, TokenId, Trace};

use crate::ImportOptions;

/// What the records of a pass say, before passes are compared.
#[derive(Clone, Copy, Default)]
struct Seen {
    first_record: u64,
    is_generated: bool,
    /// Experts in the record of its first expert operation; 0 = no such operation.
    n_experts: u8,
    /// Bytes of the operation's input, and of its expert ids.
    input_bytes: u64,
    ids_bytes: u64,
    /// Bytes of what the router sorted: a number for each expert and token.
    sorted_bytes: u64,
}

/// The passes of a trace, and what a user should know about them. The error is the number of the operation that has experts, if that is not MUL_MAT_ID.
pub(super) fn table(
    trace: &Trace,
    mul_mat_id: Option<u8>,
    options: &ImportOptions,
) -> Result<(PassTable, Vec<String>), u8> {
    let default = OpTable::default();
    let ops = options.ops.as_ref().unwrap_or(&default);
    let sorts = ["ARGSORT", "TOP_K"].map(|name| ops.number(name));
    let mut seen: Vec<Seen> = Vec::new();
    let mut before: Option<&TensorAccessLog> = None;
    let mut first: Option<&TensorAccessLog> = None;
    let mut other_op = None;
    for operation in trace.operations() {
        let head = operation.head();
        let first = *first.get_or_insert(head);
        if before.is_none_or(|before| is_next_pass(first, before, head)) {
            seen.push(Seen {
                first_record: operation.first_record(),
                is_generated: head.phase() == Some(Phase::Generate),
                ..Seen::default()
            });
        }
        before = Some(head);
        if let Some(pass) = seen.last_mut() {
            let op = Some(head.operation_type);
            if sorts.contains(&op) {
                pass.sorted_bytes = pass.sorted_bytes.max(head.source_size(0));
            } else if op == mul_mat_id && pass.n_experts == 0 {
                pass.look_at(&operation);
            } else if op != mul_mat_id && head.num_experts > 0 {
                other_op = op;
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

fn compare(seen: &[Seen], options: &ImportOptions) -> (PassTable, Vec<String>) {
    let one_token = one_token(seen);
    let is_warm_up = |pass: &Seen| pass.is_warm_up(seen, one_token, options);
    let mut notes = Vec::new();
    let mut passes = Vec::with_capacity(seen.len());
    let (mut token_id, mut n_warm_up, mut n_batches, mut n_cut) = (0u32, 0u64, 0u64, 0u64);
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
        n_cut += u64::from(is_full && pass.ids_bytes > 4 * MAX_EXPERTS as u64);
    }
    if n_warm_up > 0 {
        notes.push(format!(
            "left out of the routing: {n_warm_up} of {}, llama.cpp's warm-up, which routes to all experts",
            counted(seen.len() as u64, "pass")
        ));
    }
    if n_batches > 0 {
        notes.push(format!(
            "in {} of several tokens, the experts of the first one alone are recorded",
            counted(n_batches, "pass")
        ));
    }
    if n_cut > 0 {
        notes.push(format!(
            "records of {} hold sixteen experts and perhaps had more; name the model or the experts of a token to recognize warm-up",
            counted(n_cut, "pass")
        ));
    }
    if one_token.is_none() && seen.len() > 1 {
        notes.push("without a pass of a single token it is unknown how many tokens the others have, so token_id counts passes".into());
    }
    notes.push("router weights, sequences and lanes are not recorded".into());
    (PassTable::new(passes), notes)
}

/// Input bytes of a pass of one token: the fewest of all, if a generated token is among them.
fn one_token(seen: &[Seen]) -> Option<u64> {
    let routed = || seen.iter().filter(|pass| pass.input_bytes > 0);
    routed().find(|pass| pass.is_generated)?;
    routed().map(|pass| pass.input_bytes).min()
}

impl Seen {
    fn look_at(&mut self, operation: &Operation<'_>) {
        let head = operation.head();
        self.n_experts = head.num_experts;
        self.input_bytes = head.source_size(1);
        self.ids_bytes = head.source_size(2);
    }

    /// Tokens of the pass, if it can be told.
    fn n_tokens(&self, one_token: Option<u64>) -> Option<u32> {
        let one_token = one_token.filter(|&bytes| bytes > 0)?;
        let is_whole = self.input_bytes > 0 && self.input_bytes.is_multiple_of(one_token);
        let n_tokens = u32::try_from(self.input_bytes / one_token).ok();
        n_tokens.filter(|_| is_whole)
    }

    /// Whether the pass routes to all experts: to more than the model uses, where that is known; else to more than other passes
    /// do, or to as many as the router had numbers to sort.
    fn is_warm_up(&self, seen: &[Seen], one_token: Option<u64>, options: &ImportOptions) -> bool {
        if self.n_experts == 0 {
            return false;
        }
        let full = MAX_EXPERTS as u64;
        if let Some(used) = options.max_expert_used() {
            let used = u64::from(used);
            if u64::from(self.n_experts) > used {
                return true;
            }
            // A record cannot tell seventeen experts from more, but the bytes of the ids can.
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

/// Whether `head` begins a pass: the trace's first operation comes again, or another token's begins.
fn is_next_pass(first: &TensorAccessLog, before: &TensorAccessLog, head: &TensorAccessLog) -> bool {
    let is_first = head.operation_type == first.operation_type
        && head.dst_name_bytes() == first.dst_name_bytes();
    is_first || head.phase != before.phase || head.token_id != before.token_id
}
