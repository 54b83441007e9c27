//! Windows, speeds and break-even batch sizes, compared with manually computed values.

use moe_analysis::simulate::{
    BatchTime, Batches, Collector, ExpertTime, MAX_BATCH, Machine, Offload, Outcome, PolicyResult,
};
use moe_placement::cache::{OnlinePolicy, PolicyName};
use moe_trace::{ExpertId, LayerId, Phase, RoutingRow, Sink, TokenId};

/// A token routed in a layer: time, layer, phase, experts.
type Routed = (Option<u64>, u16, Phase, [u32; 2]);

/// Batches of a model with experts of 5 bytes.
fn batches(routed: &[Routed], n_layer: u16, n_expert: u32) -> Batches {
    let mut collector = Collector::new();
    for (&(timestamp_ns, layer_id, phase, experts), token) in routed.iter().zip(0..) {
        for (expert_id, slot) in experts.into_iter().zip(0..) {
            let row = RoutingRow {
                token_id: TokenId(token),
                phase: Some(phase),
                slot,
                expert_id: ExpertId(expert_id),
                timestamp_ns,
                ..RoutingRow::at_layer(LayerId(layer_id))
            };
            collector.routing(&row).unwrap();
        }
    }
    let keys =
        (0..n_layer).flat_map(|layer| (0..n_expert).map(move |e| (LayerId(layer), ExpertId(e), 5)));
    collector.finish(&keys.collect()).unwrap()
}

/// Ten tokens in three layers.
fn ten_tokens() -> Batches {
    let routed: Vec<Routed> = (0..30)
        .map(|i| (Some(1 + i), (i % 3) as u16, Phase::Generate, [0, 1]))
        .collect();
    batches(&routed, 3, 8)
}

fn row(policy: PolicyName) -> PolicyResult {
    PolicyResult {
        budget: 0,
        policy,
        outcome: Outcome {
            look_ups: [0, 60, 0],
            hits: [0, 40, 0],
            read_bytes: [7, 100, 0],
            ..Outcome::default()
        },
    }
}

const LRU: PolicyName = PolicyName::Shared(OnlinePolicy::Lru);

const MACHINE: Machine = Machine {
    link_bytes_per_s: 100.0,
    link_latency_s: 0.05,
    ssd_bytes_per_s: None,
    memory_bytes_per_s: Some(200.0),
    device: None,
    cpu: None,
    dense_bytes: 10,
    other_s: 0.1,
};

fn same_for_all(seconds: f64) -> Option<ExpertTime> {
    Some(ExpertTime {
        first_s: seconds,
        next_s: seconds,
    })
}

/// Times of a token with a machine and a policy: `(without overlap, with perfect overlap)`.
fn times(machine: &Machine, policy: PolicyName) -> (f64, f64) {
    let speed = machine
        .speed(&ten_tokens().workload(), &row(policy))
        .unwrap();
    (1.0 / speed.tokens_s_min, 1.0 / speed.tokens_s_max)
}

#[track_caller]
fn close(got: (f64, f64), expected: (f64, f64)) {
    let is_close = (got.0 - expected.0).abs() < 1e-9 && (got.1 - expected.1).abs() < 1e-9;
    assert!(is_close, "{got:?}, not {expected:?}");
}

/// Ten tokens that need 30 bytes of experts each. 100 bytes in 20 misses are read over the interconnect.
#[test]
fn token_time_contains_loads_and_computation() {
    // Loads: 10 bytes at 100 bytes/s and two latencies, 0.2 s. Computation: 40 bytes at 200 bytes/s and 0.1 s, 0.3 s.
    close(times(&MACHINE, LRU), (0.5, 0.3));
    let speed = MACHINE.speed(&ten_tokens().workload(), &row(LRU)).unwrap();
    let (min, max) = speed.s_mbu_pct.unwrap();
    // 40 bytes in 0.5 s and in 0.3 s, of the 100 and 60 bytes that the memory can read in these times.
    close((min, max), (40.0, 200.0 / 3.0));

    let prompt = batches(&[(None, 0, Phase::Prompt, [1, 2])], 1, 8);
    assert_eq!(MACHINE.speed(&prompt.workload(), &row(LRU)), None);
}

#[test]
fn reads_from_ssd_also_use_the_interconnect() {
    let machine = Machine {
        ssd_bytes_per_s: Some(20.0),
        ..MACHINE
    };
    close(times(&machine, LRU), (1.0, 0.5));
}

#[test]
fn expert_time_replaces_expert_bytes() {
    let machine = Machine {
        device: same_for_all(0.1),
        ..MACHINE
    };
    // Six experts of 0.1 s, 0.05 s for the dense part, 0.1 s of other time, and the loads.
    close(times(&machine, LRU), (0.95, 0.75));
}

/// With static policies, the CPU computes the two missing experts of a token, and the device the other four (20 bytes).
#[test]
fn static_policies_compute_missing_experts_on_cpu() {
    let machine = Machine {
        cpu: same_for_all(0.2),
        ..MACHINE
    };
    close(times(&machine, LRU), (0.5, 0.3));
    close(times(&machine, PolicyName::HotCache), (0.65, 0.4));
    // Without the CPU time, the missing experts are read at the bandwidth of the interconnect.
    close(times(&MACHINE, PolicyName::HotCache), (0.5, 0.3));
    let workload = ten_tokens().workload();
    let without = machine.speed_without_cache(&workload).unwrap();
    // Six experts of 0.2 s on the CPU, 10 bytes and 0.1 s on the device.
    close(
        (1.0 / without.tokens_s_min, 1.0 / without.tokens_s_max),
        (1.35, 1.2),
    );
    assert!(without.is_no_better_than(&machine.speed(&workload, &row(LRU)).unwrap()));
    assert_eq!(MACHINE.speed_without_cache(&workload), None);
}

/// Two layers, in which each token selects experts 0 and 1, or 0 and 2.
fn shared() -> Batches {
    let routed: Vec<Routed> = (0..40u64)
        .map(|i| {
            (
                Some(1 + i),
                (i % 2) as u16,
                Phase::Generate,
                [0, 1 + (i as u32 / 2) % 2],
            )
        })
        .collect();
    batches(&routed, 2, 4)
}

#[test]
fn batch_time_depends_on_distinct_experts() {
    let machine = Machine {
        link_latency_s: 0.0,
        cpu: Some(ExpertTime {
            first_s: 0.03,
            next_s: 0.02,
        }),
        device: Some(ExpertTime {
            first_s: 0.01,
            next_s: 0.0,
        }),
        ..MACHINE
    };
    let offload = Offload::new(&shared(), &machine).unwrap();
    // Three tokens use expert 0 with certainty and the others with probability 7 / 8: 2.75 per layer, 12 selections in all.
    let time = offload.time(3);
    assert!((time.distinct - 5.5).abs() < 1e-9);
    close(
        (time.cpu_s, time.load_s),
        (5.5 * 0.03 + 6.5 * 0.02, 27.5 / 100.0),
    );
    close((time.device_s, time.offload_max_s()), (0.055, 0.33));
    // Loads take 0.05 s per expert. CPU: 0.01 D + 0.08 B. Copies: 0.05 D, with computation 0.06 D. D is 5.5 for B = 3, 4 for
    // B = 1.
    assert_eq!(offload.crossover(BatchTime::offload_min_s), Some(3));
    assert_eq!(offload.crossover(BatchTime::offload_max_s), Some(4));

    let slow = Machine {
        link_bytes_per_s: 1e-6,
        ..machine
    };
    let offload = Offload::new(&shared(), &slow).unwrap();
    assert_eq!(offload.crossover(BatchTime::offload_min_s), None);
    let fast = Machine {
        link_bytes_per_s: 1e9,
        ..machine
    };
    let offload = Offload::new(&shared(), &fast).unwrap();
    assert_eq!(offload.crossover(BatchTime::offload_max_s), Some(1));
    assert!(Offload::new(&shared(), &MACHINE).is_none());
}

/// The bisection must find the same batch size as a linear search.
#[test]
fn crossover_is_smallest_faster_batch() {
    for link_bytes_per_s in [1.0, 5.0, 20.0, 50.0, 90.0, 300.0, 2000.0] {
        let machine = Machine {
            link_bytes_per_s,
            cpu: same_for_all(0.02),
            ..MACHINE
        };
        let offload = Offload::new(&shared(), &machine).unwrap();
        for of in [BatchTime::offload_min_s, BatchTime::offload_max_s] {
            let tried = (1..=MAX_BATCH).find(|&n| {
                let time = offload.time(n);
                of(&time) <= time.cpu_s
            });
            assert_eq!(offload.crossover(of), tried, "{link_bytes_per_s}");
        }
    }
}

/// Two tokens in three layers. A prompt between them and the third token interrupts the measurement.
#[test]
fn window_is_time_to_next_routing() {
    const S: u64 = 1_000_000_000;
    let at = |time: u64, layer: u16| (Some(time * S), layer, Phase::Generate, [0, 1]);
    let routed = [
        at(10, 0),
        at(11, 1),
        at(13, 2),
        at(20, 0),
        at(23, 1),
        at(27, 2),
        (Some(100 * S), 0, Phase::Prompt, [0, 1]),
        at(200, 0),
    ];
    let batched = batches(&routed, 3, 2);
    assert_eq!(batched.windows_s(), Some(&[2.0, 3.0, 7.0][..]));
    // No routing follows layer 2, so it has the mean of the others.
    let batched = batches(&routed[..3], 3, 2);
    assert_eq!(batched.windows_s(), Some(&[1.0, 2.0, 1.5][..]));
    let untimed = routed.map(|(_, layer, phase, experts)| (None, layer, phase, experts));
    assert_eq!(batches(&untimed, 3, 2).windows_s(), None);
    assert_eq!(batches(&routed[6..], 3, 2).windows_s(), None);
}
