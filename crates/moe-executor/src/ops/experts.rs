//! Operations of the chosen experts.

use std::time::Instant;

use moe_trace::record::lane;

use crate::activation::{Activation, NodeName};
use crate::cpu::glu::Glu;
use crate::cpu::matmul::{self, Entries};
use crate::cuda::{Device, Policy};
use crate::ops::{Ops, number, router};
use crate::placement::Side;
use crate::recorder::{Choice, Lanes, Routing, Source};
use crate::weights::{Linear, Matrix, Vector};

/// Names of a projection's product and of what its bias is added to.
pub type Names = [NodeName; 2];

/// Layer, begin and lanes of an expert operation.
#[derive(Clone, Copy)]
pub(super) struct At<'a> {
    pub il: usize,
    pub start: Instant,
    pub lanes: Lanes<'a>,
}

/// A projection of the experts: product and bias.
#[derive(Clone, Copy)]
pub struct Projection<'a, 'g> {
    /// Names of its nodes.
    pub names: Names,
    /// Its weights.
    pub linear: &'a Linear<'g>,
}

impl Ops<'_> {
    /// Both products of every row with each of its experts, and the gated activation of the two, into `gate (token, slot,
    /// n_ff)`. `x` has one row a token.
    pub fn gate_up(
        &mut self,
        il: usize,
        [gate, up]: [Projection; 2],
        (activated, glu): (NodeName, Glu),
        x: &mut Activation,
        routing: &mut Routing,
        [gate_out, up_out]: [&mut Activation; 2],
    ) {
        let start = self.start_experts();
        let start_of_all = Instant::now();
        let entries = routing.ids.len();
        let (gate_rows, up_rows) = (gate, up);
        let (gate, up) = (gate.linear, up.linear);
        gate_out.shape(gate_rows.names[0], gate.weights.n_out, entries);
        up_out.shape(up_rows.names[0], up.weights.n_out, entries);
        let (side, lane) = self.side_of_experts(&[&gate.weights, &up.weights], routing);
        let mut hidden = None;
        let done = self.on(side, |device| {
            hidden = device.experts_gate_up([gate, up], glu, x, routing, 0, gate_out)?;
            Ok(())
        });
        self.hidden = hidden.filter(|_| done);
        if !done {
            // Down matrices that travel are for the GPU, which then weighs the experts.
            self.fetch_chosen(x, routing, !self.fetches);
            self.work.fill(routing.ids.host(), gate.weights.n_expert);
        }
        // The slots from here on are the GPU's, those before it the host's.
        let beyond = match done {
            true => None,
            false => self.gate_up_beyond([gate, up], glu, x, routing, gate_out),
        };
        let lane = if done { lane } else { lane::CPU };
        let mut split = vec![lane; if beyond.is_some() { entries } else { 0 }];
        split
            .iter_mut()
            .skip(beyond.unwrap_or(0))
            .for_each(|lane| *lane = lane::POST_FETCHED);
        let lanes = match beyond {
            Some(_) => Lanes::Each(&split),
            None => Lanes::All(lane),
        };
        let at = At { il, start, lanes };
        self.project_rows(&at, &gate_rows, x, routing, gate_out, done);
        let start = self.recorder.start_experts();
        let at = At { start, ..at };
        self.project_rows(&at, &up_rows, x, routing, up_out, done);
        let start = self.recorder.start();
        let before = Source::from(&*gate_out);
        if !done {
            glu.apply(self.threads, gate_out.data_mut(), up_out.data());
        }
        if let Some(slots) = beyond {
            self.join_halves(gate_out, slots);
        }
        self.end_window(start_of_all);
        gate_out.name = activated;
        self.record(start, number::GLU, activated, &[before, (&*up_out).into()]);
    }

    /// Product of every row of `src (token, slot, n_in)` with its expert, into `experts (token, slot, n_out)`, and the experts
    /// of every token, weighed and added up, into `dst`; `weights_name` is the node that the weights come from. For one token
    /// on the GPU a kernel does all that, and leaves `experts` as they were.
    #[allow(clippy::too_many_arguments)] // a layer, its matrices, what is read, what is written
    pub fn down_and_merge(
        &mut self,
        il: usize,
        projection: Projection,
        weights_name: NodeName,
        src: &mut Activation,
        routing: &mut Routing,
        experts: &mut Activation,
        dst: &mut Activation,
    ) {
        let Some(start) = self.down_of_token(il, &projection, src.rows, routing, experts, dst)
        else {
            self.project(il, projection, src, routing, experts);
            return self.merge_experts(il, weights_name, routing, experts, dst);
        };
        let lanes = Lanes::All(lane::GPU_RESIDENT);
        let at = At { il, start, lanes };
        self.project_rows(&at, &projection, src, routing, experts, true);
        let start = self.recorder.start();
        self.merge_rows(il, start, weights_name, routing, experts, dst, true);
    }

    /// The weighted sum of one token's experts on the GPU, where its gate and up left their results quantized and down lives
    /// there. Gives when it began, if it did.
    fn down_of_token(
        &mut self,
        il: usize,
        projection: &Projection,
        entries: usize,
        routing: &mut Routing,
        experts: &mut Activation,
        dst: &mut Activation,
    ) -> Option<Instant> {
        let quantized = self.hidden.take().filter(|_| !self.fetches)?;
        let down = projection.linear;
        if !self.device.as_mut()?.holds(&down.weights) {
            return None;
        }
        let start = self.start_experts();
        experts.shape(projection.names[0], down.weights.n_out, entries);
        dst.shape(NodeName::of("ffn_moe_out", il), down.weights.n_out, 1);
        let mut has_kernel = false;
        let done = self.on(Side::Gpu, |device| {
            has_kernel = device.experts_down(down, quantized, routing, experts, dst)?;
            Ok(())
        });
        (done && has_kernel).then_some(start)
    }

    /// Product of every row of `src (token, slot, n_in)` with its expert, into `dst (token, slot, n_out)`.
    fn project(
        &mut self,
        il: usize,
        projection: Projection,
        src: &mut Activation,
        routing: &mut Routing,
        dst: &mut Activation,
    ) {
        let start = self.start_experts();
        let weights = &projection.linear.weights;
        dst.shape(projection.names[0], weights.n_out, src.rows);
        if std::mem::take(&mut self.fetches) {
            self.project_fetched(il, &projection, src, routing, dst);
            return;
        }
        let (side, lane) = self.side_of_experts(&[weights], routing);
        let done = self.on(side, |device| {
            device.mul_mat_id(projection.linear, src, routing, dst)
        });
        if !done {
            self.fetch_chosen(src, routing, true);
            self.work.fill(routing.ids.host(), weights.n_expert);
        }
        let lanes = Lanes::All(if done { lane } else { lane::CPU });
        let at = At { il, start, lanes };
        self.project_rows(&at, &projection, src, routing, dst, done);
    }

    /// Product and bias of one projection on the host, unless `done`, and their records. `src` has one row a token (read
    /// through ` (reshaped)`), or one for each token and slot.
    pub(super) fn project_rows(
        &mut self,
        at: &At,
        projection: &Projection,
        src: &Activation,
        routing: &Routing,
        dst: &mut Activation,
        done: bool,
    ) {
        let [product, biased] = projection.names;
        let Linear { weights, bias } = projection.linear;
        let rows_per = routing.ids.len() / src.rows.max(1);
        // Beside the first product of a layer, or behind its launch.
        let mut errand = || {
            if let Some(device) = &mut self.device {
                device.start_transfers();
            }
        };
        if done {
            errand();
        } else {
            let x = Entries {
                rows: src.data(),
                rows_per,
                work: &self.work,
            };
            let (out, quantized) = (dst.data_mut(), &mut self.quantized);
            matmul::mul_mat_id(self.threads, weights, x, out, quantized, errand);
        }
        dst.name = product;
        let suffix = if rows_per > 1 { " (reshaped)" } else { "" };
        let sources = [
            weights.into(),
            Source::view(src, suffix),
            router::ids(at.il, routing),
        ];
        self.record_experts(at, number::MUL_MAT_ID, product, &sources, routing);
        if let Some(bias) = bias {
            self.add_id(at, biased, bias, routing, dst, done);
        }
    }

    /// Adds each expert's own bias, in place.
    fn add_id(
        &mut self,
        at: &At,
        name: NodeName,
        bias: &Vector,
        routing: &Routing,
        x: &mut Activation,
        done: bool,
    ) {
        let start = self.recorder.start_experts();
        let before = Source::from(&*x);
        if !done {
            let ids = routing.ids.host();
            self.threads.rows(x.data_mut(), bias.n, |i, row| {
                let bias = &bias.data[ids[i] as usize * bias.n..][..bias.n];
                row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
            });
        }
        x.name = name;
        let sources = [before, bias.into(), router::ids(at.il, routing)];
        let at = At { start, ..*at };
        self.record_experts(&at, number::ADD_ID, name, &sources, routing);
    }

    /// Where products with the chosen experts of some stacks are computed, and the lane that says so in records.
    fn side_of_experts(&mut self, stacks: &[&Matrix], routing: &mut Routing) -> (Side, u8) {
        let Some(device) = &mut self.device else {
            return (Side::Host, lane::CPU);
        };
        if stacks.iter().all(|stack| device.holds(stack)) {
            return (Side::Gpu, lane::GPU_RESIDENT);
        }
        let tokens = routing.ids.len() / routing.n_expert_used.max(1);
        let is_copied = device.policy() == Policy::Gpu
            || stacks.iter().all(|stack| device.copies_for(stack, tokens));
        if is_copied && stacks.iter().all(|stack| Device::supports(stack.ty)) {
            self.fetch(&mut routing.ids);
            return (Side::Gpu, lane::CACHE_MISS);
        }
        (Side::Host, lane::CPU)
    }

    pub(super) fn record_experts(
        &mut self,
        at: &At,
        op: u8,
        dst: NodeName,
        sources: &[Source],
        routing: &Routing,
    ) {
        self.lanes = at.lanes.count(routing.ids.len());
        let when = self.when(at.start);
        let choice = Choice {
            positions: &self.positions,
            routing,
            lanes: at.lanes,
        };
        self.recorder.experts(when, op, dst, sources, &choice);
    }

    /// The gated activation of a dense block, into `gate`.
    pub fn glu(&mut self, name: NodeName, glu: Glu, gate: &mut Activation, up: &mut Activation) {
        let start = self.start();
        let before = Source::from(&*gate);
        let side = match gate.values.is_on_device_alone() {
            true => Side::Gpu,
            false => Side::Host,
        };
        let done = self.on(side, |device| device.glu(glu, gate, up));
        if !done {
            self.fetch(&mut gate.values);
            self.fetch(&mut up.values);
            glu.apply(self.threads, gate.data_mut(), up.data());
        }
        gate.name = name;
        self.record(start, number::GLU, name, &[before, (&*up).into()]);
    }

    /// Weighs the experts of every token and adds them up.
    fn merge_experts(
        &mut self,
        il: usize,
        weights_name: NodeName,
        routing: &mut Routing,
        experts: &mut Activation,
        dst: &mut Activation,
    ) {
        let (width, k) = (experts.width, routing.n_expert_used);
        let tokens = experts.rows / k;
        let start = self.start();
        dst.shape(NodeName::of("ffn_moe_out", il), width, tokens);
        let side = match experts.values.is_on_device_alone() {
            true => Side::Gpu,
            false => Side::Host,
        };
        let done = self.on(side, |device| device.merge(experts, routing, dst));
        if !done {
            self.fetch(&mut experts.values);
            self.fetch(&mut routing.weights);
        }
        self.merge_rows(il, start, weights_name, routing, experts, dst, done);
    }

    /// The weighted sum on the host, unless `done`, and its records.
    #[allow(clippy::too_many_arguments)] // a layer, a moment, what is read, what is written
    fn merge_rows(
        &mut self,
        il: usize,
        start: Instant,
        weights_name: NodeName,
        routing: &Routing,
        experts: &mut Activation,
        dst: &mut Activation,
        done: bool,
    ) {
        let name = |stem| NodeName::of(stem, il);
        let (width, k) = (experts.width, routing.n_expert_used);
        let before = Source::from(&*experts);
        if !done {
            let weights = routing.weights.host();
            self.threads.rows(experts.data_mut(), width, |i, row| {
                row.iter_mut().for_each(|x| *x *= weights[i]);
            });
        }
        experts.name = name("ffn_moe_weighted");
        let sources = [before, router::weights(weights_name, routing)];
        self.record(start, number::MUL, experts.name, &sources);

        // The first two slots are one addition; a single slot is llama.cpp's plain copy.
        for slot in 1..k.max(2) {
            let start = self.recorder.start();
            let summed = Source::from(&*dst);
            if !done {
                let rows = experts.data();
                self.threads.rows(dst.data_mut(), width, |t, out| {
                    let slot_row = |slot: usize| &rows[(t * k + slot) * width..][..width];
                    match (slot, k) {
                        (1, 1) => out.copy_from_slice(slot_row(0)),
                        (1, _) => {
                            let pairs = slot_row(0).iter().zip(slot_row(1));
                            out.iter_mut().zip(pairs).for_each(|(o, (a, b))| *o = a + b);
                        }
                        _ => out
                            .iter_mut()
                            .zip(slot_row(slot))
                            .for_each(|(o, x)| *o += x),
                    }
                });
            }
            let last = slot + 1 >= k;
            dst.name = name(if last { "ffn_moe_out" } else { "ffn_moe_sum" });
            let view = Source::slots(experts, k);
            match (slot, k) {
                (1, 1) => self.record(start, number::CONT, dst.name, &[view]),
                (1, _) => self.record(start, number::ADD, dst.name, &[view, view]),
                _ => self.record(start, number::ADD, dst.name, &[summed, view]),
            }
        }
    }
}
