//! Records of runs that a GPU takes part in: those of the host's run, with the run's own experts, lanes and times.

use moe_executor::Model;
use moe_executor::cuda::Policy;
use moe_gguf::Gguf;
use moe_trace::record::{SOURCE_BUFFER, lane};
use moe_trace::transfers::Span;
use moe_trace::{LayerId, TensorAccessLog, TokenId};

use super::recorded::{MeasuredPass, Recorded, distinct, record, stem};
use super::{Case, MODELS, TWICE, case, down_size, has_gpu, open};
use moe_testkit::Report;

/// What is set in the id of a buffer's twin on a GPU: that it is one, and the GPU's index.
const ON_GPU: u64 = 1 << 23 | 0b1111 << 19;
/// Nanoseconds by which a time may seem to be after the end of its pass: both are rounded.
const ROUNDING: u64 = 1_000;
/// Passes that load kernels: their times are rounded to more than a kernel takes.
const COLD: usize = 2;

/// What a record tells that is the same wherever the operation runs.
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
        let twin = match source.memory_source {
            SOURCE_BUFFER => ON_GPU,
            _ => 0,
        };
        (
            source.name().into_owned(),
            source.layer_id.get(),
            source.memory_source,
            source.offset_or_buffer_id.get() & !twin,
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

/// Ways to put a model onto GPUs.
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

/// Where the policy has an expert of a record computed; `chosen` are those of the pass and layer, each once.
fn lane_of(case: &Case, record: &TensorAccessLog, expert: i32, chosen: &[i32]) -> u8 {
    if usize::from(record.layer_id.get()) >= case.n_cpu_moe {
        return lane::GPU_RESIDENT;
    }
    match case.policy {
        Policy::Gpu => lane::CACHE_MISS,
        Policy::PostFetch if stem(record).starts_with("ffn_moe_down") => {
            let place = chosen.iter().position(|&id| id == expert);
            if place.is_some_and(|place| place < case.post_fetch.max_transfers) {
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
        let host = record(&gguf, None, false);
        for case in cases() {
            let what = format!(
                "{name}, {} GPUs, {:?}, {} layers' experts with the host",
                case.gpus.len(),
                case.policy,
                case.n_cpu_moe
            );
            let observed = record(&gguf, Some(&case), true);
            // Without an observer nothing waits for the choices that are recorded.
            let alone = record(&gguf, Some(&case), false);
            let before = report.n_failures();
            for recorded in [&observed, &alone] {
                same_operations(&mut report, &what, &host, recorded);
                times(&mut report, &what, recorded);
            }
            experts(&mut report, &what, &case, &observed);
            same_experts(&mut report, &what, &observed, &alone);
            for recorded in [&observed, &alone] {
                transfers(&mut report, &what, (&gguf, &case), recorded, &observed);
            }
            let failed = report.n_failures() - before;
            println!(
                "{what}: {} records, {} transfers, {failed} failures",
                alone.records.len(),
                alone.transfers.len()
            );
        }
    }
    report.finish();
}

fn same_operations(report: &mut Report, what: &str, host: &Recorded, here: &Recorded) {
    if host.records.len() != here.records.len() {
        report.fail(format!(
            "{what}: {} records, {} on the host",
            here.records.len(),
            host.records.len()
        ));
    }
    let differ = host.records.iter().zip(&here.records).enumerate();
    let mut differ = differ
        .map(|(i, (host, here))| (i, facts(host), facts(here)))
        .filter(|(_, host, here)| host != here);
    if let Some((i, host, here)) = differ.next() {
        report.fail(format!(
            "{what}: record {i} and {} others differ from the host's: {here:?}, not {host:?}",
            differ.count()
        ));
    }
    if here.fallbacks.ops > 0 || !here.fallbacks.tensors.is_empty() {
        report.fail(format!("{what}: {:?}", here.fallbacks));
    }
}

/// The experts of each record are those that the observer was told, computed where the policy says.
fn experts(report: &mut Report, what: &str, case: &Case, recorded: &Recorded) {
    for pass in &recorded.passes {
        for record in pass.of(&recorded.records).filter(|r| r.num_experts > 0) {
            let (layer, position) = (record.layer_id.get(), record.token_id.get());
            let Some((ids, weights)) = recorded.observed.get(&(layer, position)) else {
                return report.fail(format!("{what}: layer {layer} did not route {position}"));
            };
            let n = record.expert_ids().len();
            let first = usize::from(record.expert_slot_base);
            let have: Vec<i32> = record.expert_ids().iter().map(|id| id.get()).collect();
            let have_weights: Vec<f32> =
                record.expert_weights[..n].iter().map(|w| w.get()).collect();
            let chosen = distinct(&recorded.observed, layer, pass);
            let lanes: Vec<u8> = have
                .iter()
                .map(|&id| lane_of(case, record, id, &chosen))
                .collect();
            let is_right = ids.get(first..first + n) == Some(&have)
                && weights.get(first..first + n) == Some(&have_weights)
                && record.expert_lane[..n] == lanes;
            if !is_right {
                return report.fail(format!(
                    "{what}: {} of position {position} has experts {have:?} with {have_weights:?} on lanes {:?}, not \
                     {ids:?} with {weights:?} from {first} on, on lanes {lanes:?}",
                    record.dst_name(),
                    &record.expert_lane[..n]
                ));
            }
        }
    }
}

fn same_experts(report: &mut Report, what: &str, observed: &Recorded, alone: &Recorded) {
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
    let (observed, alone) = (routed(observed), routed(alone));
    let differ = observed.iter().zip(&alone).find(|(a, b)| a != b);
    if let Some((observed, alone)) = differ {
        report.fail(format!(
            "{what}: without an observer {alone:?}, with one {observed:?}"
        ));
    }
}

/// Operations lie within their pass and take time, unless they ran within the kernel of the one before.
fn times(report: &mut Report, what: &str, recorded: &Recorded) {
    const TAKE_TIME: [&str; 7] = [
        "norm",
        "kqv_out",
        "ffn_moe_logits",
        "ffn_moe_gate",
        "ffn_moe_down",
        "l_out",
        "result_output",
    ];
    for pass in &recorded.passes[COLD..] {
        let mut begin_of_pass = None;
        let mut last = 0;
        for record in pass.of(&recorded.records) {
            let (begin, took) = (record.timestamp_ns.get(), record.duration_ns.get());
            // The embeddings, which the host looks up.
            let first = *begin_of_pass.get_or_insert(begin);
            let end = first + pass.took.as_nanos() as u64 + ROUNDING;
            let is_within = took == 0 && (begin == last + 1 || begin == last);
            let is_timed = took > 0 || is_within && !TAKE_TIME.contains(&stem(record).as_str());
            let is_in_order = begin >= last;
            if begin < first || begin + took > end || !is_timed || !is_in_order {
                return report.fail(format!(
                    "{what}: {} of position {} begins {} ns after its pass ({} ns after the one before) and takes {took} \
                     ns; the pass takes {:?}",
                    record.dst_name(),
                    pass.position,
                    begin as i128 - i128::from(first),
                    begin as i128 - i128::from(last),
                    pass.took
                ));
            }
            last = begin;
        }
    }
}

/// Under Post-Fetch each layer of each pass tells what travelled.
fn transfers(
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
        let at = have.iter().zip(&want).position(|(have, want)| have != want);
        let at = at.unwrap_or(have.len().min(want.len()));
        return report.fail(format!(
            "{what}: {} transfers, not {}; number {at} is {:?}, not {:?} (phase, position, layer, experts, fetched, bytes)",
            have.len(),
            want.len(),
            have.get(at),
            want.get(at)
        ));
    }
    for pass in &recorded.passes[COLD..] {
        let begin = pass
            .of(&recorded.records)
            .next()
            .map(|r| r.timestamp_ns.get());
        let is_of_pass = |t: &&moe_trace::transfers::Transfer| {
            (t.phase, t.token_id.0) == (pass.phase, pass.position)
        };
        for transfer in recorded.transfers.iter().filter(is_of_pass) {
            let (Some(begin), Some(copies), Some(product)) =
                (begin, transfer.transfer, transfer.product)
            else {
                return report.fail(format!("{what}: nothing travelled: {transfer:?}"));
            };
            let is_in = |span: Span| is_in_pass(span, begin, pass);
            // Both are events of one GPU, told to half a microsecond.
            let waits = product.start_ns + 10_000 >= copies.end_ns;
            if ![copies, transfer.window, product].into_iter().all(is_in) || !waits {
                return report.fail(format!(
                    "{what}: the pass begins at {begin} and takes {:?}: {transfer:?}",
                    pass.took
                ));
            }
        }
    }
}

/// Whether something takes time, within its pass.
fn is_in_pass(span: Span, begin: u64, pass: &MeasuredPass) -> bool {
    let end = begin + pass.took.as_nanos() as u64 + ROUNDING;
    span.ns() > 0 && span.start_ns >= begin && span.end_ns <= end
}
