//! Operations of the selected experts.

use std::time::Instant;

use moe_trace::LayerId;
use moe_trace::record::lane;

use crate::activation::{Activation, AdapterStep, NodeName};
use crate::cpu::glu::Glu;
use crate::cpu::matmul::{self, Entries, RowOf};
use crate::cuda::{Device, Policy, Ptr};
use crate::device_id::DeviceId;
use crate::hot_cache::replace_lanes;
use crate::ops::{ExpertScales, MergeNames, Ops, Scope, SwigluLimit, number, router};
use crate::recorder::{LaneCounts, Lanes, Routing, Source};
use crate::weights::{Linear, Matrix, Vector};

/// Names of two nodes: the product of a projection, and the sum of product and bias.
pub type Names = [NodeName; 2];

/// State that the expert operations of a layer pass to each other within a forward pass.
pub(crate) struct Experts {
    /// Layer.
    pub(super) il: LayerId,
    /// With Post-Fetch, the GPU that the down matrices are copied to.
    pub(super) fetches: Option<DeviceId>,
    /// GPU and address of the quantized result of gate and up, if a kernel for one token wrote it.
    hidden: Option<(DeviceId, Ptr)>,
}

impl Experts {
    pub(super) fn of(il: LayerId) -> Experts {
        Experts {
            il,
            fetches: None,
            hidden: None,
        }
    }
}

/// A projection of the experts: gate, up or down.
#[derive(Clone, Copy)]
pub struct Projection<'a, 'g> {
    /// Layer.
    pub il: LayerId,
    /// Names of its nodes.
    pub names: Names,
    /// Its weights.
    pub linear: &'a Linear<'g>,
    /// Factors of the experts' results, before the bias.
    pub scales: Option<ExpertScales<'a>>,
}

impl Projection<'_, '_> {
    /// Whether its matrices and those of `other` are in one tensor. Then they are one node, with one record.
    pub(super) fn shares_node(&self, other: &Projection) -> bool {
        self.linear.weights.shares_tensor(&other.linear.weights)
    }
}

/// The activation of experts.
#[derive(Clone, Copy)]
pub(crate) struct GatedActivation<'a> {
    /// Name of its result.
    pub name: NodeName,
    /// The activation without the limit.
    pub glu: Glu,
    /// The limit, if it has one.
    pub limit: Option<&'a SwigluLimit>,
}

impl GatedActivation<'_> {
    /// The same activation in one kernel.
    pub fn of_one_kernel(&self) -> Glu {
        let limited = |limit: &SwigluLimit| Glu::SwigluLimited(limit.limit);
        self.limit.map_or(self.glu, limited)
    }
}

impl Ops<'_> {
    /// `gate = glu(W_gate · x, W_up · x)` for each token and each of its selected experts.
    ///
    /// `x (token, n_embd)`, `gate` and `up (token, slot, n_ff)`.
    pub fn gate_up(
        &mut self,
        layer: &mut Experts,
        [gate, up]: [Projection; 2],
        activation: GatedActivation,
        x: &mut Activation,
        routing: &mut Routing,
        [gate_out, up_out]: [&mut Activation; 2],
    ) {
        let mut scope = self.start_experts();
        let window_start = Instant::now();
        let entries = routing.ids.len();
        let linears = [gate.linear, up.linear];
        let [gate_weights, up_weights] = linears.map(|linear| &linear.weights);
        let glu = activation.of_one_kernel();
        gate_out.shape(gate.names[0], gate_weights.n_out, entries);
        up_out.shape(up.names[0], up_weights.n_out, entries);
        let (device, lane) = self.device_of_experts(&[gate_weights, up_weights], routing);
        let mut hidden = None;
        let done = self.on(&mut scope, device, |gpu| {
            let outs = [&mut *gate_out, &mut *up_out];
            hidden = gpu.experts_gate_up(linears, glu, x, routing, 0, outs)?;
            Ok(())
        });
        layer.hidden = hidden.filter(|_| done).map(|quantized| (device, quantized));
        if !done {
            // With Post-Fetch the GPU computes the weighted sum.
            self.fetch_expert_inputs(x, routing, layer.fetches.is_none());
            self.work.fill(routing.ids.host(), gate_weights.n_expert);
        }
        // The CPU computes the slots before this one, the GPU this slot and those after it.
        let first_on_gpu = if done {
            None
        } else {
            let outs = [&mut *gate_out, &mut *up_out];
            self.gate_up_on_gpu(layer, linears, glu, x, routing, outs)
        };
        let lane = if done { lane } else { lane::CPU };
        let split = match first_on_gpu {
            Some(first) => {
                let mut split = vec![lane; entries];
                split[first..].fill(lane::POST_FETCHED);
                split
            }
            None => self.lanes_of_copied(lane, device, gate_weights, routing),
        };
        let lanes = match split.as_slice() {
            [] => Lanes::All(lane),
            split => Lanes::Each(split),
        };
        let outs = [&mut *gate_out, up_out];
        self.gate_up_rows(
            &mut scope,
            [gate, up],
            activation,
            x,
            (routing, lanes),
            outs,
        );
        if let (Some(slots), Some(gpu)) = (first_on_gpu, layer.fetches) {
            self.join_rows(gpu, gate_out, slots);
        }
        self.end_window(layer, window_start);
    }

    /// Computes gate, up and their activation on the CPU, unless a GPU has computed them, and records them.
    pub(super) fn gate_up_rows(
        &mut self,
        scope: &mut Scope,
        [gate, up]: [Projection; 2],
        GatedActivation { name, glu, limit }: GatedActivation,
        x: &Activation,
        (routing, lanes): (&Routing, Lanes),
        [gate_out, up_out]: [&mut Activation; 2],
    ) {
        if gate.shares_node(&up) {
            self.multiply_rows(scope, &gate, x, routing, gate_out);
            self.add_low_rank_of_part(&gate, x, routing, gate_out);
        } else {
            self.project_rows(scope, &gate, x, (routing, lanes), gate_out);
        }
        if let Some(limit) = limit {
            self.limit_gate_in(scope, limit, gate_out);
        }
        self.project_rows(scope, &up, x, (routing, lanes), up_out);
        if let Some(limit) = limit {
            self.limit_up_in(scope, limit, up_out);
            self.multiply_gate_in(scope, name, gate_out, up_out);
            return;
        }
        let before = Source::from(&*gate_out);
        if !scope.is_done() {
            glu.apply(self.threads, gate_out.data_mut(), up_out.data());
        }
        gate_out.name = name;
        let sources = [before, (&*up_out).into()];
        self.record(scope, number::GLU, name, &sources);
    }

    /// The down products and their weighted sum.
    ///
    /// `src (token, slot, n_in)`, products `experts (token, slot, n_out)`, sums `dst (token, n_out)`. `merge` has the names
    /// of the sum. For one token on a GPU, one kernel may compute both and not write `experts`. Returns the
    /// number of products per lane.
    #[allow(clippy::too_many_arguments)] // the layer, its matrices, inputs and outputs
    pub fn down_and_merge(
        &mut self,
        layer: Experts,
        projection: Projection,
        merge: MergeNames,
        src: &mut Activation,
        routing: &mut Routing,
        experts: &mut Activation,
        dst: &mut Activation,
    ) -> LaneCounts {
        let il = layer.il;
        let entries = (src.rows, &mut *routing);
        let done = self.down_of_token(&layer, &projection, merge, entries, experts, dst);
        let Some(mut scope) = done else {
            let lanes = self.project(layer, projection, src, routing, experts);
            self.merge_experts(il, merge, routing, experts, dst);
            return lanes;
        };
        let lanes = Lanes::All(self.lane_of_resident(&projection.linear.weights));
        self.project_rows(&mut scope, &projection, src, (routing, lanes), experts);
        self.merge_rows(scope, il, merge, routing, experts, dst);
        lanes.count(routing.ids.len())
    }

    /// The down products of one token and their weighted sum in one kernel, if the quantized result of gate and up and the
    /// down matrices are on the same GPU. Returns the scope of these operations if the GPU computes them.
    fn down_of_token(
        &mut self,
        layer: &Experts,
        projection: &Projection,
        merge: MergeNames,
        (entries, routing): (usize, &mut Routing),
        experts: &mut Activation,
        dst: &mut Activation,
    ) -> Option<Scope> {
        let (gpu, quantized) = layer.hidden.filter(|_| layer.fetches.is_none())?;
        let down = projection.linear;
        if projection.scales.is_some() || merge.weights_first {
            return None;
        }
        if self.devices.holder(&down.weights) != Some(gpu) {
            return None;
        }
        let mut scope = self.start_experts();
        experts.shape(projection.names[0], down.weights.n_out, entries);
        dst.shape(merge.sum, down.weights.n_out, 1);
        let mut has_kernel = false;
        let done = self.on(&mut scope, gpu, |gpu| {
            has_kernel = gpu.experts_down(down, quantized, routing, experts, dst)?;
            Ok(())
        });
        (done && has_kernel).then_some(scope)
    }

    /// The products of `src (token, slot, n_in)` or `(token, n_in)` with the matrices of the selected experts, into
    /// `dst (token, slot, n_out)`. Returns the number of products per lane.
    pub(super) fn project(
        &mut self,
        layer: Experts,
        projection: Projection,
        src: &mut Activation,
        routing: &mut Routing,
        dst: &mut Activation,
    ) -> LaneCounts {
        let weights = &projection.linear.weights;
        dst.shape(projection.names[0], weights.n_out, routing.ids.len());
        if let Some(gpu) = layer.fetches {
            return self.project_fetched(gpu, &projection, src, routing, dst);
        }
        let mut scope = self.start_experts();
        let (device, lane) = self.device_of_experts(&[weights], routing);
        let done = self.on(&mut scope, device, |gpu| {
            gpu.mul_mat_id(projection.linear, src, routing, dst)?;
            match &projection.scales {
                Some(scales) => gpu.scale_experts(scales, routing, dst),
                None => Ok(()),
            }
        });
        if !done {
            self.fetch_expert_inputs(src, routing, true);
            self.work.fill(routing.ids.host(), weights.n_expert);
        }
        let lane = if done { lane } else { lane::CPU };
        let each = self.lanes_of_copied(lane, device, weights, routing);
        let lanes = match each.as_slice() {
            [] => Lanes::All(lane),
            each => Lanes::Each(each),
        };
        self.project_rows(&mut scope, &projection, src, (routing, lanes), dst);
        lanes.count(routing.ids.len())
    }

    /// The lane of experts that a GPU holds: by their placement, or because the hot cache contains all experts of the layer.
    fn lane_of_resident(&self, stack: &Matrix) -> u8 {
        match self.devices.placed(stack) {
            DeviceId::Cpu => lane::HOT_CACHE,
            DeviceId::Gpu(_) => lane::GPU_RESIDENT,
        }
    }

    /// The lane of each selected expert whose matrix was copied to a GPU for a product: experts in the GPU's hot cache are copied
    /// from there. Empty if all are in `lane`.
    fn lanes_of_copied(
        &self,
        lane: u8,
        device: DeviceId,
        stack: &Matrix,
        routing: &Routing,
    ) -> Vec<u8> {
        match self.devices.gpu(device) {
            Some(gpu) if lane == lane::CACHE_MISS && self.hot.is_some() => {
                let lane_of = |&id: &i32| {
                    if gpu.is_hot(stack, id) {
                        lane::HOT_CACHE
                    } else {
                        lane
                    }
                };
                let mut lanes: Vec<u8> = routing.ids.host().iter().map(lane_of).collect();
                if let Some(cache) = &self.hot {
                    replace_lanes(&mut lanes, &cache.scratch.slot_lanes);
                }
                lanes
            }
            _ => Vec::new(),
        }
    }

    /// Computes the product of a projection on the CPU, unless a GPU has computed it. `src` has one row per token, or one row per token
    /// and slot.
    fn multiply_rows(
        &mut self,
        scope: &Scope,
        projection: &Projection,
        src: &Activation,
        routing: &Routing,
        dst: &mut Activation,
    ) {
        let rows_per = routing.ids.len() / src.rows.max(1);
        // The transfers start during the first product of a layer, or after its launch.
        let mut start_transfers = || self.devices.start_transfers();
        if scope.is_done() {
            start_transfers();
        } else {
            let x = Entries {
                rows: src.data(),
                row_of: RowOf::Every(rows_per),
                work: &self.work,
            };
            let (out, quantized) = (dst.data_mut(), &mut self.quantized);
            let weights = projection.linear.weights.stack();
            matmul::mul_mat_id(self.threads, weights, x, out, quantized, start_transfers);
        }
        dst.name = projection.names[0];
    }

    /// Computes product, factors and bias of a projection on the CPU, unless a GPU has computed them, and records them. `src` has one
    /// row per token, which the record names ` (reshaped)`, or one row per token and slot.
    pub(super) fn project_rows(
        &mut self,
        scope: &mut Scope,
        projection: &Projection,
        src: &Activation,
        (routing, lanes): (&Routing, Lanes),
        dst: &mut Activation,
    ) {
        let mut result = projection.names[0];
        let Linear { weights, bias } = projection.linear;
        self.multiply_rows(scope, projection, src, routing, dst);
        if weights.is_adapted() {
            dst.name = result.adapter_step(AdapterStep::Base);
        }
        let product = dst.name;
        let rows_per = routing.ids.len() / src.rows.max(1);
        let suffix = if rows_per > 1 { " (reshaped)" } else { "" };
        let sources = [
            weights.into(),
            Source::view(src, suffix),
            router::ids(projection.il, routing),
        ];
        let experts = (routing, lanes);
        self.record_experts(scope, number::MUL_MAT_ID, product, &sources, experts);
        if let Some(scales) = &projection.scales {
            let [repeated, selected, scaled] = scales.names;
            result = scaled;
            let scaled = if weights.is_adapted() {
                scaled.adapter_step(AdapterStep::Base)
            } else {
                scaled
            };
            let scales = ExpertScales {
                names: [repeated, selected, scaled],
                ..*scales
            };
            self.scale_experts(scope, &scales, routing, dst);
        }
        if weights.is_adapted() {
            self.add_low_rank_of_experts(scope, result, projection, src, experts, dst);
        }
        if let Some(bias) = bias {
            self.add_id(scope, projection, bias, experts, dst);
        }
    }

    /// Adds the bias of each row's expert, in place.
    fn add_id(
        &mut self,
        scope: &mut Scope,
        projection: &Projection,
        bias: &Vector,
        (routing, lanes): (&Routing, Lanes),
        x: &mut Activation,
    ) {
        let name = projection.names[1];
        let before = Source::from(&*x);
        if !scope.is_done() {
            let ids = routing.ids.host();
            self.threads.rows(x.data_mut(), bias.n, |i, row| {
                let bias = &bias.data[ids[i] as usize * bias.n..][..bias.n];
                row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
            });
        }
        x.name = name;
        let ids = router::ids(projection.il, routing);
        let sources = [before, bias.into(), ids];
        self.record_experts(scope, number::ADD_ID, name, &sources, (routing, lanes));
    }

    /// The device that computes products with the selected experts of `stacks`, and its lane in records. Stacks on different
    /// GPUs are treated like stacks in CPU memory.
    fn device_of_experts(&mut self, stacks: &[&Matrix], routing: &mut Routing) -> (DeviceId, u8) {
        let mut holders = stacks.iter().map(|stack| self.devices.holder(stack));
        let first = holders.next().flatten();
        if let Some(gpu) = first
            && holders.all(|holder| holder == first)
        {
            return (gpu, self.lane_of_resident(stacks[0]));
        }
        let tokens = routing.ids.len() / routing.n_expert_used.max(1);
        let is_copied = self.devices.policy() == Policy::Gpu
            || stacks
                .iter()
                .all(|stack| self.devices.copies_for(stack, tokens));
        let nearest = stacks
            .iter()
            .find_map(|stack| self.devices.nearest_gpu(stack));
        if let Some(gpu) = first.or(nearest)
            && is_copied
            && stacks.iter().all(|stack| Device::supports(stack.ty))
        {
            self.fetch(&mut routing.ids);
            return (gpu, lane::CACHE_MISS);
        }
        (DeviceId::Cpu, lane::CPU)
    }

    /// `dst[t] = Σ weight[t, slot] · experts[t, slot]`, or without weights if they were applied to the inputs.
    fn merge_experts(
        &mut self,
        il: LayerId,
        merge: MergeNames,
        routing: &mut Routing,
        experts: &mut Activation,
        dst: &mut Activation,
    ) {
        let (width, k) = (experts.width, routing.n_expert_used);
        let tokens = experts.rows / k;
        let mut scope = self.start();
        dst.shape(merge.sum, width, tokens);
        let device = experts.values.home();
        let is_weighted = !merge.weights_first;
        let done = self.on(&mut scope, device, |gpu| {
            gpu.merge(experts, routing, is_weighted, dst)
        });
        if !done {
            self.fetch(&mut experts.values);
            if is_weighted {
                self.fetch(&mut routing.weights);
            }
        }
        self.merge_rows(scope, il, merge, routing, experts, dst);
    }

    /// Computes the weighted sum on the CPU, unless a GPU has computed it, and records its operations.
    pub(super) fn merge_rows(
        &mut self,
        mut scope: Scope,
        il: LayerId,
        merge: MergeNames,
        routing: &Routing,
        experts: &mut Activation,
        dst: &mut Activation,
    ) {
        let done = scope.is_done();
        let name = |stem| NodeName::of(stem, il);
        let (width, k) = (experts.width, routing.n_expert_used);
        if !merge.weights_first {
            let before = Source::from(&*experts);
            if !done {
                let weights = routing.weights.host();
                self.threads.rows(experts.data_mut(), width, |i, row| {
                    row.iter_mut().for_each(|x| *x *= weights[i]);
                });
            }
            experts.name = name("ffn_moe_weighted");
            let sources = [before, router::weights(merge.weights, routing)];
            self.record(&mut scope, number::MUL, experts.name, &sources);
        }

        // Like in llama.cpp's graph, the first addition adds two slots, and a single slot is copied.
        for slot in 1..k.max(2) {
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
            dst.name = if last { merge.sum } else { name("ffn_moe_sum") };
            let view = Source::slots(experts, k);
            let (op, sources): (u8, &[Source]) = match (slot, k) {
                (1, 1) => (number::CONT, &[view]),
                (1, _) => (number::ADD, &[view, view]),
                _ => (number::ADD, &[summed, view]),
            };
            self.record(&mut scope, op, dst.name, sources);
        }
    }
}
