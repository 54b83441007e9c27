//! Weighting of hits: how hits become scores, and the weight of each layer.

use std::fmt;
use std::str::FromStr;

use super::Error;
use crate::learn::LayerObservation;

/// How hits become scores; [`rank`](super::rank) contains the formulas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Weighting {
    /// By rank in the layer: the best experts of all layers precede the second-best ones. The default of the fork.
    #[default]
    Flat,
    /// Hits × layer weight. The weight follows the pressure of the layer relative to the mean. Pressure measures how long the cold
    /// lane delays the layer; see [`layer_weights`].
    Pressure,
    /// Hits × layer weight. The weight grows with the square root of the pressure, scaled between its 10th and 90th percentiles.
    Smooth,
    /// Hits × layer weight. The weight grows linearly with the MoE time of the layer, from the minimum to the maximum over the layers.
    Time,
    /// By the number of experts of the layer that were selected at least once, minus the rank in the layer.
    Balanced,
}

/// The architecture for which the fork has other defaults.
const GPT_OSS: &str = "gpt-oss";

impl Weighting {
    /// The default of the fork for an architecture (`general.architecture`): [`Weighting::Time`] for gpt-oss.
    pub fn default_for(arch: Option<&str>) -> Weighting {
        match arch {
            Some(GPT_OSS) => Weighting::Time,
            _ => Weighting::default(),
        }
    }

    /// Name on the command line of the fork.
    pub fn name(self) -> &'static str {
        match self {
            Weighting::Flat => "flat",
            Weighting::Pressure => "pressure",
            Weighting::Smooth => "smooth",
            Weighting::Time => "time",
            Weighting::Balanced => "balanced",
        }
    }

    /// Whether the weighting depends on the [`LayerCurve`].
    pub fn uses_curve(self) -> bool {
        !matches!(self, Weighting::Flat | Weighting::Balanced)
    }
}

impl fmt::Display for Weighting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Weighting {
    type Err = Error;

    fn from_str(name: &str) -> Result<Weighting, Error> {
        Ok(match name {
            "flat" => Weighting::Flat,
            "pressure" => Weighting::Pressure,
            "smooth" | "smooth-pressure" | "capped" | "capped-pressure" | "soft-pressure" => {
                Weighting::Smooth
            }
            "time" | "moe-time" | "decode-time" => Weighting::Time,
            "balanced" | "rank" | "layer-rank" => Weighting::Balanced,
            _ => return Err(Error::Weighting { name: name.into() }),
        })
    }
}

/// Strength of the layer weights: 0 (all weights are 1) to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerCurve(f64);

impl LayerCurve {
    /// The default of the fork (0.5).
    pub const DEFAULT: LayerCurve = LayerCurve(0.5);

    /// The default of the fork for an architecture (`general.architecture`): 1 for gpt-oss.
    pub fn default_for(arch: Option<&str>) -> LayerCurve {
        match arch {
            Some(GPT_OSS) => LayerCurve(1.0),
            _ => LayerCurve::DEFAULT,
        }
    }

    /// A strength in 0.0..=1.0. Like the fork, replaces any other value by [`LayerCurve::DEFAULT`].
    pub fn new(value: f64) -> LayerCurve {
        if LayerCurve::is_valid(value) {
            LayerCurve(value)
        } else {
            LayerCurve::DEFAULT
        }
    }

    /// Whether the value is in 0.0..=1.0.
    pub fn is_valid(value: f64) -> bool {
        (0.0..=1.0).contains(&value)
    }

    /// The strength, 0.0 to 1.0.
    pub fn get(self) -> f64 {
        self.0
    }
}

/// Weight of each layer, in the order of `observations`.
///
/// p is the pressure of the layer, c the value of `curve` (0.0 to 1.0).
///
/// | weighting | weight |
/// |---|---|
/// | `Pressure` | 1 + c (p / mean p - 1), clamped to 1 - 0.30 c ..= 1 + 0.60 c |
/// | `Smooth` | 1 + 0.30 c √n; n is the position of p between its 10th and 90th percentile, clamped to 0..=1 |
/// | `Time` | linear from 1 - 0.60 c (minimum p) to 1 + 0.80 c (maximum p); p is the MoE time if it is known |
/// | `Flat`, `Balanced` | 1 |
///
/// The pressure is the first positive value of: join wait, cold minus hot lane time, cold slots per call, wait per cold
/// slot. Mean, percentiles, minimum and maximum are over layers with positive p. A layer without pressure has weight 1; so
/// have all layers if minimum and maximum are equal.
pub fn layer_weights(
    observations: &[LayerObservation],
    weighting: Weighting,
    curve: LayerCurve,
) -> Vec<f64> {
    let c = curve.get();
    if !weighting.uses_curve() || c <= 0.0 {
        return vec![1.0; observations.len()];
    }
    let pressures: Vec<f64> = observations
        .iter()
        .map(|layer| match weighting {
            Weighting::Time if layer.total_moe_us > 0.0 => layer.total_moe_us,
            _ => pressure(layer),
        })
        .collect();
    let mut present: Vec<f64> = pressures.iter().copied().filter(|&p| p > 0.0).collect();
    let mean = present.iter().sum::<f64>() / present.len().max(1) as f64;
    present.sort_by(f64::total_cmp);
    let (low, high) = match weighting {
        Weighting::Smooth => robust_bounds(&present),
        _ => bounds(&present),
    };
    let weight = |p: f64| match weighting {
        Weighting::Pressure => (1.0 + c * (p / mean - 1.0)).clamp(1.0 - 0.30 * c, 1.0 + 0.60 * c),
        Weighting::Smooth if high > low => {
            let place = ((p - low) / (high - low)).clamp(0.0, 1.0);
            1.0 + 0.30 * c * place.sqrt()
        }
        Weighting::Time if high > low => {
            let place = (p - low) / (high - low);
            let (lowest, highest) = (1.0 - 0.60 * c, 1.0 + 0.80 * c);
            (lowest + place * (highest - lowest)).clamp(lowest, highest)
        }
        _ => 1.0,
    };
    pressures
        .into_iter()
        .map(|p| if p > 0.0 { weight(p) } else { 1.0 })
        // Times near `f64::MAX` can overflow to infinity and yield NaN.
        .map(|weight| if weight.is_finite() { weight } else { 1.0 })
        .collect()
}

/// Pressure of a layer, defined in [`layer_weights`].
fn pressure(layer: &LayerObservation) -> f64 {
    let candidates = [
        layer.join_wait_us,
        layer.cold_lane_us - layer.hot_lane_us,
        layer.cold_slots_per_call,
    ];
    candidates
        .into_iter()
        .find(|&p| p > 0.0)
        .unwrap_or(layer.wait_per_cold_slot_us)
}

/// Minimum and maximum of sorted values; 0 without values.
fn bounds(sorted: &[f64]) -> (f64, f64) {
    match sorted {
        [low, .., high] => (*low, *high),
        [only] => (*only, *only),
        [] => (0.0, 0.0),
    }
}

/// 10th and 90th percentile of sorted values, or minimum and maximum if the percentiles are equal.
fn robust_bounds(sorted: &[f64]) -> (f64, f64) {
    let (low, high) = (percentile(sorted, 0.10), percentile(sorted, 0.90));
    if high <= low {
        bounds(sorted)
    } else {
        (low, high)
    }
}

/// Quantile `q` (0.0 to 1.0) of sorted values, linearly interpolated.
#[expect(clippy::cast_possible_truncation, reason = "an index into `sorted`")]
fn percentile(sorted: &[f64], q: f64) -> f64 {
    let at = q * sorted.len().saturating_sub(1) as f64;
    let value = |index: f64| sorted.get(index as usize).copied().unwrap_or(0.0);
    let (low, high) = (at.floor(), at.ceil());
    if low == high {
        return value(low);
    }
    let t = at - low;
    value(low) * (1.0 - t) + value(high) * t
}
