//! Functions of one value.

/// A function that is applied to each element.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Map {
    /// `factor · x`
    Scale(f32),
    /// `x`, limited to `-limit..=limit`.
    Clamp(f32),
    /// `x`, at most the limit.
    AtMost(f32),
    /// `1 / (1 + exp(-x))`
    Sigmoid,
    /// `x · sigmoid(x)`
    Silu,
    /// `tanh(x)`
    Tanh,
}

impl Map {
    /// Replaces each value by its result.
    pub fn apply(self, values: &mut [f32]) {
        match self {
            Map::Scale(factor) => each(values, |x| x * factor),
            Map::Clamp(limit) => each(values, |x| x.clamp(-limit, limit)),
            Map::AtMost(limit) => each(values, |x| x.min(limit)),
            Map::Sigmoid => each(values, |x| 1.0 / (1.0 + (-x).exp())),
            Map::Silu => each(values, |x| x / (1.0 + (-x).exp())),
            Map::Tanh => each(values, f32::tanh),
        }
    }
}

fn each(values: &mut [f32], function: impl Fn(f32) -> f32) {
    values.iter_mut().for_each(|x| *x = function(*x));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_agree_with_their_formulas() {
        let values: Vec<f32> = (0..201).map(|i| (i as f32 - 100.0) * 0.09).collect();
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        for map in [
            Map::Scale(-0.75),
            Map::Clamp(2.5),
            Map::AtMost(1.5),
            Map::Sigmoid,
            Map::Silu,
            Map::Tanh,
        ] {
            let want = |x: f64| match map {
                Map::Scale(_) => -0.75 * x,
                Map::Clamp(_) => x.clamp(-2.5, 2.5),
                Map::AtMost(_) => x.min(1.5),
                Map::Sigmoid => sigmoid(x),
                Map::Silu => x * sigmoid(x),
                Map::Tanh => x.tanh(),
            };
            let mut got = values.clone();
            map.apply(&mut got);
            for (got, x) in got.iter().zip(&values) {
                let want = want(f64::from(*x));
                let error = (f64::from(*got) - want).abs();
                assert!(error <= 1e-6 * want.abs() + 1e-7, "{map:?} of {x}: {got}");
            }
        }
    }
}
