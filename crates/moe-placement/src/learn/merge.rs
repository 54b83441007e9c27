//! Merging learn files of one model, and exponential decay of older files.
//!
//! - Counters are added.
//! - Averages per call (`…_per_call_us`, `…_slots_per_call`) are weighted by calls: the sum of both totals over the sum of
//!   both calls. Totals are rounded to thousandths, so the result does not depend on the order of the files. A file without
//!   the key contributes its calls with a total of 0.
//! - For every other key, the first file that contains it determines the value.

use std::collections::BTreeMap;

use moe_ids::LayerId;
use serde_json::{Map, Value, json};

use super::observations::{COUNT_KEYS, layer_id, unsigned};
use super::{Error, LearnFile};

type Object = Map<String, Value>;

/// How two values of a key are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// Add counters, or objects of counters.
    Sum,
    /// Average over calls.
    PerCall,
    /// Add arrays `[[expert, count], …]` by expert.
    Pairs,
    /// Keep the value of the first file.
    First,
}

impl Rule {
    fn of(key: &str) -> Rule {
        const COUNTERS: [&str; 6] = [
            "calls",
            "_total",
            "_time_us",
            "_launches",
            "_fallbacks",
            "_skips_zero",
        ];
        if COUNT_KEYS.contains(&key) {
            Rule::Pairs
        } else if key.ends_with("_per_call") || key.ends_with("_per_call_us") {
            Rule::PerCall
        } else if ["updates", "overflow_resets"].contains(&key)
            || key.starts_with("parallel_fallback_")
            || COUNTERS.iter().any(|end| key.ends_with(end))
        {
            Rule::Sum
        } else {
            Rule::First
        }
    }
}

impl LearnFile {
    /// Merges another file of the same model into this one. The operation is associative.
    ///
    /// Repeated layer objects become one object. Counts that are not split into hot and cold count as cold, as in a learn
    /// run. A layer without `calls` counts as called once.
    ///
    /// # Errors
    /// [`Error::Model`] if the files are of different models; otherwise like [`LearnFile::parse`].
    pub fn merge(&mut self, other: &LearnFile) -> Result<(), Error> {
        for key in ["n_expert", "n_expert_used"] {
            if let (Some(one), Some(other)) = (self.root.get(key), other.root.get(key))
                && one != other
            {
                return Err(Error::Model {
                    key,
                    one: one.to_string(),
                    other: other.to_string(),
                });
            }
        }
        let mut layers = self.canonical_layers()?;
        for (id, layer) in other.canonical_layers()? {
            add_layer(&mut layers, id, layer);
        }
        let calls = [&self.root, &other.root].map(|root| {
            let summary = root.get("summary");
            summary
                .and_then(|summary| summary.get("layer_calls"))
                .map_or(0, unsigned)
        });
        let summary = self.root.get("summary").cloned();
        for (key, value) in &other.root {
            match self.root.get_mut(key) {
                None => {
                    self.root.insert(key.clone(), value.clone());
                }
                Some(mine) if Rule::of(key) == Rule::Sum => add_counters(mine, value),
                Some(_) => {}
            }
        }
        if let (Some(Value::Object(mut mine)), Some(Value::Object(other))) =
            (summary, other.root.get("summary"))
        {
            add(&mut mine, other, calls);
            self.root.insert("summary".into(), Value::Object(mine));
        }
        self.set_layers(layers);
        Ok(())
    }

    /// Multiplies all counters by `factor` (clamped to 0.0..=1.0) and rounds them. Drops counts that become 0. Averages per
    /// call do not change.
    ///
    /// # Errors
    /// Like [`LearnFile::parse`].
    pub fn decay(&mut self, factor: f64) -> Result<(), Error> {
        let factor = factor.clamp(0.0, 1.0);
        let mut layers = self.canonical_layers()?;
        for layer in layers.values_mut() {
            scale(layer, factor);
        }
        layers.retain(|_, layer| is_counted(layer));
        scale(&mut self.root, factor);
        if let Some(Value::Object(summary)) = self.root.get_mut("summary") {
            scale(summary, factor);
        }
        self.set_layers(layers);
        Ok(())
    }

    /// Merges files with exponential decay. `files` are ordered from oldest to newest. The counters of a file are multiplied by
    /// 2^(-n / `half_life`), where n is the number of later files. `half_life` is in files; infinity means no decay.
    ///
    /// Returns `None` if there are no files. The iterator is advanced only after the previous file is merged, so at most two
    /// files are in memory.
    ///
    /// # Errors
    /// Like [`LearnFile::merge`], or the first error of the iterator.
    pub fn merge_with_decay<E: From<Error>>(
        files: impl ExactSizeIterator<Item = Result<LearnFile, E>>,
        half_life: f64,
    ) -> Result<Option<LearnFile>, E> {
        let mut merged: Option<LearnFile> = None;
        let n_files = files.len();
        for (file, later) in files.zip((0..n_files).rev()) {
            let mut file = file?;
            let factor = (-(later as f64) / half_life).exp2();
            if factor < 1.0 {
                file.decay(factor)?;
            }
            match &mut merged {
                None => merged = Some(file),
                Some(merged) => merged.merge(&file)?,
            }
        }
        Ok(merged)
    }

    /// Layers with counts, each once, with counts split into hot and cold.
    fn canonical_layers(&self) -> Result<BTreeMap<LayerId, Object>, Error> {
        let mut layers = BTreeMap::new();
        for (index, layer) in self.layers()?.iter().enumerate() {
            let (id, layer) = layer_id(layer, index)?;
            let layer = canonical(layer);
            if is_counted(&layer) {
                add_layer(&mut layers, id, layer);
            }
        }
        Ok(layers)
    }

    /// Stores `layers` and recomputes the hit ratios.
    fn set_layers(&mut self, layers: BTreeMap<LayerId, Object>) {
        let mut total = (0u64, 0u64);
        let layers: Vec<Value> = layers
            .into_values()
            .map(|mut layer| {
                let slots = |key: &str| layer.get(key).map_or(0, unsigned);
                let (hot, cold) = (slots("hot_slots_total"), slots("cold_slots_total"));
                total = (total.0.saturating_add(hot), total.1.saturating_add(cold));
                set_ratio(&mut layer, hot, cold);
                Value::Object(layer)
            })
            .collect();
        self.root.insert("layers".into(), layers.into());
        if let Some(Value::Object(summary)) = self.root.get_mut("summary") {
            set_ratio(summary, total.0, total.1);
        }
    }
}

fn set_ratio(object: &mut Object, hot: u64, cold: u64) {
    if let Some(ratio) = object.get_mut("hot_slot_ratio") {
        let slots = hot.saturating_add(cold);
        let value = if slots > 0 {
            hot as f64 / slots as f64
        } else {
            0.0
        };
        *ratio = json!(value);
    }
}

fn add_layer(layers: &mut BTreeMap<LayerId, Object>, id: LayerId, layer: Object) {
    match layers.get_mut(&id) {
        None => {
            layers.insert(id, layer);
        }
        Some(mine) => {
            let calls = [&*mine, &layer].map(|layer| layer.get("calls").map_or(1, unsigned));
            add(mine, &layer, calls);
        }
    }
}

/// The layer with sorted counts, split into hot and cold, and at least one call.
fn canonical(layer: &Object) -> Object {
    let mut layer = layer.clone();
    let mut counts = COUNT_KEYS.map(|key| pairs(layer.get(key)));
    let [experts, hot, cold] = &mut counts;
    if hot.is_empty() && cold.is_empty() {
        cold.clone_from(experts);
    } else if experts.is_empty() {
        experts.clone_from(hot);
        add_pairs(experts, cold);
    }
    if layer.get("calls").map_or(0, unsigned) == 0 {
        layer.insert("calls".into(), 1.into());
    }
    for (key, counts) in COUNT_KEYS.into_iter().zip(counts) {
        layer.insert(key.into(), to_value(counts));
    }
    layer
}

fn is_counted(layer: &Object) -> bool {
    COUNT_KEYS
        .iter()
        .any(|key| !pairs(layer.get(*key)).is_empty())
}

/// Adds `from` to `into`. `calls` are the calls of `into` and `from`, the weights of averages.
fn add(into: &mut Object, from: &Object, calls: [u64; 2]) {
    let new = from.keys().filter(|key| !into.contains_key(*key));
    let per_call: Vec<String> = into
        .keys()
        .chain(new)
        .filter(|key| Rule::of(key) == Rule::PerCall)
        .cloned()
        .collect();
    for key in per_call {
        let total = thousandths(into.get(&key), calls[0])
            .saturating_add(thousandths(from.get(&key), calls[1]));
        let calls = calls[0].saturating_add(calls[1]).max(1);
        into.insert(key, json!(total as f64 / 1000.0 / calls as f64));
    }
    for (key, value) in from {
        match (into.get_mut(key), Rule::of(key)) {
            (None, _) => {
                into.insert(key.clone(), value.clone());
            }
            (Some(mine), Rule::Sum) => add_counters(mine, value),
            (Some(mine), Rule::Pairs) => {
                let mut sum = pairs(Some(mine));
                add_pairs(&mut sum, &pairs(Some(value)));
                *mine = to_value(sum);
            }
            (Some(_), Rule::PerCall | Rule::First) => {}
        }
    }
}

/// Total of an average over `calls`, in thousandths.
#[expect(clippy::cast_possible_truncation, reason = "the cast saturates")]
fn thousandths(per_call: Option<&Value>, calls: u64) -> u128 {
    let per_call = per_call.and_then(Value::as_f64).unwrap_or(0.0);
    // The cast clamps a negative time to 0.
    (per_call * calls as f64 * 1000.0).round() as u128
}

/// Adds counters recursively.
fn add_counters(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                match into.get_mut(key) {
                    None => {
                        into.insert(key.clone(), value.clone());
                    }
                    Some(mine) => add_counters(mine, value),
                }
            }
        }
        (into @ Value::Number(_), from @ Value::Number(_)) => {
            *into = unsigned(into).saturating_add(unsigned(from)).into();
        }
        _ => {}
    }
}

fn scale(object: &mut Object, factor: f64) {
    for (key, value) in object.iter_mut() {
        match Rule::of(key) {
            Rule::Sum => scale_counters(value, factor),
            Rule::Pairs => {
                let mut counts = pairs(Some(value));
                counts.retain(|_, count| {
                    *count = scaled(*count, factor);
                    *count > 0
                });
                *value = to_value(counts);
            }
            Rule::PerCall | Rule::First => {}
        }
        if key == "calls" && unsigned(value) == 0 {
            *value = 1.into(); // averages per call need at least one call
        }
    }
}

fn scale_counters(value: &mut Value, factor: f64) {
    match value {
        Value::Object(object) => object
            .values_mut()
            .for_each(|value| scale_counters(value, factor)),
        Value::Number(_) => *value = scaled(unsigned(value), factor).into(),
        _ => {}
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the cast saturates")]
fn scaled(count: u64, factor: f64) -> u64 {
    (count as f64 * factor).round() as u64
}

/// Counts of an array of pairs: ids ascending, repeated ids added, zeros omitted.
fn pairs(value: Option<&Value>) -> BTreeMap<u64, u64> {
    let mut counts = BTreeMap::new();
    for pair in value.and_then(Value::as_array).into_iter().flatten() {
        let part = |index: usize| pair.get(index).and_then(Value::as_u64);
        if let (Some(expert), Some(count @ 1..)) = (part(0), part(1)) {
            add_pairs(&mut counts, &BTreeMap::from([(expert, count)]));
        }
    }
    counts
}

fn add_pairs(into: &mut BTreeMap<u64, u64>, from: &BTreeMap<u64, u64>) {
    for (&expert, &count) in from {
        let sum = into.entry(expert).or_insert(0);
        *sum = sum.saturating_add(count);
    }
}

fn to_value(counts: BTreeMap<u64, u64>) -> Value {
    counts
        .into_iter()
        .map(|(expert, count)| json!([expert, count]))
        .collect()
}
