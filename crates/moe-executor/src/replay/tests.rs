use moe_engine::Mode;
use moe_gguf::Gguf;
use moe_placement::perf::PerfMode;
use moe_trace::record::lane;
use moe_trace::{ExpertId, LayerId, Phase, RoutingRow, Sink, TokenId};

use super::*;
use crate::hot_cache::LaneContents;

fn row(layer_id: u16, token_id: u32, slot: u16, expert_id: u32, phase: Phase) -> RoutingRow {
    RoutingRow {
        token_id: TokenId(token_id),
        slot,
        expert_id: ExpertId(expert_id),
        phase: Some(phase),
        ..RoutingRow::at_layer(LayerId(layer_id))
    }
}

/// Phase of each pass; layer, positions and experts of each of its layers.
type PassList = Vec<(Phase, Vec<(u16, Vec<u32>, Vec<u32>)>)>;

fn list(routes: &Routes) -> PassList {
    let layer = |l: RoutedLayer| {
        let positions = l.positions.iter().map(|position| position.0).collect();
        (l.layer.0, positions, l.ids.iter().map(|id| id.0).collect())
    };
    let passes = routes.passes();
    passes
        .map(|pass| (pass.phase, pass.layers().map(layer).collect()))
        .collect()
}

#[test]
fn batches_a_prompt_without_timestamps_by_position() {
    let mut collector = Collector::new(u64::MAX, 2);
    // The rows are ordered by token. Layer 3 computes only the last token of the prompt.
    for token in 0..3 {
        for layer in [1, 3] {
            if layer == 1 || token == 2 {
                for slot in 0..2 {
                    let row = row(
                        layer,
                        token,
                        slot,
                        5 * token + u32::from(slot),
                        Phase::Prompt,
                    );
                    collector.routing(&row).unwrap();
                }
            }
        }
    }
    for layer in [1, 3] {
        for (slot, expert) in [7, 2].into_iter().enumerate() {
            let row = row(layer, 3, slot as u16, expert, Phase::Generate);
            collector.routing(&row).unwrap();
        }
    }
    let routes = collector.finish().unwrap();
    let one = |layer, token, ids: [u32; 2]| (layer, vec![token], ids.to_vec());
    let expected: PassList = vec![
        (Phase::Prompt, vec![(1, vec![0, 1], vec![0, 1, 5, 6])]),
        (
            Phase::Prompt,
            vec![one(1, 2, [10, 11]), one(3, 2, [10, 11])],
        ),
        (Phase::Generate, vec![one(1, 3, [7, 2]), one(3, 3, [7, 2])]),
    ];
    assert_eq!(list(&routes), expected);
    assert!(routes.has_uniform_weights());
    let weights: Vec<f32> = routes
        .passes()
        .flat_map(|p| p.layers())
        .flat_map(|l| l.weights)
        .copied()
        .collect();
    assert!(weights.iter().all(|&w| w == 0.5));
}

#[test]
fn orders_the_experts_of_a_token_by_slot() {
    let mut collector = Collector::new(u64::MAX, 2);
    for token in 0..2 {
        for (slot, expert) in [(2, 6), (0, 4), (1, 5)] {
            let mut row = row(1, token, slot, expert, Phase::Generate);
            row.weight = Some(expert as f32);
            collector.routing(&row).unwrap();
        }
    }
    let routes = collector.finish().unwrap();
    let pass = |token| (Phase::Generate, vec![(1, vec![token], vec![4, 5, 6])]);
    assert_eq!(list(&routes), [pass(0), pass(1)]);
    let mut layers = routes.passes().flat_map(|p| p.layers());
    assert!(layers.all(|layer| layer.weights == [4.0, 5.0, 6.0]));
}

#[test]
fn batches_rows_with_the_same_timestamp_across_sequences() {
    let mut collector = Collector::new(u64::MAX, 1);
    for (time, layer) in [(10, 0), (20, 1), (30, 0)] {
        for sequence in 0..2 {
            let row = RoutingRow {
                timestamp_ns: Some(time),
                sequence_id: Some(sequence),
                weight: Some(0.75),
                ..row(layer, 4, 0, sequence, Phase::Generate)
            };
            collector.routing(&row).unwrap();
        }
    }
    let routes = collector.finish().unwrap();
    let both = |layer| (layer, vec![4, 4], vec![0, 1]);
    let expected: PassList = vec![
        (Phase::Generate, vec![both(0), both(1)]),
        (Phase::Generate, vec![both(0)]),
    ];
    assert_eq!(list(&routes), expected);
    assert!(!routes.has_uniform_weights());
}

/// A prompt of an unknown sequence between the sequences 0 and 2.
#[test]
fn unknown_sequence_gets_an_unused_number() {
    let mut collector = Collector::new(u64::MAX, 8);
    for sequence_id in [Some(0), None, Some(2)] {
        for token in 0..2 {
            let row = RoutingRow {
                sequence_id,
                ..row(0, token, 0, token, Phase::Prompt)
            };
            collector.routing(&row).unwrap();
        }
    }
    let routes = collector.finish().unwrap();
    let sequences: Vec<u32> = routes.passes().map(|pass| pass.sequence_id).collect();
    assert_eq!(sequences, [0, 1, 2]);
    let pass = (Phase::Prompt, vec![(0, vec![0, 1], vec![0, 1])]);
    assert_eq!(list(&routes), [pass.clone(), pass.clone(), pass]);
}

/// Two sequences in one pass; the last layer computes a token of the second one only.
#[test]
fn a_pass_may_have_tokens_of_several_sequences() {
    let mut collector = Collector::new(u64::MAX, 8);
    for (layer, sequences) in [(0, 0..2), (1, 0..2), (2, 1..2)] {
        for sequence in sequences {
            let row = RoutingRow {
                sequence_id: Some(sequence),
                timestamp_ns: Some(7 + u64::from(layer)),
                ..row(layer, 5, 0, sequence, Phase::Generate)
            };
            collector.routing(&row).unwrap();
        }
    }
    let routes = collector.finish().unwrap();
    let passes: Vec<Vec<usize>> = routes
        .passes()
        .map(|pass| pass.layers().map(|layer| layer.positions.len()).collect())
        .collect();
    assert_eq!(passes, [[2, 2, 1]]);
}

#[test]
fn stops_at_the_end_of_the_pass_with_the_last_token() {
    let count = |max_tokens| {
        let mut collector = Collector::new(max_tokens, 512);
        for token in 0..5 {
            let phase = if token < 3 {
                Phase::Prompt
            } else {
                Phase::Generate
            };
            for layer in 0..2 {
                collector.routing(&row(layer, token, 0, 0, phase)).unwrap();
            }
        }
        let routes = collector.finish().unwrap();
        let rows = |pass: RoutedPass| pass.layers().map(|l| l.positions.len()).collect::<Vec<_>>();
        routes.passes().map(rows).collect::<Vec<_>>()
    };
    assert_eq!(count(1), [[3, 3]]);
    assert_eq!(count(3), [[3, 3]]);
    assert_eq!(count(4), [[3, 3], [1, 1]]);
    assert_eq!(count(99), [[3, 3], [1, 1], [1, 1]]);
}

/// In models with a list as `expert_used_count`, layers have different numbers of experts.
#[test]
fn layers_may_have_different_numbers_of_experts() {
    let mut collector = Collector::new(9, 9);
    for token in 0..2 {
        for layer in 1..4 {
            for slot in 0..layer {
                let row = row(layer, token, slot, u32::from(slot) + 5, Phase::Generate);
                collector.routing(&row).unwrap();
            }
        }
    }
    let routes = collector.finish().unwrap();
    assert_eq!(
        *routes.n_expert_used(),
        [1, 2, 3].map(|k| (LayerId(k), usize::from(k))).into()
    );
    let pass = |token| {
        let layers = [(1, vec![5]), (2, vec![5, 6]), (3, vec![5, 6, 7])];
        let layers = layers.map(|(layer, ids)| (layer, vec![token], ids));
        (Phase::Generate, layers.to_vec())
    };
    assert_eq!(list(&routes), [pass(0), pass(1)]);
    let layers = routes.passes().flat_map(|pass| pass.layers());
    let sizes: Vec<_> = layers.map(|l| (l.k, l.weights.len())).collect();
    assert_eq!(sizes, [(1, 1), (2, 2), (3, 3), (1, 1), (2, 2), (3, 3)]);
}

#[test]
fn rejects_tokens_with_missing_or_repeated_experts() {
    let mut collector = Collector::new(9, 9);
    for (token, slot) in [(0, 0), (0, 1), (1, 0)] {
        let row = row(0, token, slot, slot.into(), Phase::Generate);
        collector.routing(&row).unwrap();
    }
    let error = collector.finish().unwrap_err();
    assert!(
        matches!(
            error,
            Error::UnevenToken {
                layer: LayerId(0),
                position: TokenId(1),
                found: 1,
                expected: 2
            }
        ),
        "{error}"
    );
    let mut collector = Collector::new(9, 9);
    collector
        .routing(&row(0, 0, 0, 3, Phase::Generate))
        .unwrap();
    assert!(
        collector
            .routing(&row(0, 0, 1, 3, Phase::Generate))
            .is_err()
    );
}

fn fixture(name: &str) -> Gguf {
    Gguf::open(moe_testkit::fixture(name)).unwrap()
}

/// Tokens that a layer computes together, each with its experts.
fn routes(layer: u16, tokens: &[(u32, &[u32])]) -> Routes {
    let mut collector = Collector::new(u64::MAX, 1);
    for (token, experts) in tokens {
        for (slot, &expert) in experts.iter().enumerate() {
            let weight = Some(0.5 / (1 + slot) as f32);
            let row = RoutingRow {
                weight,
                timestamp_ns: Some(1 + u64::from(layer)),
                ..row(layer, *token, slot as u16, expert, Phase::Prompt)
            };
            collector.routing(&row).unwrap();
        }
    }
    collector.finish().unwrap()
}

/// The output of the last layer of `routes`, and the results of all layers.
fn output(model: &Model, routes: &Routes, seed: u64) -> Result<(Vec<f32>, Vec<Ran>)> {
    let threads = Threads::new(1)?;
    let recorder = Recorder::new(None).with_mode(Mode::Experts);
    let mut replay = Replay::new(model, &threads, Devices::cpu(), recorder, seed);
    let mut ran = Vec::new();
    for pass in routes.passes() {
        ran.extend(replay.run(&pass)?);
    }
    Ok((replay.out.data().to_vec(), ran))
}

/// A replay of the router's own decisions yields the output of the layer with its router.
#[test]
fn replayed_layer_yields_the_output_of_a_session() {
    for name in ["tiny-gpt-oss-MXFP4.gguf", "random-qwen2moe-F16.gguf"] {
        let gguf = fixture(name);
        let model = Model::load(&gguf).unwrap();
        let threads = Threads::new(1).unwrap();
        let hp = model.hparams();
        let (layer, seed, k) = (LayerId(2), 5, hp.n_expert_used);

        let mut ops = Ops::new(&threads, Recorder::new(None), Devices::cpu());
        ops.positions = vec![0, 1, 2];
        let mut x = Activation::new(2);
        x.shape(NodeName::of("ffn_norm", layer), hp.n_embd, 3);
        for (row, position) in x.data_mut().chunks_mut(hp.n_embd).zip(0..) {
            activations::fill(row, seed, TokenId(position));
        }
        let (mut state, mut out) = (MoeState::new(64), Activation::new(3));
        let moe = model.decoder.moe(layer).unwrap();
        let at = ops.at(layer);
        moe.forward(&mut ops, at.device, &mut state, &mut x, &mut out);
        let (ids, weights) = (state.routing().ids.host(), state.routing().weights.host());

        let mut routes = Routes::default();
        let ids: Vec<ExpertId> = ids.iter().map(|&id| id.try_into().unwrap()).collect();
        let rows = ids.chunks(k).zip(weights.chunks(k)).zip(0..);
        let rows = rows.map(|((ids, weights), position)| (TokenId(position), ids, weights));
        routes.push((Some(0), Phase::Prompt), layer, rows);
        let (replayed, ran) = output(&model, &routes, seed).unwrap();
        assert_eq!(replayed, out.data(), "{name}");
        assert_eq!(ran[0].lanes[usize::from(lane::CPU)], 3 * k as u64);
        assert_ne!(output(&model, &routes, seed + 1).unwrap().0, replayed);
    }
}

#[test]
fn counts_the_bytes_of_distinct_experts() {
    let gguf = fixture("tiny-qwen3moe-Q4_K_M.gguf");
    let model = Model::load(&gguf).unwrap();
    // Gate and up of 64 × 256 in Q4_K (9216 bytes each), down in Q8_0 (17408).
    let (_, ran) = output(&model, &routes(2, &[(0, &[1, 2, 3]), (1, &[3, 2, 9])]), 0).unwrap();
    assert_eq!((ran[0].n_tokens, ran[0].bytes), (2, 4 * 35_840));
    // The number of experts per token may differ from that of the model.
    let (_, ran) = output(&model, &routes(2, &[(0, &[1, 2, 3, 4, 5, 6])]), 0).unwrap();
    assert_eq!(ran[0].bytes, 6 * 35_840);
    let error = output(&model, &routes(2, &[(7, &[1, 32])]), 0).unwrap_err();
    assert!(
        matches!(
            error,
            Error::ExpertOutOfRange {
                position: TokenId(7),
                expert: ExpertId(32),
                n_expert: 32,
                ..
            }
        ),
        "{error}"
    );
}

/// A hot cache changes where experts are computed, not the output.
#[test]
fn replay_with_a_hot_cache_yields_the_output_without_one() {
    let gguf = fixture("random-gpt-oss-F16.gguf");
    let model = Model::load(&gguf).unwrap();
    let routes = routes(1, &[(0, &[1, 2, 3]), (1, &[3, 2, 0]), (2, &[1, 0, 5])]);
    let expected = output(&model, &routes, 8).unwrap().0;
    let threads = Threads::new(2).unwrap();
    let recorder = Recorder::new(None);
    let mut replay = Replay::new(&model, &threads, Devices::cpu(), recorder, 8);
    let lane = LaneContents {
        device: DeviceId::Cpu,
        experts: [(LayerId(1), vec![ExpertId(3), ExpertId(1)])].into(),
    };
    let report = replay
        .expert_cache()
        .enable_hot_cache(&[lane], PerfMode::Full);
    report.unwrap();
    let pass = routes.passes().next().unwrap();
    let ran = replay.run(&pass).unwrap();
    assert_eq!(replay.out.data(), expected);
    assert_eq!(ran[0].lanes[usize::from(lane::HOT_CACHE)], 4);
    assert_eq!(ran[0].lanes[usize::from(lane::CPU)], 5);
    let cache = replay.expert_cache();
    let counters = cache.hot_cache().unwrap().counters().lock();
    assert_eq!((counters.hot_slots(), counters.cold_slots()), (4, 5));
    assert_eq!(counters.selections(LayerId(1), ExpertId(3)), (2, 0));
}
