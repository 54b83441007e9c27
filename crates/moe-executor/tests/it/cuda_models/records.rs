//! Records of runs with GPUs: the same as those of a run on the CPU, except for experts, lanes and times.

use moe_executor::Model;
use moe_executor::cuda::Policy;
use moe_gguf::Gguf;
use moe_trace::record::{SOURCE_BUFFER, lane};
use moe_trace::transfers::Span;
use moe_trace::{LayerId, Phase, TensorAccessLog, TokenId};

use super::recording::{MeasuredPass, Recorded, distinct, record, stem};
use super::{Case, MODELS, TWICE, case, down_size, has_gpu, open};
use moe_testkit::Report;

/// Bits of a buffer id that are set for a copy of the buffer on a GPU: a flag, and the index of the GPU.
const GPU_BITS: u64 = 1 << 23 | 0b1111 << 19;
/// Tolerance of the end of a pass in ns. It and the times of events are rounded.
const ROUNDING_NS: u64 = 1_000;
/// Number of passes at the start that load kernels. The driver rounds event times in them by more than the duration of a kernel.
const N_WARM_UP: usize = 2;

/// The contents of a record that do not depend on the device.
#[derive(PartialEq, Debug)]
struct Facts {
    operation: (u8, String, u16),
    pass: (u8, u32, u32, u32),
    experts: (u8, u8),
    flags: u8,
    /// Name, layer, kind, offset or buffer, tensor, file, size.
    sources: Vec<(String, u16, u8, u64, u32, u16, u64)>,
}

fn facts(record: &TensorAccessLog) -> Facts {
    let source = |(i, source): (usize, &moe_trace::SourceLog)| {
        let ignored_bits = match source.memory_source {
            SOURCE_BUFFER => GPU_BITS,
            _ => 0,
        };
        (
            source.name().into_owned(),
            source.layer_id.get(),
            source.memory_source,
            source.offset_or_buffer_id.get() & !ignored_bits,
            source.tensor_idx.get(),
            record.source_file[i].get(),
            record.source_size(i),
        )
    };
    Facts {
        operation: (
            record.operation_type,
            record.dst_name().into_owned(),
            record.layer_id.get(),
        ),
        pass: (
            record.phase,
            record.sequence_id.get(),
            record.token_id.get(),
            record.n_tokens.get(),
        ),
        experts: (record.num_experts, record.expert_slot_base),
        flags: record.flags,
        sources: record.sources().iter().enumerate().map(source).collect(),
    }
}

/// Placements of a model on GPUs.
fn cases() -> [Case; 7] {
    [
        case(Policy::Gpu),
        case(Policy::Cpu),
        Case {
            n_cpu_moe: usize::MAX,
            ..case(Policy::Gpu)
        },
        Case {
            n_cpu_moe: 1,
            ..case(Policy::Cpu)
        },
        case(Policy::PostFetch),
        Case {
            gpus: TWICE,
            ..case(Policy::Gpu)
        },
        Case {
            gpus: TWICE,
            ..case(Policy::PostFetch)
        },
    ]
}

/// The lane of an expert of a record under the policy. `selected` are the distinct experts of the layer in this pass.
fn lane_of(case: &Case, record: &TensorAccessLog, expert: i32, selected: &[i32]) -> u8 {
    if usize::from(record.layer_id.get()) >= case.n_cpu_moe {
        return lane::GPU_RESIDENT;
    }
    match case.policy {
        Policy::Gpu => lane::CACHE_MISS,
        Policy::PostFetch if stem(record).starts_with("ffn_moe_down") => {
            let index = selected.iter().position(|&id| id == expert);
            if index.is_some_and(|index| index < case.post_fetch.max_transfers) {
                lane::POST_FETCHED
            } else {
                lane::POST_FETCH_MISS
            }
        }
        Policy::Cpu | Policy::PostFetch => lane::CPU,
    }
}

#[test]
fn gpu_records_equal_cpu_records() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    for (name, _) in MODELS {
        let gguf = open(name);
        let on_cpu = record(&gguf, None, false);
        for case in cases() {
            let what = format!(
                "{name}, {} GPUs, {:?}, experts of {} layers in CPU memory",
                case.gpus.len(),
                case.policy,
                case.n_cpu_moe
            );
            let observed = record(&gguf, Some(&case), true);
            // Without an observer, the CPU does not wait for the routing decisions that are recorded.
            let unobserved = record(&gguf, Some(&case), false);
            let before = report.n_failures();
            for recorded in [&observed, &unobserved] {
                check_operations(&mut report, &what, &on_cpu, recorded);
                check_times(&mut report, &what, recorded);
            }
            check_experts(&mut report, &what, &case, &observed);
            compare_experts(&mut report, &what, &observed, &unobserved);
            for recorded in [&observed, &unobserved] {
                check_transfers(&mut report, &what, (&gguf, &case), recorded, &observed);
            }
            let failed = report.n_failures() - before;
            println!(
                "{what}: {} records, {} transfers, {failed} failures",
                unobserved.records.len(),
                unobserved.transfers.len()
            );
        }
    }
    report.finish();
}

/// The records must contain the same operations as those of the run on the CPU. No operation may fall back to the CPU.
fn check_operations(report: &mut Report, what: &str, on_cpu: &Recorded, on_gpu: &Recorded) {
    if on_cpu.records.len() != on_gpu.records.len() {
        report.fail(format!(
            "{what}: {} records, not {} as on the CPU",
            on_gpu.records.len(),
            on_cpu.records.len()
        ));
    }
    let pairs = on_cpu.records.iter().zip(&on_gpu.records).enumerate();
    let mut different = pairs
        .map(|(i, (on_cpu, on_gpu))| (i, facts(on_cpu), facts(on_gpu)))
        .filter(|(_, on_cpu, on_gpu)| on_cpu != on_gpu);
    if let Some((i, on_cpu, on_gpu)) = different.next() {
        report.fail(format!(
            "{what}: record {i} and {} others differ from those of the CPU: {on_gpu:?}, not {on_cpu:?}",
            different.count()
        ));
    }
    if on_gpu.fallbacks.ops > 0 || !on_gpu.fallbacks.tensors.is_empty() {
        report.fail(format!("{what}: {:?}", on_gpu.fallbacks));
    }
}

/// The experts of each record must be those that the observer received, on the lanes of the policy.
fn check_experts(report: &mut Report, what: &str, case: &Case, recorded: &Recorded) {
    for pass in &recorded.passes {
        for record in pass.of(&recorded.records).filter(|r| r.num_experts > 0) {
            let (layer, position) = (record.layer_id.get(), record.token_id.get());
            let Some((ids, weights)) = recorded.observed.get(&(layer, position)) else {
                return report.fail(format!(
                    "{what}: the observer did not receive layer {layer} of position {position}"
                ));
            };
            let n = record.expert_ids().len();
            let first = usize::from(record.expert_slot_base);
            let have: Vec<i32> = record.expert_ids().iter().map(|id| id.get()).collect();
            let have_weights: Vec<f32> =
                record.expert_weights[..n].iter().map(|w| w.get()).collect();
            let selected = distinct(&recorded.observed, layer, pass);
            let lanes: Vec<u8> = have
                .iter()
                .map(|&id| lane_of(case, record, id, &selected))
                .collect();
            let is_right = ids.get(first..first + n) == Some(&have)
                && weights.get(first..first + n) == Some(&have_weights)
                && record.expert_lane[..n] == lanes;
            if !is_right {
                return report.fail(format!(
                    "{what}: {} of position {position} has experts {have:?} with weights {have_weights:?} on lanes {:?}, \
                     not {ids:?} with {weights:?} from slot {first} on, on lanes {lanes:?}",
                    record.dst_name(),
                    &record.expert_lane[..n]
                ));
            }
        }
    }
}

/// The records with and without an observer must contain the same experts.
fn compare_experts(report: &mut Report, what: &str, observed: &Recorded, unobserved: &Recorded) {
    let routed = |recorded: &Recorded| -> Vec<(String, u32, Vec<i32>, [u8; 16])> {
        let experts = recorded.records.iter().filter(|r| r.num_experts > 0);
        let experts = experts.map(|r| {
            let ids = r.expert_ids().iter().map(|id| id.get()).collect();
            (
                r.dst_name().into_owned(),
                r.token_id.get(),
                ids,
                r.expert_lane,
            )
        });
        experts.collect()
    };
    let (observed, unobserved) = (routed(observed), routed(unobserved));
    let different = observed.iter().zip(&unobserved).find(|(a, b)| a != b);
    if let Some((observed, unobserved)) = different {
        report.fail(format!(
            "{what}: {unobserved:?} without an observer, {observed:?} with an observer"
        ));
    }
}

/// Operations must be within their pass, in order. Each must have a duration, unless the kernel of the operation before it also
/// computes it.
fn check_times(report: &mut Report, what: &str, recorded: &Recorded) {
    /// Operations that always have a duration.
    const TIMED: [&str; 5] = [
        "kqv_out",
        "ffn_moe_logits",
        "ffn_moe_gate",
        "ffn_moe_down",
        "result_output",
    ];
    /// Operations that have a duration in a prompt. In a pass for a single token, one kernel may compute them with others.
    const TIMED_IN_PROMPTS: [&str; 2] = ["norm", "l_out"];
    for pass in &recorded.passes[N_WARM_UP..] {
        let mut start_of_pass = None;
        let mut last = 0;
        for record in pass.of(&recorded.records) {
            let (start, duration) = (record.timestamp_ns.get(), record.duration_ns.get());
            // The first operation is the look-up of the embeddings, on the CPU.
            let first = *start_of_pass.get_or_insert(start);
            let end = first + pass.took.as_nanos() as u64 + ROUNDING_NS;
            // The same kernel computes the operation before it, or the one after it, which then starts at the same time.
            let is_fused = duration == 0
                && (start == last + 1 || start == last || pass.phase == Phase::Generate);
            let stem = stem(record);
            let must_be_timed = TIMED.contains(&stem.as_str())
                || pass.phase == Phase::Prompt && TIMED_IN_PROMPTS.contains(&stem.as_str());
            let is_timed = duration > 0 || is_fused && !must_be_timed;
            let is_in_order = start >= last;
            if start < first || start + duration > end || !is_timed || !is_in_order {
                return report.fail(format!(
                    "{what}: {} of position {} starts {} ns after the start of its pass, {} ns after the operation before \
                     it, with a duration of {duration} ns; the duration of the pass is {:?}",
                    record.dst_name(),
                    pass.position,
                    start as i128 - i128::from(first),
                    start as i128 - i128::from(last),
                    pass.took
                ));
            }
            last = start;
        }
    }
}

/// Under Post-Fetch, `transfers.jsonl` must contain the transfers of each layer of each pass, with times within the pass.
fn check_transfers(
    report: &mut Report,
    what: &str,
    (gguf, case): (&Gguf, &Case),
    recorded: &Recorded,
    observed: &Recorded,
) {
    let model = Model::load(gguf).unwrap();
    let mut want = Vec::new();
    for pass in &recorded.passes {
        for layer in 0..model.hparams().n_layer as u16 {
            let n_experts = distinct(&observed.observed, layer, pass).len();
            if case.policy == Policy::PostFetch && n_experts > 0 {
                let n_fetched = n_experts.min(case.post_fetch.max_transfers);
                let bytes = n_fetched * down_size(gguf, &model, layer.into());
                want.push((
                    pass.phase,
                    TokenId(pass.position),
                    LayerId(layer),
                    n_experts,
                    n_fetched,
                    bytes,
                ));
            }
        }
    }
    let have: Vec<_> = recorded
        .transfers
        .iter()
        .map(|t| {
            let counts = (t.n_experts as usize, t.n_fetched as usize, t.bytes as usize);
            let (n_experts, n_fetched, bytes) = counts;
            (t.phase, t.token_id, t.layer_id, n_experts, n_fetched, bytes)
        })
        .collect();
    if have != want {
        let i = have.iter().zip(&want).position(|(have, want)| have != want);
        let i = i.unwrap_or(have.len().min(want.len()));
        return report.fail(format!(
            "{what}: {} transfers, not {}; transfer {i} is {:?}, not {:?} (phase, position, layer, experts, fetched, bytes)",
            have.len(),
            want.len(),
            have.get(i),
            want.get(i)
        ));
    }
    for pass in &recorded.passes[N_WARM_UP..] {
        let start = pass
            .of(&recorded.records)
            .next()
            .map(|r| r.timestamp_ns.get());
        let is_of_pass = |t: &&moe_trace::transfers::Transfer| {
            (t.phase, t.token_id.0) == (pass.phase, pass.position)
        };
        for transfer in recorded.transfers.iter().filter(is_of_pass) {
            let (Some(start), Some(copies), Some(product)) =
                (start, transfer.transfer, transfer.product)
            else {
                return report.fail(format!(
                    "{what}: no transfer or no product was measured: {transfer:?}"
                ));
            };
            let is_in = |span: Span| is_in_pass(span, start, pass);
            // Both are events of one GPU; the driver reports times in steps of half a microsecond.
            let waits = product.start_ns + 10_000 >= copies.end_ns;
            if ![copies, transfer.window, product].into_iter().all(is_in) || !waits {
                return report.fail(format!(
                    "{what}: the pass starts at {start} ns, with a duration of {:?}: {transfer:?}",
                    pass.took
                ));
            }
        }
    }
}

/// Whether a span is not empty and is within its pass, which starts at `start` (ns).
fn is_in_pass(span: Span, start: u64, pass: &MeasuredPass) -> bool {
    let end = start + pass.took.as_nanos() as u64 + ROUNDING_NS;
    span.ns() > 0 && span.start_ns >= start && span.end_ns <= end
}
