//! Norms of rows or heads.

use crate::activation::{Activation, NodeName};
use crate::device_id::DeviceId;
use crate::hparams::NormKind;
use crate::norm::Norm;
use crate::ops::{Ops, number};
use crate::recorder::Source;

impl Ops<'_> {
    /// Normalizes each group of `norm.n` elements: `x / sqrt(mean(x²) + eps) * weight` (Zhang and Sennrich, "Root Mean
    /// Square Layer Normalization", 2019), or `(x - mean(x)) / sqrt(variance(x) + eps) * weight` (Ba, Kiros and Hinton, "Layer
    /// Normalization", 2016). The weight may have several rows: one for each group of a row. The multiplication and the addition of a
    /// bias are operations of their own. Without weights, there is one operation, whose result is `name`.
    pub fn norm(
        &mut self,
        device: DeviceId,
        [first, name]: [NodeName; 2],
        src: &mut Activation,
        norm: &Norm,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        let (width, eps) = (norm.n, norm.eps);
        let first = if norm.weight.is_some() { first } else { name };
        dst.shape(first, src.width, src.rows);
        let weight = norm.weight.as_ref();
        let n_weights = weight.map_or(1, |weight| weight.data.len() / width);
        let is_usual = norm.kind == NormKind::Rms && norm.bias.is_none() && n_weights == 1;
        let on_gpu = self.on(&mut scope, device, |gpu| match weight {
            Some(weight) if is_usual => gpu.rms_norm(src, weight, eps, dst),
            _ => gpu.group_norm(src, norm, dst),
        });
        if !on_gpu {
            self.fetch(&mut src.values);
            let scale = match norm.kind {
                NormKind::Rms => rms_norm,
                NormKind::Layer => layer_norm,
            };
            self.threads
                .zip_rows(src.data(), width, dst.data_mut(), width, |x, out| {
                    scale(x, eps, out);
                });
        }
        let op = match norm.kind {
            NormKind::Rms => number::RMS_NORM,
            NormKind::Layer => number::NORM,
        };
        self.record(&mut scope, op, first, &[(&*src).into()]);

        let Some(weight) = weight else {
            return;
        };
        let normed = Source::from(&*dst);
        if !on_gpu {
            self.threads.rows(dst.data_mut(), width, |i, row| {
                let factors = &weight.data[i % n_weights * width..][..width];
                row.iter_mut().zip(factors).for_each(|(x, w)| *x *= w);
            });
        }
        dst.name = match norm.bias {
            Some(_) => first.stem("norm_w"),
            None => name,
        };
        let sources = [normed, weight.into()];
        self.record(&mut scope, number::MUL, dst.name, &sources);
        if let Some(bias) = &norm.bias {
            self.bias(scope, name, bias, dst);
        }
    }
}

fn rms_norm(x: &[f32], eps: f32, out: &mut [f32]) {
    let mean = sum_of_squares(x, 0.0) / x.len() as f64;
    let scale = 1.0 / (mean as f32 + eps).sqrt();
    out.iter_mut().zip(x).for_each(|(o, x)| *o = x * scale);
}

fn layer_norm(x: &[f32], eps: f32, out: &mut [f32]) {
    let n = x.len() as f64;
    let mean = (x.iter().map(|&x| f64::from(x)).sum::<f64>() / n) as f32;
    let variance = sum_of_squares(x, mean) / n;
    let scale = 1.0 / (variance as f32 + eps).sqrt();
    out.iter_mut()
        .zip(x)
        .for_each(|(o, x)| *o = (x - mean) * scale);
}

/// The sum of the squares of the differences from `mean`, in 16 independent partial sums.
fn sum_of_squares(x: &[f32], mean: f32) -> f64 {
    let square = |x: f32| f64::from((x - mean) * (x - mean));
    let (chunks, rest) = x.as_chunks::<16>();
    let mut lanes = [0.0f64; 16];
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += square(*x);
        }
    }
    lanes
        .into_iter()
        .chain(rest.iter().map(|&x| square(x)))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::threads::Threads;
    use crate::devices::Devices;
    use crate::recorder::Recorder;
    use crate::weights::Vector;

    #[test]
    fn groups_of_a_row_have_weights_of_their_own() {
        let threads = Threads::new(1).unwrap();
        let mut ops = Ops::new(&threads, Recorder::new(None), Devices::cpu());
        let name = NodeName::global("x");
        let [mut src, mut dst] = [1, 2].map(Activation::new);
        src.shape(name, 6, 2);
        src.data_mut()
            .copy_from_slice(&[1.0, 2.0, 2.0, -4.0, 0.0, 3.0, 5.0, 1.0, -1.0, 2.0, 2.0, 0.5]);
        let weight = Vector::of_values(vec![1.0, 2.0, 3.0, -1.0, 0.5, 4.0], 3);
        let norm = Norm {
            kind: NormKind::Rms,
            eps: 1e-5,
            n: 3,
            weight: Some(weight),
            bias: None,
        };
        ops.norm(DeviceId::Cpu, [name; 2], &mut src, &norm, &mut dst);
        for (i, (x, got)) in src.data().chunks(3).zip(dst.data().chunks(3)).enumerate() {
            let mean = x.iter().map(|x| f64::from(x * x)).sum::<f64>() / 3.0;
            let weights = &norm.weight.as_ref().unwrap().data[i % 2 * 3..][..3];
            for ((got, x), weight) in got.iter().zip(x).zip(weights) {
                let want = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*weight);
                assert!((f64::from(*got) - want).abs() < 1e-5, "{got}, not {want}");
            }
        }
    }

    #[test]
    fn norms_agree_with_their_formulas() {
        let x: Vec<f32> = (0..37).map(|i| (i * i % 23) as f32 - 3.5).collect();
        let n = x.len() as f64;
        let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let about = |center: f64| {
            let squares = x.iter().map(|&x| (f64::from(x) - center).powi(2));
            (squares.sum::<f64>() / n + 1e-5).sqrt()
        };
        let mut out = vec![0.0; x.len()];
        rms_norm(&x, 1e-5, &mut out);
        for (got, x) in out.iter().zip(&x) {
            assert!((f64::from(*got) - f64::from(*x) / about(0.0)).abs() < 1e-6);
        }
        layer_norm(&x, 1e-5, &mut out);
        for (got, x) in out.iter().zip(&x) {
            assert!((f64::from(*got) - (f64::from(*x) - mean) / about(mean)).abs() < 1e-6);
        }
    }
}
