//! The router.

use crate::cuda::launch::Route;
use crate::cuda::{Error, Ptr};
use crate::hparams::{Gating, Groups};

use crate::cuda::tests::device::{Device, noise, wide};
use moe_testkit::Report;

/// A router and its inputs.
struct Case {
    gating: Gating,
    norm: bool,
    scale: f32,
    tokens: usize,
    n_expert: usize,
    k: usize,
    groups: Option<Groups>,
    logits: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Case {
    fn probs(&self, logits: &[f32]) -> Vec<f64> {
        let logits = wide(logits);
        match self.gating {
            Gating::SoftmaxOfSelected | Gating::SigmoidOfSelected => logits,
            Gating::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
            Gating::Softmax => softmax(&logits),
        }
    }

    /// The values that experts are selected by: minus infinity outside the best groups.
    fn scores(&self, probs: &[f64]) -> Vec<f64> {
        let mut scores = probs.to_vec();
        // Without a bias, -0 remains less than 0, as in the kernel and on the CPU.
        if let Some(bias) = &self.bias {
            scores
                .iter_mut()
                .zip(bias)
                .for_each(|(score, bias)| *score += f64::from(*bias));
        }
        if let Some(groups) = self.groups {
            let size = scores.len() / groups.n;
            let sum = |group: &[f64]| {
                // Sums as f32, like those of the kernel: those of logits with few digits then have the same ties.
                let mut values: Vec<f32> = group.iter().map(|x| *x as f32).collect();
                values.sort_by(|a, b| b.total_cmp(a));
                values[0] + values[1]
            };
            let sums: Vec<f32> = scores.chunks(size).map(sum).collect();
            let mut order: Vec<usize> = (0..groups.n).collect();
            order.sort_by(|a, b| sums[*b].total_cmp(&sums[*a]));
            for group in &order[groups.n_used..] {
                scores[group * size..][..size].fill(f64::NEG_INFINITY);
            }
        }
        scores
    }

    fn weights(&self, probs: &[f64], ids: &[usize]) -> Vec<f64> {
        let mut weights: Vec<f64> = ids.iter().map(|&id| probs[id]).collect();
        if self.gating == Gating::SoftmaxOfSelected {
            weights = softmax(&weights);
        }
        if self.gating == Gating::SigmoidOfSelected {
            let sigmoid = |w: &mut f64| *w = 1.0 / (1.0 + (-*w).exp());
            weights.iter_mut().for_each(sigmoid);
        }
        if self.norm {
            let sum = weights.iter().sum::<f64>().max(6.103_515_6e-5);
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        weights.iter().map(|w| w * f64::from(self.scale)).collect()
    }

    fn run(&self, device: &Device) -> Result<(Vec<i32>, Vec<f32>), String> {
        let logits = device.upload(&self.logits);
        let bias = self.bias.as_ref().map(|bias| device.upload(bias));
        let ids = device.upload(&vec![-1i32; self.tokens * self.k]);
        let weights = device.nan_output(self.tokens * self.k);
        let log = device.nan_output(2 * self.tokens * self.k);
        let it = Route {
            logits: device.at(&logits),
            selection_bias: bias.as_ref().map_or(Ptr::NULL, |bias| device.at(bias)),
            gating: self.gating,
            norm: self.norm,
            scale: self.scale,
            tokens: self.tokens,
            n_expert: self.n_expert,
            k: self.k,
            groups: self.groups,
            log: device.at(&log),
        };
        let (at_ids, at_weights) = (device.at(&ids), device.at(&weights));
        let done = device
            .kernels
            .route(&device.stream, &it, at_ids, at_weights);
        done.map_err(|e| e.to_string())?;
        let (ids, weights) = (device.download(&ids)?, device.read(&weights)?);
        let bits = ids.iter().map(|id| id.cast_unsigned());
        let bits = bits.chain(weights.iter().map(|weight| weight.to_bits()));
        let log = device.read(&log)?;
        if !bits.eq(log.iter().map(|value| value.to_bits())) {
            return Err(format!(
                "ids {ids:?} and weights {weights:?} are logged as {log:?}"
            ));
        }
        Ok((ids, weights))
    }

    /// The first fault in the selected experts of a token; `None` if they are right. Scores that differ by rounding may swap
    /// ranks.
    fn fault(&self, row: &[f32], ids: &[usize]) -> Option<String> {
        if let Some(id) = ids.iter().find(|id| **id >= self.n_expert) {
            return Some(format!("expert {id} does not exist"));
        }
        let scores = self.scores(&self.probs(row));
        let key = |id: usize| self.bias.as_ref().map_or(0, |bias| bias[id].to_bits());
        let mut remaining: Vec<usize> = (0..self.n_expert).collect();
        for (slot, id) in ids.iter().enumerate() {
            let Some(at) = remaining.iter().position(|other| other == id) else {
                return Some(format!("slot {slot} repeats expert {id}"));
            };
            let best = remaining
                .iter()
                .map(|&i| scores[i])
                .fold(f64::NEG_INFINITY, f64::max);
            // NaN if only experts outside the best groups remain.
            if best - scores[*id] > 2e-6 * best.abs().max(1e-30) + 1e-7 {
                return Some(format!(
                    "slot {slot}: expert {id} has score {}, the best remaining one {best}",
                    scores[*id]
                ));
            }
            // The lower index wins a tie, also outside the best groups.
            let is_equal = |&i: &usize| match [scores[i], scores[*id]].map(f64::is_finite) {
                [true, true] => row[i].to_bits() == row[*id].to_bits() && key(i) == key(*id),
                finite => finite == [false, false],
            };
            if remaining[..at].iter().any(is_equal) {
                return Some(format!(
                    "slot {slot}: expert {id} is before an equal one with a lower index"
                ));
            }
            remaining.remove(at);
        }
        None
    }
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::MIN, f64::max);
    let e: Vec<f64> = x.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|e| e / sum).collect()
}

#[test]
fn selects_experts_and_weights() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    let mut seed = 100;
    for (n_expert, k) in [
        (1, 1),
        (2, 1),
        (8, 2),
        (31, 31),
        (32, 4),
        (33, 6),
        (60, 4),
        (64, 8),
        (65, 40),
        (128, 8),
        (129, 6),
        (256, 8),
        (300, 100),
        (512, 10),
        (512, 512),
    ] {
        for gating in [
            Gating::Softmax,
            Gating::Sigmoid,
            Gating::SoftmaxOfSelected,
            Gating::SigmoidOfSelected,
        ] {
            for (variant, tokens) in [(0, 1), (1, 5), (2, 70), (3, 4)] {
                seed += 1;
                // Every second case has coarse logits with many ties.
                let coarse = variant % 2 == 1;
                let value = |x: f32| {
                    if coarse {
                        (x * 8.0).round() / 4.0
                    } else {
                        x * 5.0
                    }
                };
                let logits = noise(tokens * n_expert, seed)
                    .into_iter()
                    .map(value)
                    .collect();
                let bias = noise(n_expert, seed + 1000)
                    .into_iter()
                    .map(|x| value(x) * 0.1);
                let case = Case {
                    gating,
                    norm: variant < 2,
                    scale: [1.0, 2.5, 1.0, 0.5][variant],
                    tokens,
                    n_expert,
                    k,
                    groups: None,
                    logits,
                    bias: (variant >= 2).then(|| bias.collect()),
                };
                check(device, &case, coarse, &mut report);
            }
        }
    }
    report.finish();
}

#[test]
fn selects_from_the_best_groups() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    let mut seed = 7000;
    // The last two select more experts than the best groups have.
    for (n_expert, n, n_used, k) in [
        (256, 8, 4, 8),
        (256, 8, 3, 6),
        (8, 4, 2, 3),
        (64, 2, 1, 5),
        (60, 5, 2, 4),
        (96, 32, 7, 10),
        (510, 170, 40, 20),
        (512, 256, 100, 16),
        (512, 2, 1, 8),
        (64, 8, 2, 40),
        (12, 6, 1, 12),
    ] {
        for gating in [Gating::Softmax, Gating::Sigmoid, Gating::SoftmaxOfSelected] {
            for (tokens, has_bias) in [(1, false), (9, true), (70, false)] {
                seed += 1;
                // Of the logits themselves, sums are exact, so that groups have ties.
                let coarse = gating == Gating::SoftmaxOfSelected;
                let value = |x: f32, step: f32| {
                    if coarse {
                        (x * 8.0).round() * step
                    } else {
                        x * 20.0 * step
                    }
                };
                let logits = noise(tokens * n_expert, seed);
                let bias = noise(n_expert, seed + 1000);
                let case = Case {
                    gating,
                    norm: true,
                    scale: 2.5,
                    tokens,
                    n_expert,
                    k,
                    groups: Some(Groups { n, n_used }),
                    logits: logits.into_iter().map(|x| value(x, 0.25)).collect(),
                    bias: has_bias.then(|| bias.into_iter().map(|x| value(x, 0.125)).collect()),
                };
                check(device, &case, coarse, &mut report);
            }
        }
    }
    report.finish();
}

fn check(device: &Device, case: &Case, coarse: bool, report: &mut Report) {
    let name = format!(
        "route {} × {} of {}, {:?}, {:?}, norm {}, bias {}, coarse {coarse}",
        case.tokens,
        case.k,
        case.n_expert,
        case.groups,
        case.gating,
        case.norm,
        case.bias.is_some()
    );
    let (ids, weights) = match case.run(device) {
        Ok(done) => done,
        Err(error) => return report.fail(format!("{name}: {error}")),
    };
    let ids: Vec<usize> = ids
        .iter()
        .map(|&id| usize::try_from(id).unwrap_or(usize::MAX))
        .collect();
    let mut want = Vec::new();
    let rows = case.logits.chunks_exact(case.n_expert);
    for (token, (row, ids)) in rows.zip(ids.chunks_exact(case.k)).enumerate() {
        if let Some(wrong) = case.fault(row, ids) {
            return report.fail(format!("{name}: token {token}: {wrong}"));
        }
        want.extend(case.weights(&case.probs(row), ids));
    }
    report.compare(&name, Ok(weights), &want, 5e-6);
}

#[test]
fn orders_logits_like_total_cmp() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    let logits = vec![
        -0.0,
        0.0,
        -1.0,
        3.0,
        -0.0,
        3.0,
        f32::INFINITY,
        f32::MIN,
        -1e-40,
        1e-40,
    ];
    let mut want: Vec<i32> = (0..10).collect();
    want.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
    let case = Case {
        gating: Gating::SoftmaxOfSelected,
        norm: false,
        scale: 1.0,
        tokens: 1,
        n_expert: 10,
        k: 10,
        groups: None,
        logits,
        bias: None,
    };
    match case.run(device) {
        Ok((ids, _)) if ids == want => {}
        Ok((ids, _)) => report.fail(format!("selected {ids:?}, not {want:?}")),
        Err(error) => report.fail(error),
    }
    report.finish();
}

#[test]
fn nan_logits_select_existing_experts() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    for gating in [Gating::Softmax, Gating::Sigmoid, Gating::SoftmaxOfSelected] {
        for bits in [u32::MAX, f32::NAN.to_bits()] {
            let case = Case {
                gating,
                norm: true,
                scale: 1.0,
                tokens: 2,
                n_expert: 40,
                k: 40,
                groups: None,
                logits: vec![f32::from_bits(bits); 80],
                bias: None,
            };
            match case.run(device) {
                Ok((ids, _)) => {
                    let wanted = (0..80).map(|i| i % 40);
                    if !ids.iter().copied().eq(wanted) {
                        report.fail(format!("{gating:?}, {bits:x}: selected {ids:?}"));
                    }
                }
                Err(error) => report.fail(format!("{gating:?}: {error}")),
            }
        }
    }
    report.finish();
}

#[test]
fn rejects_unsupported_sizes() {
    let Some(device) = Device::open() else { return };
    let groups = |n, n_used| Some(Groups { n, n_used });
    for (n_expert, k, groups) in [
        (513, 8, None),
        (8, 9, None),
        (8, 0, None),
        (8, 2, groups(3, 1)),
        (8, 2, groups(8, 1)),
        (8, 2, groups(4, 5)),
        (8, 2, groups(4, 0)),
    ] {
        let it = Route {
            logits: Ptr::NULL,
            selection_bias: Ptr::NULL,
            gating: Gating::Softmax,
            norm: true,
            scale: 1.0,
            tokens: 1,
            n_expert,
            k,
            groups,
            log: Ptr::NULL,
        };
        let done = device
            .kernels
            .route(&device.stream, &it, Ptr::NULL, Ptr::NULL);
        assert!(
            matches!(done, Err(Error::Unsupported { .. })),
            "{k} of {n_expert}, {groups:?}: {done:?}"
        );
    }
}
