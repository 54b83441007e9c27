//! Post-Fetch in a MoE layer: transfers begin behind the router, and the down product takes what has arrived.

use std::time::Instant;

use moe_trace::record::lane;

use crate::activation::Activation;
use crate::cpu::glu::Glu;
use crate::cpu::matmul::{self, Entries};
use crate::cuda::launch::{Fetched, Kernels};
use crate::cuda::{Device, Policy, Scratch};
use crate::ops::Ops;
use crate::ops::experts::{At, Projection, experts_gate_up};
use crate::placement::Side;
use crate::recorder::{Lanes, Routing};
use crate::weights::Linear;

impl Ops<'_> {
    /// Begins to copy the down matrices of the chosen experts to the GPU, if that is the policy.
    pub fn begin_post_fetch(&mut self, il: usize, down: &Linear, routing: &mut Routing) {
        self.fetches = false;
        let tokens = routing.ids.len() / routing.n_expert_used.max(1);
        let stack = &down.weights;
        let Some(device) = &mut self.device else {
            return;
        };
        if device.policy() != Policy::PostFetch
            || !Kernels::supports(stack.ty)
            || device.copies_for(stack, tokens)
            || device.holds(stack)
        {
            return;
        }
        self.fetch(&mut routing.ids);
        if let Some(device) = &mut self.device {
            self.fetches = device.begin_post_fetch(il, stack, routing.ids.host(), tokens);
        }
    }

    /// Gate and up of the slots of one token beyond those that the host is to compute, begun on the GPU. Gives the first of
    /// them; none if the host computes all.
    pub(super) fn gate_up_beyond(
        &mut self,
        [gate, up]: [&Linear; 2],
        glu: Glu,
        x: &mut Activation,
        routing: &mut Routing,
        out: &mut Activation,
    ) -> Option<usize> {
        let k = routing.n_expert_used;
        let device = self.device.as_ref().filter(|_| self.fetches)?;
        let limit = device.post_fetch.as_ref()?.settings().cpu_limit?;
        if routing.ids.len() != k || limit >= k || !Kernels::supports(gate.weights.ty) {
            return None;
        }
        let done = self.on(Side::Gpu, |device| {
            experts_gate_up(device, [gate, up], glu, x, routing, limit, out).map(|_| ())
        });
        self.forget_run();
        if !done {
            return None;
        }
        let mut ids = routing.ids.host().to_vec();
        ids[limit..].fill(-1);
        self.work.fill(&ids, gate.weights.n_expert);
        Some(limit)
    }

    /// Puts what the host computed, the first `slots` rows, before what the GPU did.
    pub(super) fn join_halves(&mut self, rows: &mut Activation, slots: usize) {
        let n = slots * rows.width;
        if let Some(device) = &self.device
            && let Err(error) = rows.values.join(device.gpu(), n)
        {
            self.fault.get_or_insert(error);
        }
    }

    /// The host ends gate and up of a layer, which it began at `start`.
    pub(super) fn end_window(&mut self, start: Instant) {
        if let (true, Some(device)) = (self.fetches, &mut self.device) {
            device.post_fetch_window(start, Instant::now());
        }
    }

    /// The product of a layer whose down matrices travel: on the GPU for those that arrived, on the host for the others.
    pub(super) fn project_fetched(
        &mut self,
        il: usize,
        projection: &Projection,
        src: &mut Activation,
        routing: &mut Routing,
        dst: &mut Activation,
    ) {
        let start = self.start_experts();
        let Linear { weights, bias } = projection.linear;
        let mut places = Vec::new();
        let done = self.on(Side::Gpu, |device| {
            let gpu = device.gpu();
            let x = src.values.device(gpu)?;
            let ids = routing.ids.device(gpu)?;
            places = device.land_post_fetch(routing.ids.host())?;
            if places.iter().all(|&place| place == 0) {
                return Ok(());
            }
            let from = device.begin_fetched_product()?;
            let table = device.scratch(Scratch::Table, size_of_val(places.as_slice()))?;
            device.gpu().upload(table, places.as_slice())?;
            let operands = Fetched {
                table,
                ty: weights.ty,
                n_in: weights.n_in,
                n_out: weights.n_out,
                row_size: weights.row_size,
                bias: device.optional(bias.as_ref())?,
                x,
                rows_per: 1,
                ids,
                entries: src.rows,
                out: dst.values.fill_device(device.gpu())?,
            };
            device
                .kernels()
                .mul_mat_fetched(device.stream(), &operands)?;
            device.end_fetched_product(from)
        });
        if self.device.as_ref().is_some_and(Device::transfers_failed) {
            self.recorder.fell_back();
        }
        let is_late = |place: &u64| *place == 0;
        if !done || places.iter().all(is_late) {
            self.forget_run();
            self.fetch(&mut src.values);
            self.work.fill(routing.ids.host(), weights.n_expert);
            let lanes = Lanes::All(lane::POST_FETCH_MISS);
            let at = At { il, start, lanes };
            self.project_rows(&at, projection, src, routing, dst, false);
            return;
        }
        if places.iter().any(is_late) {
            // Slots beyond the host's are the GPU's alone.
            self.fetch(&mut src.values);
            self.project_missed(projection, src, routing, &places, dst);
        }
        let lane = |place: &u64| match is_late(place) {
            true => lane::POST_FETCH_MISS,
            false => lane::POST_FETCHED,
        };
        let lanes: Vec<u8> = places.iter().map(lane).collect();
        let lanes = Lanes::Each(&lanes);
        let at = At { il, start, lanes };
        self.project_rows(&at, projection, src, routing, dst, true);
    }

    /// The rows whose transfer was late, by the host, put between those of the GPU.
    fn project_missed(
        &mut self,
        projection: &Projection,
        src: &Activation,
        routing: &Routing,
        places: &[u64],
        dst: &mut Activation,
    ) {
        let Linear { weights, bias } = projection.linear;
        let late = |(id, place): (&i32, &u64)| if *place == 0 { *id } else { -1 };
        let ids: Vec<i32> = routing.ids.host().iter().zip(places).map(late).collect();
        self.work.fill(&ids, weights.n_expert);
        let n_out = weights.n_out;
        let mut missed = std::mem::take(&mut self.missed);
        missed.resize(ids.len() * n_out, 0.0);
        let x = Entries {
            rows: src.data(),
            rows_per: 1,
            work: &self.work,
        };
        let out = &mut missed;
        matmul::mul_mat_id(self.threads, weights, x, out, &mut self.quantized, || ());
        for (row, &id) in missed.chunks_exact_mut(n_out).zip(&ids) {
            if let (Some(bias), 0..) = (bias, id) {
                let bias = &bias.data[id as usize * n_out..][..n_out];
                row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
            }
        }
        if let Some(device) = &mut self.device {
            device.host_ran();
            let put = |(at, row): (usize, &[f32])| {
                let out = dst.values.update_device(device.gpu())?;
                device.gpu().upload(out.offset(at * n_out * 4), row)
            };
            let rows = missed.chunks_exact(n_out).enumerate();
            let mut late = rows.filter(|(at, _)| ids[*at] >= 0);
            if let Err(error) = late.try_for_each(put) {
                self.fault.get_or_insert(error);
            }
        }
        self.missed = missed;
    }
}
