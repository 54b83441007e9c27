//! How much a hit counts: the weighting, and the weight that each layer gets by its pressure.

use std::fmt;
use std::str::FromStr;

use super::Error;
use crate::learn::LayerObservation;

/// How hits become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Weighting {
    /// By the place in the layer: every layer's best expert before every layer's second best. The runtime's default.
    #[default]
    Flat,
    /// Hits times a layer weight that follows the layer's pressure over the mean pressure.
    Pressure,
    /// Hits times a layer weight that grows with the root of the pressure between its 10th and 90th percentile.
    Smooth,
    /// Hits times a layer weight that follows the time of the layer between the least and the most.
    Time,
    /// By the place in the layer, layers with more observed experts first.
    Balanced,
}

impl Weighting {
    /// The name that the runtime's command line takes.
    pub fn name(self) -> &'static str {
        match self {
            Weighting::Flat => "flat",
            Weighting::Pressure => "pressure",
            Weighting::Smooth => "smooth",
            Weighting::Time => "time",
            Weighting::Balanced => "balanced",
        }
    }

    /// Whether the layer curve has a say.
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

/// How strongly a layer's pressure shapes its weight: 0 not at all, 1 fully.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerCurve(f64);

impl LayerCurve {
    /// The runtime's default, which also stands in for a value out of range.
    pub const DEFAULT: LayerCurve = LayerCurve(0.5);

    /// A curve from 0 to 1; anything else becomes [`LayerCurve::DEFAULT`], as in the runtime.
    pub fn new(value: f64) -> LayerCurve {
        if LayerCurve::is_valid(value) {
            LayerCurve(value)
        } else {
            LayerCurve::DEFAULT
        }
    }

    /// Whether a value is taken as it is.
    pub fn is_valid(value: f64) -> bool {
        (0.0..=1.0).contains(&value)
    }

    /// The value, 0 to 1.
    pub fn get(self) -> f64 {
        self.0
    }
}

/// The weight of each layer, parallel to `observations`; 1 everywhere for [`Weighting::Flat`] and [`Weighting::Balanced`].
///
/// With pressure p, its mean over the layers that have one, and the curve c: `pressure` is 1 + c (p / mean - 1) between
/// 1 - 0.30 c and 1 + 0.60 c; `smooth` is 1 + 0.30 c √n, n the place of p between the 10th and the 90th percentile; `time`
/// goes from 1 - 0.60 c to 1 + 0.80 c with the place of p between least and most. A layer without pressure has weight 1, and
/// so have all where there is nothing to tell them apart.
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
            let (least, most) = (1.0 - 0.60 * c, 1.0 + 0.80 * c);
            (least + place * (most - least)).clamp(least, most)
        }
        _ => 1.0,
    };
    pressures
        .into_iter()
        .map(|p| if p > 0.0 { weight(p) } else { 1.0 })
        // Times near the end of the range of a double can come to infinity over infinity.
        .map(|weight| if weight.is_finite() { weight } else { 1.0 })
        .collect()
}

/// What a layer suffers from: the first of join wait, cold lane beyond hot lane, cold slots in a call, wait for a cold slot
/// that is above 0.
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

/// Least and most of sorted values; 0 where there are none.
fn bounds(sorted: &[f64]) -> (f64, f64) {
    match sorted {
        [low, .., high] => (*low, *high),
        [only] => (*only, *only),
        [] => (0.0, 0.0),
    }
}

/// The 10th and 90th percentile of sorted values, or least and most where these are not apart.
fn robust_bounds(sorted: &[f64]) -> (f64, f64) {
    let (low, high) = (percentile(sorted, 0.10), percentile(sorted, 0.90));
    if high <= low {
        bounds(sorted)
    } else {
        (low, high)
    }
}

/// The value at `q` of the way through sorted values, between two of them in proportion.
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
