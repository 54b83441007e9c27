//! Access reports of small synthetic runs, compared with manually computed figures.

use std::path::Path;

use moe_analysis::accesses::{AccessReport, Direction, Error, LayerCoverage, report};
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_trace::manifest::Manifest;
use moe_trace::ops::{GET_ROWS, MUL_MAT, MUL_MAT_ID};
use moe_trace::record::{EXT_V1, PHASE_GENERATE, PHASE_PROMPT, SOURCE_DISK, set_name};
use moe_trace::{
    ExpertId, LayerId, NO_LAYER, NO_TENSOR, Phase, Run, RunOptions, RunWriter, TensorAccessLog,
};
use proptest::prelude::*;
use zerocopy::IntoBytes;

/// `random-gpt-oss-F16.gguf`: 16 experts per layer.
fn gguf() -> Gguf {
    Gguf::open(moe_testkit::fixture("random-gpt-oss-F16.gguf")).unwrap()
}

fn run_of(dir: &Path, records: &[TensorAccessLog]) -> Run {
    let map = OffsetMap::new(&gguf());
    let mut writer =
        RunWriter::create(dir, Manifest::default(), &map, RunOptions::default()).unwrap();
    for record in records {
        *writer.next_record().unwrap() = *record;
    }
    writer.finish().unwrap();
    Run::open(dir).unwrap()
}

fn report_on(records: &[TensorAccessLog], windows: &[u64]) -> AccessReport {
    let tmp = tempfile::tempdir().unwrap();
    report(&run_of(tmp.path(), records), windows).unwrap()
}

/// Time, layer, phase and token of an operation that reads one tensor.
struct At {
    start: u64,
    duration: u64,
    layer: u16,
    phase: u8,
    token: u32,
}

fn read(gguf: &Gguf, at: &At, op: u8, tensor: &str, n_tokens: u32) -> TensorAccessLog {
    let tensor = gguf.tensor(tensor).unwrap();
    let mut record = TensorAccessLog {
        operation_type: op,
        phase: at.phase,
        ext_version: EXT_V1,
        num_sources: 1,
        ..Default::default()
    };
    record.timestamp_ns.set(at.start);
    record.duration_ns.set(at.duration);
    record.layer_id.set(at.layer);
    record.token_id.set(at.token);
    record.n_tokens.set(n_tokens);
    set_name(&mut record.dst_name, &format!("of {}", tensor.name));
    let source = &mut record.sources[0];
    set_name(&mut source.name, &tensor.name);
    source.memory_source = SOURCE_DISK;
    source.tensor_idx.set(tensor.index);
    source.offset_or_buffer_id.set(tensor.offset);
    record.set_source_size(0, tensor.size_bytes);
    record
}

/// Records of an expert product: one per token.
fn experts(gguf: &Gguf, at: &At, tensor: &str, tokens: &[&[i32]]) -> Vec<TensorAccessLog> {
    let head = read(gguf, at, MUL_MAT_ID, tensor, tokens.len() as u32);
    let records = (at.token..).zip(tokens).map(|(token, ids)| {
        let mut record = head;
        record.token_id.set(token);
        record.num_experts = ids.len() as u8;
        for (slot, id) in ids.iter().enumerate() {
            record.expert_ids[slot].set(*id);
        }
        record
    });
    records.collect()
}

/// Selected experts of each token of a batch in a layer.
type Tokens<'a> = &'a [&'a [i32]];

/// Passes over two layers: the embedding, then in each layer the query projection and the three expert products with the
/// experts of each token. Operations start every 10 ns and take 4 ns; passes start every 1000 ns.
fn passes(passes: &[(u8, u32, [Tokens; 2])]) -> Vec<TensorAccessLog> {
    let gguf = gguf();
    let mut records = Vec::new();
    for (i, &(phase, token, layers)) in (1u64..).zip(passes) {
        let mut at = At {
            start: 1000 * i,
            duration: 4,
            layer: NO_LAYER,
            phase,
            token,
        };
        let n_tokens = layers[0].len() as u32;
        records.push(read(&gguf, &at, GET_ROWS, "token_embd.weight", n_tokens));
        for (layer, tokens) in (0u16..).zip(layers) {
            at.layer = layer;
            at.start += 10;
            let q = format!("blk.{layer}.attn_q.weight");
            records.push(read(&gguf, &at, MUL_MAT, &q, n_tokens));
            for part in ["gate", "up", "down"] {
                at.start += 10;
                let tensor = format!("blk.{layer}.ffn_{part}_exps.weight");
                records.extend(experts(&gguf, &at, &tensor, tokens));
            }
        }
    }
    records
}

/// A prompt of two tokens and three generated tokens.
fn known() -> Vec<TensorAccessLog> {
    passes(&[
        (PHASE_PROMPT, 0, [&[&[0, 1], &[1, 2]], &[&[5, 6], &[5, 6]]]),
        (PHASE_GENERATE, 2, [&[&[1, 3]], &[&[5, 7]]]),
        (PHASE_GENERATE, 3, [&[&[4, 3]], &[&[8, 9]]]),
        (PHASE_GENERATE, 4, [&[&[1, 0]], &[&[5, 9]]]),
    ])
}

/// Sizes of an expert in one projection, in all three, in all with biases, and of the query projection.
struct Sizes {
    part: u64,
    parts: u64,
    expert: u64,
    q: u64,
}

fn sizes() -> Sizes {
    let gguf = gguf();
    let size = |name: &str| gguf.tensor(name).unwrap().size_bytes;
    let parts = ["gate", "up", "down"];
    let of = |kind: &str| -> u64 {
        parts
            .map(|part| size(&format!("blk.0.ffn_{part}_exps.{kind}")) / 16)
            .iter()
            .sum()
    };
    let part = size("blk.0.ffn_up_exps.weight") / 16;
    // n_embd 64 and n_ff 32: all three projections have the same size.
    assert_eq!(of("weight"), 3 * part);
    Sizes {
        part,
        parts: of("weight"),
        expert: of("weight") + of("bias"),
        q: size("blk.0.attn_q.weight"),
    }
}

#[test]
fn counts_steps_between_layers() {
    let order = report_on(&known(), &[]).order;
    // One step from layer 0 to layer 1 in each of four passes.
    assert_eq!((order.passes, order.passes_in_order), (4, 4));
    assert_eq!(
        (order.steps, order.steps_to_next, order.steps_back),
        (4, 4, 0)
    );

    // An operation of one layer that reads a tensor of another layer.
    let mut records = known();
    let gguf = gguf();
    let at = At {
        start: 4100,
        duration: 4,
        layer: 1,
        phase: PHASE_GENERATE,
        token: 4,
    };
    records.push(read(&gguf, &at, MUL_MAT, "blk.3.attn_q.weight", 1));
    let at = At { start: 4110, ..at };
    records.push(read(&gguf, &at, MUL_MAT, "blk.0.attn_q.weight", 1));
    let order = report_on(&records, &[]).order;
    assert_eq!((order.passes, order.passes_in_order), (4, 3));
    assert_eq!(
        (order.steps, order.steps_to_next, order.steps_back),
        (6, 4, 1)
    );
}

#[test]
fn counts_distinct_experts_of_each_operation() {
    let (report, sizes) = (report_on(&known(), &[]), sizes());
    let [prompt, generated] = report.phases;
    assert_eq!(
        (
            prompt.passes,
            prompt.tokens,
            generated.passes,
            generated.tokens
        ),
        (1, 2, 3, 3)
    );
    // The prompt reads three distinct experts in layer 0 and two in layer 1, each generated token two in each layer.
    assert_eq!(prompt.expert_bytes, 5 * sizes.parts);
    assert_eq!(prompt.bytes, 5 * sizes.parts + 2 * sizes.q);
    assert_eq!(prompt.accesses, 5 * 3 + 2);
    let of_a_token = 4 * sizes.parts + 2 * sizes.q;
    assert_eq!(
        (generated.bytes, generated.pass_bytes),
        (3 * of_a_token, Some((of_a_token, of_a_token)))
    );
    assert_eq!(generated.bytes_per_token(), Some(of_a_token as f64));
    assert_eq!(prompt.bytes_per_token(), Some(prompt.bytes as f64 / 2.0));

    let layer = |layer: Option<u16>, phase| {
        let layer = layer.map(LayerId);
        let is_it = |l: &&moe_analysis::accesses::LayerVolume| l.layer == layer && l.phase == phase;
        report
            .layers
            .iter()
            .find(is_it)
            .map(|l| (l.accesses, l.bytes, l.expert_bytes))
    };
    assert_eq!(
        layer(Some(0), Phase::Prompt),
        Some((10, 3 * sizes.parts + sizes.q, 3 * sizes.parts))
    );
    assert_eq!(
        layer(Some(1), Phase::Prompt),
        Some((7, 2 * sizes.parts + sizes.q, 2 * sizes.parts))
    );
    assert_eq!(
        layer(Some(1), Phase::Generate),
        Some((21, 6 * sizes.parts + 3 * sizes.q, 6 * sizes.parts))
    );
    assert_eq!((layer(None, Phase::Prompt), report.layers.len()), (None, 4));
    // Two embedding rows of the prompt and one of each generated token, with 32 F16 elements each.
    let lookups = report.lookups;
    assert_eq!(
        (lookups.operations, lookups.rows, lookups.bytes),
        (4, 5, 5 * 64)
    );
}

#[test]
fn classifies_seeks_by_direction_and_distance() {
    let gguf = gguf();
    let at = |i: u64| At {
        start: i,
        duration: 0,
        layer: 0,
        phase: PHASE_GENERATE,
        token: 0,
    };
    let up = "blk.0.ffn_up_exps.weight";
    let mut records = Vec::new();
    // Experts 0 and 1 are adjacent. Then forward over two experts to 4, and backward to 3, which ends where 4 starts.
    for (i, expert) in (1..).zip([0, 1, 4, 3]) {
        let mut record = experts(&gguf, &at(i), up, &[&[expert]]);
        set_name(&mut record[0].dst_name, &format!("x{i}"));
        records.extend(record);
    }
    let (seeks, part) = (report_on(&records, &[]).seeks, sizes().part);
    assert_eq!((seeks.accesses, seeks.bytes), (3, 3 * part));
    assert_eq!((seeks.sequential, seeks.sequential_bytes), (1, part));
    // Forward over experts 2 and 3. Backward from the end of 4 to the start of 3.
    assert_eq!(seeks.distance, 2 * part + 2 * part);
    let mut distances: Vec<_> = seeks
        .buckets
        .iter()
        .map(|b| (b.direction, b.accesses))
        .collect();
    distances.sort_by_key(|(direction, _)| *direction as u8);
    assert_eq!(
        distances,
        [
            (Direction::Forward, 1),
            (Direction::Forward, 1),
            (Direction::Backward, 1)
        ]
    );
    for bucket in &seeks.buckets {
        let distance = if bucket.from == 0 { 0 } else { 2 * part };
        assert!(bucket.from <= distance && bucket.below.is_none_or(|below| distance < below));
    }
}

#[test]
fn working_sets_count_repeated_reads_once() {
    let sizes = sizes();
    let sets = report_on(&known(), &[1, 2, 3, 4]).working_sets;
    let (x, q) = (sizes.expert, 2 * sizes.q);
    let found: Vec<_> = sets
        .iter()
        .map(|s| {
            (
                s.tokens,
                s.windows,
                s.sum_bytes,
                s.min_bytes,
                s.max_bytes,
                s.sum_experts,
            )
        })
        .collect();
    assert_eq!(
        found,
        [
            (1, 3, 3 * (4 * x + q), 4 * x + q, 4 * x + q, 12),
            // Experts 1 3 4 and 5 7 8 9. The third token does not fill a window.
            (2, 1, 7 * x + q, 7 * x + q, 7 * x + q, 7),
            // Additionally expert 0.
            (3, 1, 8 * x + q, 8 * x + q, 8 * x + q, 8),
            (4, 0, 0, 0, 0, 0),
        ]
    );
    assert_eq!(
        (sets[0].mean_bytes(), sets[3].mean_bytes()),
        (Some((4 * x + q) as f64), None)
    );
}

#[test]
fn coverage_counts_experts_by_phase() {
    let coverage = report_on(&known(), &[]).coverage;
    let layer = |layer, prompt, generate, either| LayerCoverage {
        layer: LayerId(layer),
        n_expert: 16,
        prompt,
        generate,
        either,
    };
    // Layer 0: prompt 0 1 2, then 1 3 4 0. Layer 1: prompt 5 6, then 5 7 8 9. Two more layers are never read.
    let expected = [
        layer(0, 3, 4, 5),
        layer(1, 2, 4, 5),
        layer(2, 0, 0, 0),
        layer(3, 0, 0, 0),
    ];
    assert_eq!(coverage, expected);
}

#[test]
fn reuse_distances_are_in_tokens_and_bytes() {
    let reuse = report_on(&known(), &[]).reuse;
    let sizes = sizes();
    // 5 uses in the prompt, 4 per generated token. Reuses: 1 and 5; 3; 0, 1, 5 and 9.
    assert_eq!((reuse.uses, reuse.reuses), (17, 7));
    let expert = |layer, id| {
        let is_it = |e: &&moe_analysis::accesses::ExpertReuse| {
            (e.layer, e.expert) == (LayerId(layer), ExpertId(id))
        };
        *reuse.experts.iter().find(is_it).unwrap()
    };
    // Expert 1 of layer 0 is used in the prompt (2 tokens), and by tokens 2 and 4.
    let one = expert(0, 1);
    assert_eq!((one.uses, one.size_bytes), (3, sizes.expert));
    assert_eq!(
        (one.tokens.n, one.tokens.sum, one.tokens.min, one.tokens.max),
        (2, 4, 2, 2)
    );
    // After its use in the prompt: expert 2, then q, 5 and 6 of layer 1, then q of layer 0. After its second use: 3, then q,
    // 5 and 7 of layer 1, q and 3 and 4 of layer 0, q and 8 and 9 of layer 1, q and 0 of layer 0; repeated units count once.
    let first = 3 * sizes.expert + 2 * sizes.q;
    let second = 7 * sizes.expert + 2 * sizes.q;
    assert_eq!(
        (one.bytes.min, one.bytes.max, one.bytes.sum),
        (first, second, first + second)
    );
    let nine = expert(1, 9);
    // Used by tokens 3 and 4. In between: q, 0 and 1 of layer 0, q and 5 of layer 1.
    assert_eq!(
        (nine.tokens.sum, nine.bytes.sum),
        (1, 3 * sizes.expert + 2 * sizes.q)
    );
    let three = expert(0, 3);
    // q, 5 and 7 of layer 1, q of layer 0.
    assert_eq!(
        (three.tokens.sum, three.bytes.sum),
        (1, 2 * sizes.expert + 2 * sizes.q)
    );
    let once = expert(1, 6);
    assert_eq!((once.uses, once.tokens.n, once.tokens.mean()), (1, 0, None));
    // Distances in tokens: 1 for 3 and 9; 2 for 1, 1, 5 and 5; 4 for 0.
    let tokens: Vec<_> = reuse.tokens.buckets().collect();
    assert_eq!(tokens, [(1, Some(2), 2), (2, Some(4), 4), (4, Some(8), 1)]);
    assert_eq!(reuse.bytes.buckets().map(|(.., n)| n).sum::<u64>(), 7);
}

#[test]
fn span_is_from_first_access_to_end_of_last() {
    let spans = report_on(&known(), &[]).spans;
    // The query projection starts at 10, followed by three products, the last from 40 to 44.
    let found: Vec<_> = spans
        .iter()
        .map(|s| (s.layer, s.phase, s.stats.n, s.stats.min_ns, s.stats.max_ns))
        .collect();
    assert_eq!(
        found,
        [
            (LayerId(0), Phase::Prompt, 1, 34, 34),
            (LayerId(0), Phase::Generate, 3, 34, 34),
            (LayerId(1), Phase::Prompt, 1, 34, 34),
            (LayerId(1), Phase::Generate, 3, 34, 34)
        ]
    );
    assert_eq!(spans[1].stats.mean_ns(), Some(34.0));
}

#[test]
fn lists_tensors_outside_the_map_and_does_not_count_them() {
    let mut records = known();
    let expected = report_on(&records, &[2]);
    let gguf = gguf();
    let at = At {
        start: 4100,
        duration: 4,
        layer: 1,
        phase: PHASE_GENERATE,
        token: 4,
    };
    let mut strange = read(&gguf, &at, MUL_MAT, "output.weight", 1);
    set_name(&mut strange.sources[0].name, "adapter.weight");
    strange.sources[0].tensor_idx.set(NO_TENSOR);
    strange.sources[0].offset_or_buffer_id.set(1 << 50);
    records.push(strange);
    let mut report = report_on(&records, &[2]);
    assert_eq!(report.unresolved.len(), 1);
    assert_eq!(
        (
            report.unresolved[0].name.as_str(),
            report.unresolved[0].n_accesses
        ),
        ("adapter.weight", 1)
    );
    report.unresolved.clear();
    assert_eq!(report, expected);
}

#[test]
fn rejects_runs_without_accesses() {
    let tmp = tempfile::tempdir().unwrap();
    let run = run_of(&tmp.path().join("empty"), &[]);
    assert!(matches!(report(&run, &[]), Err(Error::NoRecords { .. })));
    let run = run_of(&tmp.path().join("run"), &known());
    let bare = Run::open(run.path.join("trace.bin")).unwrap();
    let error = report(&bare, &[]).unwrap_err();
    assert!(matches!(error, Error::NoMap { .. }), "{error}");

    let mut records = known();
    let of_experts = records
        .iter_mut()
        .find(|record| record.num_experts > 0)
        .unwrap();
    of_experts.expert_ids[1].set(99);
    let run = run_of(&tmp.path().join("damaged"), &records);
    let error = report(&run, &[]).unwrap_err();
    assert!(matches!(error, Error::Record { record: 2, .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any bytes yield a report, or an error on one line.
    #[test]
    fn damaged_trace_never_panics(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..60)) {
        let tmp = tempfile::tempdir().unwrap();
        run_of(tmp.path(), &[]);
        let mut bytes = known().as_bytes().to_vec();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        std::fs::write(tmp.path().join("trace.bin"), &bytes).unwrap();
        match report(&Run::open(tmp.path()).unwrap(), &[1, 3]) {
            Ok(report) => prop_assert!(report.seeks.sequential <= report.seeks.accesses),
            Err(error) => prop_assert!(!error.to_string().contains('\n')),
        }
    }
}
