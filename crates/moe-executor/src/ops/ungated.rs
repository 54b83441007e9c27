//! Feed-forward blocks without a gate: their activation, and experts with the projections up and down only.

use crate::activation::{Activation, NodeName};
use crate::ops::experts::{Experts, Projection};
use crate::ops::{At, ExpertIo, MergeNames, Ops, number};
use crate::recorder::{LaneCounts, Source};

/// The activation of a block without a gate: a function of one value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unary {
    /// `max(x, 0)²`, in two operations (So et al., "Primer", 2021).
    SquaredRelu,
}

impl Unary {
    /// Its operations. Each writes one record per pass.
    pub const fn ops(self) -> usize {
        match self {
            Unary::SquaredRelu => 2,
        }
    }
}

/// The experts of a layer without gates, and the names of their nodes.
pub(crate) struct UngatedNodes<'a, 'g> {
    /// The layer.
    pub at: At,
    /// The first projection.
    pub up: Projection<'a, 'g>,
    /// The second projection.
    pub down: Projection<'a, 'g>,
    /// The activation.
    pub unary: Unary,
    /// Names of its operations.
    pub activated: [NodeName; 2],
    /// Names of the weighted sum.
    pub merge: MergeNames,
}

impl Ops<'_> {
    /// `x = unary(x)`
    pub fn unary(&mut self, [first, name]: [NodeName; 2], unary: Unary, x: &mut Activation) {
        match unary {
            Unary::SquaredRelu => {
                let mut scope = self.start();
                let device = x.values.home();
                let before = Source::from(&*x);
                let done = self.on(&mut scope, device, |gpu| gpu.squared_relu(x));
                if !done {
                    let width = x.width.max(1);
                    self.threads.rows(x.data_mut(), width, |_, row| {
                        row.iter_mut()
                            .for_each(|x| *x = if *x < 0.0 { 0.0 } else { *x * *x });
                    });
                }
                x.name = first;
                self.record(&mut scope, number::UNARY, first, &[before]);
                let positive = Source::from(&*x);
                x.name = name;
                self.record(&mut scope, number::SQR, name, &[positive]);
            }
        }
    }

    /// The operations of the selected experts. `io.buffers[0]` is not used. Returns the number of down products per lane.
    pub(crate) fn ungated_experts(&mut self, nodes: &UngatedNodes, io: ExpertIo) -> LaneCounts {
        let ExpertIo {
            x,
            routing,
            buffers: [_, hidden, products],
            dst,
            ..
        } = io;
        let (il, down) = (nodes.at.il, nodes.down);
        self.project(Experts::of(il), nodes.up, x, routing, hidden);
        self.unary(nodes.activated, nodes.unary, hidden);
        let layer = Experts::of(il);
        let lanes = self.down_and_merge(layer, down, nodes.merge, hidden, routing, products, dst);
        self.count_without_lanes(il, &down.linear.weights, routing, &lanes);
        self.end_call(nodes.at);
        lanes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::threads::Threads;
    use crate::devices::Devices;
    use crate::recorder::Recorder;

    #[test]
    fn squared_relu_agrees_with_its_formula() {
        let threads = Threads::new(1).unwrap();
        let mut ops = Ops::new(&threads, Recorder::new(None), Devices::cpu());
        let name = NodeName::global("x");
        let values: Vec<f32> = (0..111).map(|i| (i as f32 - 50.0) * 0.3).collect();
        let mut x = Activation::new(1);
        x.shape(name, 37, 3);
        x.data_mut().copy_from_slice(&values);
        ops.unary([name; 2], Unary::SquaredRelu, &mut x);
        for (got, value) in x.data().iter().zip(&values) {
            let want = f64::from(*value).max(0.0).powi(2);
            let error = (f64::from(*got) - want).abs();
            assert!(error <= 1e-5 * want, "{got}, not {want}");
        }
    }
}
