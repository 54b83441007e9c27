use super::*;

fn call(ids: &[i32]) -> LayerCall<'_> {
    LayerCall {
        layer: LayerId(1),
        ids,
        lanes: &[LaneIndex::Hot1],
        times: None,
    }
}

fn near_limit(limit: impl Fn(&mut LayerCounters)) -> Counters {
    let mut counters = Counters::new(PerfMode::Full, 4, 2);
    counters.start_pass();
    counters.add_call(&call(&[0, 1]));
    limit(counters.layers.get_mut(&LayerId(1)).unwrap());
    counters
}

/// After a restart, only the last call is counted.
fn assert_restarted(mut counters: Counters) {
    assert_eq!((counters.updates, counters.overflow_resets), (0, 1));
    assert_eq!((counters.hot_slots(), counters.cold_slots()), (1, 1));
    let (hot, cold) = (ExpertId(2), ExpertId(3));
    assert_eq!(counters.selections(LayerId(1), hot), (1, 0));
    assert_eq!(counters.selections(LayerId(1), cold), (0, 1));
    counters.reset();
    assert_eq!(counters.overflow_resets(), 1, "a reset keeps the number");
    assert_eq!(counters.hit_rate(), None);
}

#[test]
fn returns_the_selections_since_a_copy() {
    let call = |layer, ids| LayerCall {
        layer: LayerId(layer),
        ids,
        lanes: &[LaneIndex::Hot1],
        times: None,
    };
    let mut counters = Counters::new(PerfMode::Full, 4, 2);
    counters.start_pass();
    counters.add_call(&call(0, &[3, 1]));
    let earlier = counters.clone();
    counters.start_pass();
    counters.add_call(&call(0, &[3, 2]));
    counters.add_call(&call(5, &[0, 1]));
    let mut expected = Counters::new(PerfMode::Update, 4, 2);
    expected.start_pass();
    expected.add_call(&call(0, &[3, 2]));
    expected.add_call(&call(5, &[0, 1]));
    let since = counters.since(&earlier);
    let selections = |counters: &Counters| counters.to_learn_file().observations().unwrap();
    assert_eq!(selections(&since), selections(&expected));
    assert_eq!((since.updates, since.hot_slots()), (1, 2));
    assert!(selections(&counters.since(&counters)).is_empty());
    // A copy from before a restart has nothing in common with the counters.
    counters.reset();
    counters.start_pass();
    counters.add_call(&call(0, &[3, 2]));
    assert_eq!(counters.since(&earlier), counters);
}

#[test]
fn counts_the_slots_of_each_lane_over_all_layers() {
    let mut counters = Counters::new(PerfMode::Update, 4, 2);
    assert_eq!(counters.lane_slots(), [0; 4]);
    for layer in [1, 2] {
        counters.add_call(&LayerCall {
            layer: LayerId(layer),
            ids: &[0, 1, 2, 3, 0, 9],
            lanes: &[LaneIndex::Hot1, LaneIndex::Hot0, LaneIndex::Hot1],
            times: None,
        });
    }
    // The last id is not an expert.
    assert_eq!(counters.lane_slots(), [2, 4, 0, 4]);
    assert_eq!((counters.hot_slots(), counters.cold_slots()), (6, 4));
}

#[test]
fn restarts_before_calls_overflow() {
    let mut counters = near_limit(|layer| layer.calls = u64::MAX - 1);
    counters.add_call(&call(&[2]));
    assert_eq!(counters.overflow_resets, 0, "the limit is not reached");
    counters.add_call(&call(&[2, 3]));
    assert_restarted(counters);
}

#[test]
fn restarts_before_slots_overflow() {
    let mut counters = near_limit(|layer| {
        layer.slots = u64::MAX - 1;
        layer.hot_slots = [0, u64::MAX - 1, 0];
        layer.hot[2] = u64::MAX - 1;
    });
    counters.add_call(&call(&[2]));
    assert_eq!(counters.hot_slots(), u64::MAX);
    counters.add_call(&call(&[2, 3]));
    assert_restarted(counters);
}

#[test]
fn sum_restarts_before_it_overflows() {
    let full = near_limit(|layer| layer.calls = u64::MAX);
    let mut one = Counters::new(PerfMode::Full, 4, 2);
    one.add_call(&call(&[2, 3]));
    let mut sum = full.clone();
    sum.add(&one);
    assert_restarted(sum);
    let mut sum = one.clone();
    sum.add(&full);
    assert_eq!(sum.overflow_resets, 1);
    assert_eq!(sum.layers, full.layers);
}

#[test]
fn restarts_before_passes_overflow() {
    let mut counters = near_limit(|_| ());
    counters.updates = u64::MAX;
    counters.start_pass();
    assert_eq!((counters.updates, counters.overflow_resets), (1, 1));
    assert_eq!(counters.hit_rate(), None);
}

#[test]
fn restarts_before_times_or_fallbacks_overflow() {
    let mut counters = near_limit(|layer| {
        layer.times.total = u64::MAX;
        layer.fallbacks = u64::MAX;
    });
    counters.add_times(LayerId(1), &LayerTimes::default(), 1);
    assert_eq!(counters.overflow_resets, 0);
    let times = LayerTimes {
        total: 1,
        ..Default::default()
    };
    let mut other = counters.clone();
    counters.add_times(LayerId(1), &times, 1);
    assert_eq!(counters.overflow_resets, 1);
    assert_eq!(counters.layers[&LayerId(1)].times, times);
    other.add_fallback(LayerId(1));
    assert_eq!(other.overflow_resets, 1);
    assert_eq!(other.layers[&LayerId(1)].fallbacks, 1);
}
