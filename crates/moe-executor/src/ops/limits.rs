//! SwiGLU with limits: `min(silu(gate), limit) · clamp(up, -limit, limit)`, in the order of llama.cpp's graph. Gate is limited before up
//! is computed.

use crate::activation::{Activation, NodeName};
use crate::cpu::map::Map;
use crate::ops::{Ops, Scope, number};
use crate::recorder::Source;

/// A limit of a SwiGLU.
#[derive(Clone, Copy)]
pub struct SwigluLimit {
    /// Upper bound of the activated gate, and bound of the absolute values of up.
    pub limit: f32,
    /// Names of the nodes: the activated gate, the limited gate, the limited up.
    pub names: [NodeName; 3],
}

impl Ops<'_> {
    /// `gate = min(silu(gate), limit)`, in two operations.
    pub fn limit_gate(&mut self, limit: &SwigluLimit, gate: &mut Activation) {
        let [activated, limited, _] = limit.names;
        self.map(number::UNARY, activated, Map::Silu, gate);
        self.map(number::CLAMP, limited, Map::AtMost(limit.limit), gate);
    }

    /// [`Ops::limit_gate`] as operations of `scope`, which may have computed them.
    pub(super) fn limit_gate_in(
        &mut self,
        scope: &mut Scope,
        limit: &SwigluLimit,
        gate: &mut Activation,
    ) {
        if !scope.is_done() {
            return self.limit_gate(limit, gate);
        }
        let [activated, limited, _] = limit.names;
        for (op, name) in [(number::UNARY, activated), (number::CLAMP, limited)] {
            let before = Source::from(&*gate);
            gate.name = name;
            self.record(scope, op, name, &[before]);
        }
    }

    /// Limits `up` to `-limit..=limit`.
    pub fn limit_up(&mut self, limit: &SwigluLimit, up: &mut Activation) {
        self.clamp(limit.names[2], limit.limit, up);
    }

    /// [`Ops::limit_up`] as the operation of `scope`, which may have computed it.
    pub(super) fn limit_up_in(
        &mut self,
        scope: &mut Scope,
        limit: &SwigluLimit,
        up: &mut Activation,
    ) {
        if !scope.is_done() {
            return self.limit_up(limit, up);
        }
        let before = Source::from(&*up);
        up.name = limit.names[2];
        self.record(scope, number::CLAMP, up.name, &[before]);
    }

    /// [`Ops::multiply_gate`] as the operation of `scope`, which may have computed it.
    pub(super) fn multiply_gate_in(
        &mut self,
        scope: &mut Scope,
        name: NodeName,
        gate: &mut Activation,
        up: &mut Activation,
    ) {
        if !scope.is_done() {
            return self.multiply_gate(name, gate, up);
        }
        let sources = [(&*gate).into(), (&*up).into()];
        gate.name = name;
        self.record(scope, number::MUL, name, &sources);
    }

    /// `gate *= up`
    pub fn multiply_gate(&mut self, name: NodeName, gate: &mut Activation, up: &mut Activation) {
        let mut scope = self.start();
        let before = Source::from(&*gate);
        let device = gate.values.home();
        let done = self.on(&mut scope, device, |gpu| {
            gpu.multiply_rows(&mut up.values, gate)
        });
        if !done {
            self.fetch(&mut gate.values);
            self.fetch(&mut up.values);
            let (width, factors) = (gate.width.max(1), up.data());
            self.threads.rows(gate.data_mut(), width, |i, row| {
                let factors = &factors[i * width..][..width];
                row.iter_mut().zip(factors).for_each(|(x, w)| *x *= w);
            });
        }
        gate.name = name;
        self.record(&mut scope, number::MUL, name, &[before, (&*up).into()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::threads::Threads;
    use crate::devices::Devices;
    use crate::recorder::Recorder;

    #[test]
    fn limited_swiglu_agrees_with_its_formula() {
        let threads = Threads::new(2).unwrap();
        let mut ops = Ops::new(&threads, Recorder::new(None), Devices::cpu());
        let name = NodeName::global("x");
        let limit = SwigluLimit {
            limit: 1.5,
            names: [name; 3],
        };
        let (mut gate, mut up) = (Activation::new(1), Activation::new(2));
        for x in [&mut gate, &mut up] {
            x.shape(name, 40, 5);
        }
        let value = |i: usize| (i as f32 - 100.0) * 0.05;
        let (a, b) = (gate.data_mut(), up.data_mut());
        for (i, (a, b)) in a.iter_mut().zip(b).enumerate() {
            (*a, *b) = (value(i), value(199 - i) + 0.01);
        }
        ops.limit_gate(&limit, &mut gate);
        ops.limit_up(&limit, &mut up);
        ops.multiply_gate(name, &mut gate, &mut up);
        for (i, got) in gate.data().iter().enumerate() {
            let (g, u) = (f64::from(value(i)), f64::from(value(199 - i) + 0.01));
            let want = (g / (1.0 + (-g).exp())).min(1.5) * u.clamp(-1.5, 1.5);
            assert!((f64::from(*got) - want).abs() < 1e-6, "{got} {want} at {i}");
        }
    }
}
