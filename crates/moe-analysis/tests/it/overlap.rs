//! Overlap figures, compared with manually computed values.

use moe_analysis::overlap::{self, MemoryTraffic, OverlapReport, OverlapVerdict};
use moe_gguf::GgmlType;
use moe_gguf::map::{Category, MapRow, OffsetMap, Projection};
use moe_trace::transfers::{Span, Transfer};
use moe_trace::{ExpertId, LayerId, Phase, TokenId};

/// A timestamp with more digits than an f64 can represent.
const CLOCK: u64 = 1_800_000_000_000_000_001;

fn span((start, end): (u64, u64)) -> Span {
    Span {
        start_ns: CLOCK + start,
        end_ns: CLOCK + end,
    }
}

type Times = (u64, u64);

/// An evaluation of a layer with four selected experts. Times are relative to [`CLOCK`].
fn run(
    (token_id, layer_id): (u32, u16),
    (n_fetched, bytes): (u32, u64),
    window: Times,
    transfer: Option<Times>,
    product: Option<Times>,
) -> Transfer {
    Transfer {
        sequence_id: 0,
        token_id: TokenId(token_id),
        phase: Phase::Generate,
        layer_id: LayerId(layer_id),
        n_tokens: 1,
        n_experts: 4,
        n_fetched,
        bytes,
        transfer: transfer.map(span),
        window: span(window),
        product: product.map(span),
    }
}

/// Three passes of two layers. In layer 0 transfers start late; in layer 1 windows are too short.
fn example() -> Vec<Transfer> {
    let (of, none) = (Some, None);
    vec![
        run(
            (7, 0),
            (4, 8000),
            (1000, 2000),
            of((1100, 1500)),
            of((2010, 2030)),
        ),
        run(
            (7, 1),
            (4, 4000),
            (3000, 3100),
            of((2990, 3390)),
            of((3400, 3410)),
        ),
        run(
            (8, 0),
            (3, 12000),
            (11000, 12000),
            of((11800, 12600)),
            of((12610, 12650)),
        ),
        run(
            (8, 1),
            (4, 4000),
            (13000, 13100),
            of((13000, 13400)),
            of((13400, 13410)),
        ),
        run((9, 0), (0, 0), (21000, 21500), none, none),
        run(
            (9, 1),
            (4, 3000),
            (23000, 23100),
            of((23200, 23500)),
            of((23510, 23520)),
        ),
    ]
}

fn generated(transfers: &[Transfer], memory: &MemoryTraffic) -> OverlapReport {
    overlap::report(transfers, Phase::Generate, memory).unwrap()
}

#[track_caller]
fn assert_close(found: Option<f64>, expected: f64) {
    let found = found.expect("a figure");
    let scale = expected.abs().max(1.0);
    assert!(
        (found - expected).abs() < 1e-9 * scale,
        "{found} {expected}"
    );
}

#[test]
fn late_transfers_are_missed() {
    let report = generated(&example(), &MemoryTraffic::default());
    assert_eq!(report.passes, 3);
    assert_eq!(
        report.layers.keys().copied().collect::<Vec<_>>(),
        [LayerId(0), LayerId(1)]
    );
    let layer = &report.layers[&LayerId(0)];
    assert_eq!(
        (layer.evaluations, layer.n_experts, layer.n_fetched),
        (3, 12, 7)
    );
    assert_eq!(layer.bytes, 20_000);
    assert_close(layer.fallback_rate(), 5.0 / 12.0);
    // Windows of 1000, 1000 and 500 ns.
    assert_close(layer.window.mean_ns(), 2500.0 / 3.0);
    assert_close(Some(layer.window.p95_ns), 1000.0);
    // Transfers of 400 and 800 ns; 400 and 200 ns are within their windows.
    assert_eq!(layer.transfer.n, 2);
    assert_close(layer.transfer.mean_ns(), 600.0);
    assert_close(Some(layer.transfer.p95_ns), 780.0);
    assert_close(layer.hidden_share(), 0.5);
    assert_close(layer.hideable_share(), 1.0);
    assert_close(layer.fitting_share(), 1.0);
    // Stalls of 0 and 600 ns.
    assert_close(layer.stall.mean_ns(), 300.0);
    assert_close(Some(layer.stall.p95_ns), 570.0);
    // Delays of 100 and 800 ns.
    assert_close(layer.mean_delay_ns(), 450.0);
    assert_close(layer.product.mean_ns(), 30.0);
    assert_close(layer.link_bytes_per_s(), 20_000.0 / 1200e-9);
    assert_eq!(layer.memory_share(), None);
    assert_eq!(layer.gate_up_bytes_per_s(), None);
    let verdict = OverlapVerdict::Missed {
        hideable: 1.0,
        hidden: 0.5,
        delay_ns: 450.0,
    };
    assert_eq!((layer.verdict(), verdict.name()), (verdict, "missed"));
}

#[test]
fn long_transfers_cannot_be_hidden() {
    let layer = &generated(&example(), &MemoryTraffic::default()).layers[&LayerId(1)];
    // Transfers of 400, 400 and 300 ns with windows of 100 ns: 100, 100 and 0 ns are hidden, 100 ns each are hideable.
    assert_close(layer.hidden_share(), 200.0 / 1100.0);
    assert_close(layer.hideable_share(), 300.0 / 1100.0);
    assert_close(layer.fitting_share(), 0.0);
    // Stalls of 290, 300 and 400 ns. The last transfer starts after its window.
    assert_close(layer.stall.mean_ns(), 330.0);
    assert_close(Some(layer.stall.p95_ns), 390.0);
    // Delays of -10, 0 and 200 ns.
    assert_close(layer.mean_delay_ns(), 190.0 / 3.0);
    assert_close(layer.fallback_rate(), 0.0);
    let verdict = layer.verdict();
    assert_eq!(verdict.name(), "too_long");
    assert!(
        matches!(verdict, OverlapVerdict::TooLong { .. }),
        "{verdict}"
    );
}

#[test]
fn sums_over_all_layers() {
    let all = generated(&example(), &MemoryTraffic::default()).all;
    assert_eq!((all.evaluations, all.n_experts, all.n_fetched), (6, 24, 19));
    assert_eq!(all.bytes, 31_000);
    assert_close(all.hidden_share(), 800.0 / 2300.0);
    assert_close(all.hideable_share(), 1500.0 / 2300.0);
    assert_close(all.fitting_share(), 2.0 / 5.0);
    assert_close(all.link_bytes_per_s(), 31_000.0 / 2300e-9);
    assert_close(all.stall.mean_ns(), 1590.0 / 5.0);
}

#[test]
fn verdict_depends_on_memory_bandwidth() {
    let transfers = vec![run((0, 0), (4, 8000), (0, 1000), Some((0, 400)), None)];
    let verdict = |gate_up: f64, gb_s: Option<f64>| {
        let memory = MemoryTraffic {
            gate_up_bytes: [(LayerId(0), gate_up)].into(),
            memory_bytes_per_s: gb_s.map(|gb_s| gb_s * 1e9),
        };
        let all = generated(&transfers, &memory).all;
        (
            all.memory_share(),
            all.memory_share_with_transfers(),
            all.verdict(),
        )
    };
    // 4 experts of 5000 bytes in 1 µs are 20 GB/s, with the 8000 bytes transferred in this time 28 GB/s.
    let (alone, together, found) = verdict(5000.0, Some(40.0));
    assert_close(alone, 0.5);
    assert_close(together, 0.7);
    assert_eq!(found, OverlapVerdict::Hidden { hidden: 1.0 });
    let (alone, together, found) = verdict(5000.0, Some(30.0));
    assert_close(alone, 2.0 / 3.0);
    assert_close(together, 28.0 / 30.0);
    assert_eq!(found.name(), "bandwidth_saturated");
    assert!(
        matches!(found, OverlapVerdict::BandwidthSaturated { memory, .. } if Some(memory) == together)
    );
    let (alone, together, found) = verdict(5000.0, Some(22.0));
    assert_close(alone, 20.0 / 22.0);
    assert_close(together, 28.0 / 22.0);
    assert_eq!(found.name(), "no_gain");
    assert!(matches!(found, OverlapVerdict::NoGain { memory, .. } if Some(memory) == alone));
    let (alone, together, found) = verdict(5000.0, None);
    assert_eq!((alone, together, found.name()), (None, None, "hidden"));
}

#[test]
fn pass_without_transfers_has_no_shares() {
    let transfers = vec![run((0, 0), (0, 0), (0, 1000), None, None)];
    let all = generated(&transfers, &MemoryTraffic::default()).all;
    assert_eq!((all.hidden_share(), all.link_bytes_per_s()), (None, None));
    assert_close(all.fallback_rate(), 1.0);
    assert_eq!(all.verdict(), OverlapVerdict::NoTransfers);
    assert_eq!(
        overlap::report(&transfers, Phase::Prompt, &MemoryTraffic::default()),
        None
    );
    assert_eq!(
        overlap::report(&[], Phase::Generate, &MemoryTraffic::default()),
        None
    );
}

/// A damaged file may contain any numbers.
#[test]
fn largest_numbers_do_not_overflow() {
    let mut transfer = run((0, 0), (4, u64::MAX), (0, 0), None, None);
    transfer.window = Span {
        start_ns: 0,
        end_ns: u64::MAX,
    };
    transfer.transfer = Some(transfer.window);
    transfer.n_experts = u32::MAX;
    let all = generated(&[transfer.clone(), transfer], &MemoryTraffic::default()).all;
    assert_close(all.hidden_share(), 1.0);
    assert_eq!(all.bytes, u64::MAX);
}

#[test]
fn new_pass_starts_when_layer_number_does_not_increase() {
    let mut transfers = example();
    // The same token again, as in a replay; then another request at the same position.
    transfers.extend_from_within(4..6);
    transfers.extend_from_within(4..6);
    transfers[8].sequence_id = 1;
    transfers[9].sequence_id = 1;
    let passes = overlap::passes(&transfers);
    assert_eq!(
        passes.iter().map(|pass| pass.len()).collect::<Vec<_>>(),
        [2; 5]
    );
    assert_eq!(generated(&transfers, &MemoryTraffic::default()).passes, 5);
}

#[test]
fn median_pass_has_median_duration() {
    let transfers = example();
    let passes = overlap::passes(&transfers);
    // 1000 to 3410, 11000 to 13410, 21000 to 23520 ns.
    assert_eq!(overlap::bounds(passes[2]), Some(span((21000, 23520))));
    assert_eq!(overlap::median_pass(&passes), Some(1));
    assert_eq!(overlap::median_pass(&passes[1..]), Some(0));
    assert_eq!(overlap::median_pass(&[]), None);
    assert_eq!(overlap::bounds(&[]), None);
}

#[test]
fn gate_up_bytes_counts_parts_of_experts_only() {
    let row = |layer: u16, projection, category, expert: Option<u32>, size_bytes| MapRow {
        file: 0,
        tensor: "blk.0.ffn_gate_exps.bias".into(),
        tensor_idx: 0,
        expert_id: expert.map(ExpertId),
        layer_id: Some(LayerId(layer)),
        projection: Some(projection),
        category,
        ty: GgmlType::F32,
        ne: [1; 4],
        file_offset: 0,
        size_bytes,
    };
    use Category::{Expert, ExpertBias, SharedExpert};
    use Projection::{Down, Gate, GateUp, Up};
    let rows = vec![
        row(0, Gate, Expert, Some(0), 100),
        row(0, Gate, Expert, Some(1), 100),
        row(0, Up, Expert, Some(0), 150),
        row(0, Up, Expert, Some(1), 150),
        row(0, Down, Expert, Some(0), 999),
        row(0, Down, Expert, Some(1), 999),
        row(0, Gate, ExpertBias, None, 40),
        row(0, Up, SharedExpert, None, 999),
        row(5, GateUp, Expert, Some(0), 70),
        row(5, Down, Expert, Some(0), 999),
        // A duplicate of a fused projection, and a layer without a down projection, which has no experts.
        row(5, Gate, Expert, Some(0), 35),
        row(7, GateUp, Expert, Some(0), 70),
        row(6, Down, Expert, Some(0), 999),
    ];
    let bytes = overlap::gate_up_bytes(&OffsetMap { rows });
    // (2 × 100 + 2 × 150 + 40) / 2
    assert_eq!(bytes, [(LayerId(0), 270.0), (LayerId(5), 70.0)].into());
}
