//! The report of counters, in the schema of learn files. Keys and their order are those of the fork.

use std::array::from_fn;

use moe_ids::{ExpertId, LayerId};
use serde_json::{Map, Value, json};

use super::PerfMode;
use super::counters::Counters;
use super::layer::{LayerCounters, LayerTimes};
use crate::learn::{LearnFile, SCHEMA};
use crate::plan::MAX_LANES;

impl Counters {
    /// The report of the counters: the learn file that the fork writes for them. If the mode is [`PerfMode::Off`], it says
    /// so and has no layers.
    ///
    /// Omits layers that were not called. Times are averages over the timed calls of a layer, in µs; in `summary`, over those of
    /// all layers.
    pub fn to_learn_file(&self) -> LearnFile {
        if self.mode == PerfMode::Off {
            return LearnFile::from_root(object(json!({
                "enabled": false, "mode": self.mode.name(), "schema": SCHEMA, "layers": [],
            })));
        }
        let is_full = self.mode == PerfMode::Full;
        let layers = self.layers.iter().filter(|(_, layer)| !layer.is_empty());
        let parts = layers.clone().map(|(_, layer)| Totals::of(layer));
        let all = parts.fold(Totals::default(), Totals::plus);
        let layers = layers.map(|(&id, layer)| layer_report(id, layer, is_full));
        LearnFile::from_root(object(json!({
            "enabled": true,
            "mode": self.mode.name(),
            "schema": SCHEMA,
            "n_expert": self.n_expert,
            "n_expert_used": self.n_expert_used,
            "updates": self.updates,
            "overflow_resets": self.overflow_resets,
            "summary": all.summary(is_full),
            "layers": layers.collect::<Vec<_>>(),
        })))
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        _ => Map::new(),
    }
}

/// Values that `summary` and each layer report. Times are sums in ns, as `f64`: sums over layers cannot overflow.
#[derive(Default)]
struct Totals {
    calls: u64,
    hot_slots: [u64; MAX_LANES],
    cold_slots: u64,
    times: [f64; N_TIMES],
    timed_calls: u64,
    hot_launches: u64,
    cold_launches: u64,
    fallbacks: u64,
}

/// Keys of times without their suffix, in the order of the report, up to the keys of single lanes.
const TIMES: [&str; N_TIMES] = [
    "parallel_hot_lane_wall_time",
    "parallel_cold_lane_wall_time",
    "parallel_join_wait_time",
    "total_moe_time",
    "routing_time",
    "worklist_time",
    "merge_time",
    "hot0_branch_time",
    "hot1_branch_time",
    "hot2_branch_time",
    "parallel_region_wall_time",
    "parallel_overlap_estimate",
];
const N_TIMES: usize = 12;

impl Totals {
    fn of(layer: &LayerCounters) -> Totals {
        let LayerTimes {
            total,
            routing,
            worklist,
            hot_lanes,
            cold_lane,
            join_wait,
            region,
            merge,
        } = layer.times;
        let [hot0, hot1, hot2] = hot_lanes.map(|time| time as f64);
        let times = [cold_lane, join_wait, total, routing, worklist, merge].map(|time| time as f64);
        let [cold_lane, join_wait, total, routing, worklist, merge] = times;
        Totals {
            calls: layer.calls,
            hot_slots: layer.hot_slots,
            cold_slots: layer.cold_slots_total(),
            times: [
                hot0 + hot1 + hot2,
                cold_lane,
                join_wait,
                total,
                routing,
                worklist,
                merge,
                hot0,
                hot1,
                hot2,
                region as f64,
                layer.overlap as f64,
            ],
            timed_calls: layer.timed_calls,
            hot_launches: layer.hot_launches,
            cold_launches: layer.cold_launches,
            fallbacks: layer.fallbacks,
        }
    }

    fn plus(self, other: Totals) -> Totals {
        Totals {
            calls: self.calls.saturating_add(other.calls),
            hot_slots: from_fn(|lane| self.hot_slots[lane].saturating_add(other.hot_slots[lane])),
            cold_slots: self.cold_slots.saturating_add(other.cold_slots),
            times: from_fn(|time| self.times[time] + other.times[time]),
            timed_calls: self.timed_calls.saturating_add(other.timed_calls),
            hot_launches: self.hot_launches.saturating_add(other.hot_launches),
            cold_launches: self.cold_launches.saturating_add(other.cold_launches),
            fallbacks: self.fallbacks.saturating_add(other.fallbacks),
        }
    }

    fn hot_slots_total(&self) -> u64 {
        self.hot_slots.iter().copied().fold(0, u64::saturating_add)
    }

    fn hot_slot_ratio(&self) -> f64 {
        let hot = self.hot_slots_total();
        ratio(hot as f64, hot.saturating_add(self.cold_slots))
    }

    fn summary(&self, is_full: bool) -> Map<String, Value> {
        let mut keys = Map::new();
        keys.insert("layer_calls".into(), self.calls.into());
        keys.insert("hot_slot_ratio".into(), self.hot_slot_ratio().into());
        self.write_lanes(&mut keys);
        if is_full {
            self.write_times(&mut keys);
            keys.insert("parallel_hot_launches".into(), self.hot_launches.into());
            keys.insert("parallel_cold_launches".into(), self.cold_launches.into());
            keys.insert("parallel_fallbacks".into(), self.fallbacks.into());
        }
        keys
    }

    fn write_lanes(&self, keys: &mut Map<String, Value>) {
        for (lane, &slots) in self.hot_slots.iter().enumerate() {
            keys.insert(format!("hot{lane}_slots_total"), slots.into());
            let per_call = ratio(slots as f64, self.calls);
            keys.insert(format!("hot{lane}_slots_per_call"), per_call.into());
        }
    }

    fn write_times(&self, keys: &mut Map<String, Value>) {
        for (key, ns) in TIMES.into_iter().zip(self.times) {
            let us = ratio(ns / 1000.0, self.timed_calls);
            keys.insert(format!("{key}_per_call_us"), us.into());
        }
    }
}

fn ratio(value: f64, of: u64) -> f64 {
    if of > 0 { value / of as f64 } else { 0.0 }
}

fn layer_report(id: LayerId, layer: &LayerCounters, is_full: bool) -> Value {
    let totals = Totals::of(layer);
    let hot = totals.hot_slots_total();
    let mut keys = object(json!({
        "layer": id,
        "calls": layer.calls,
        "hot_slots_total": hot,
        "cold_slots_total": totals.cold_slots,
        "hot_slots_per_call": ratio(hot as f64, layer.calls),
        "cold_slots_per_call": ratio(totals.cold_slots as f64, layer.calls),
    }));
    totals.write_lanes(&mut keys);
    keys.insert("hot_slot_ratio".into(), totals.hot_slot_ratio().into());
    if is_full {
        totals.write_times(&mut keys);
        let cold_skips = layer.calls.saturating_sub(layer.cold_launches);
        for (key, count) in [
            ("parallel_hot_launches", layer.hot_launches),
            ("parallel_cold_launches", layer.cold_launches),
            ("parallel_hot_skips_zero", layer.hot_skips),
            ("parallel_cold_skips_zero", cold_skips),
            ("parallel_fallbacks", layer.fallbacks),
        ] {
            keys.insert(key.into(), count.into());
        }
        if layer.fallbacks > 0 {
            let reasons = json!({ "other": layer.fallbacks });
            keys.insert("parallel_fallback_reasons".into(), reasons);
        }
    }
    // A selection that both lanes counted is at most `slots`, which did not overflow.
    let both = layer.hot.iter().zip(&layer.cold);
    let both = both.map(|(hot, cold)| hot.saturating_add(*cold));
    keys.insert("experts".into(), pairs(both));
    keys.insert("hot_experts".into(), pairs(layer.hot.iter().copied()));
    keys.insert("cold_experts".into(), pairs(layer.cold.iter().copied()));
    Value::Object(keys)
}

/// `[[expert id, count], …]`: ids ascending, zeros omitted.
fn pairs(counts: impl Iterator<Item = u64>) -> Value {
    let pairs = (0..).map(ExpertId).zip(counts);
    let pairs = pairs.filter(|&(_, count)| count > 0);
    pairs.map(|pair| json!(pair)).collect()
}
