//! Replays the routing decisions of a trace through the MoE layers of a model. The operations after the router are those of
//! a session.
//!
//! Activations are random with a seed. All layers of a pass get the same activations, so that nothing is copied between
//! layers. The values do not influence the times.

mod activations;
mod collect;
mod routes;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use moe_engine::TokenSequence;
use moe_gguf::experts::expert_bytes_by_layer;
use moe_gguf::map::OffsetMap;
use moe_trace::{ExpertId, LayerId, TokenId};

use crate::activation::{Activation, NodeName};
use crate::cpu::threads::Threads;
use crate::cuda::{self, Device};
use crate::device_id::DeviceId;
use crate::devices::{Devices, TimePoint};
use crate::error::{Error, Result};
use crate::hot_cache::ExpertCache;
use crate::model::Model;
use crate::moe::MoeState;
use crate::ops::{At, Ops};
use crate::recorder::{self, LaneCounts, Recorder, Routing};

pub use collect::Collector;
pub use routes::{RoutedLayer, RoutedPass, Routes};

/// Runs the MoE layers of a model.
pub struct Replay<'a, 'g> {
    model: &'a Model<'g>,
    ops: Ops<'a>,
    state: MoeState,
    /// Input of the experts `(token, n_embd)`.
    x: Activation,
    /// Output of the last layer `(token, n_embd)`.
    out: Activation,
    /// The routing decisions of each layer of the pass.
    routings: Vec<Routing>,
    seed: u64,
    /// Positions whose activations `x` contains.
    drawn: Vec<TokenId>,
    /// By expert, whether a layer selected it: scratch of `n_distinct`.
    seen: Vec<bool>,
    /// Bytes of one expert, by layer.
    expert_bytes: BTreeMap<LayerId, u64>,
}

/// Time of a layer in one pass, and the weight bytes that it read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ran {
    /// Layer.
    pub layer: LayerId,
    /// Number of tokens of the pass in this layer.
    pub n_tokens: usize,
    /// Time from the activations being available to the output being available, on the GPU's clock if there is a GPU.
    pub time: Duration,
    /// Weight bytes of the distinct selected experts and of the shared expert.
    pub bytes: u64,
    /// Number of down products per lane.
    pub lanes: LaneCounts,
}

impl<'a, 'g> Replay<'a, 'g> {
    /// A replay through the MoE layers of `model` on `devices`. The CPU uses `threads`.
    pub fn new(
        model: &'a Model<'g>,
        threads: &'a Threads,
        devices: Devices<'a>,
        recorder: Recorder,
        seed: u64,
    ) -> Replay<'a, 'g> {
        let map = OffsetMap::with_adapters(model.gguf(), model.adapter_files());
        let mut replay = Replay {
            expert_bytes: expert_bytes_by_layer(&map),
            model,
            ops: Ops::new(threads, Recorder::new(None), devices),
            state: MoeState::new(64),
            x: Activation::new(2),
            out: Activation::new(3),
            routings: Vec::new(),
            seed,
            drawn: Vec::new(),
            seen: Vec::new(),
        };
        replay.record(recorder);
        replay
    }

    /// Replaces the recorder for the following passes. Returns the previous recorder.
    pub fn record(&mut self, mut recorder: Recorder) -> Recorder {
        if !self.ops.devices.gpus().is_empty() {
            recorder.wait_for_gpu();
        }
        std::mem::replace(&mut self.ops.recorder, recorder)
    }

    /// The hot or dynamic cache: builds one, or replaces experts.
    pub fn expert_cache(&mut self) -> ExpertCache<'_, 'a, 'g> {
        ExpertCache::new(&mut self.ops, self.model)
    }

    /// The devices of the replay.
    pub fn devices(&self) -> &Devices<'a> {
        &self.ops.devices
    }

    /// Runs the MoE layers of a pass in order. Layers of the pass that are dense in the model are skipped.
    ///
    /// # Errors
    /// [`Error::ExpertOutOfRange`] if the model does not have an expert of the pass, [`Error::Cuda`] if a GPU failed and its
    /// values are lost, [`Error::Trace`] if a record cannot be written.
    pub fn run(&mut self, pass: &RoutedPass) -> Result<Vec<Ran>> {
        let model = self.model;
        let layers = || {
            pass.layers()
                .filter_map(|routed| Some((routed, model.decoder.moe(routed.layer)?)))
        };
        layers().try_for_each(|(routed, _)| self.check(&routed))?;
        let sequence = TokenSequence {
            id: pass.sequence_id,
            phase: pass.phase,
        };
        self.ops.recorder.begin(recorder::PassInfo {
            first: sequence,
            is_complete: false,
        });
        self.ops.positions.clear();
        let first = layers().flat_map(|(routed, _)| routed.positions).next();
        self.ops.positions.extend(first.map(|position| position.0));
        self.ops.begin_pass()?;
        for (i, (routed, _)) in layers().enumerate() {
            self.place_routing(i, &routed)?;
        }
        self.inputs_are_ready();
        let mut ran = Vec::new();
        for (i, (routed, moe)) in layers().enumerate() {
            let at = self.ops.at(routed.layer);
            self.draw(at, routed.positions)?;
            self.ops.sequences.clear();
            self.ops.sequences.resize(routed.positions.len(), sequence);
            let clock = self.clock_of(at);
            let from = self.start(clock)?;
            let (ops, routing) = (&mut self.ops, &mut self.routings[i]);
            let (state, x, out) = (&mut self.state, &mut self.x, &mut self.out);
            let lanes = moe.forward_routed(ops, at.device, state, routing, x, out);
            let span = (from, self.end(clock)?);
            let expert = self.expert_bytes.get(&routed.layer).copied().unwrap_or(0);
            let shared = moe.shared_bytes();
            let done = Ran {
                layer: routed.layer,
                n_tokens: routed.positions.len(),
                time: Duration::ZERO,
                bytes: expert * self.n_distinct(routed.ids) + shared,
                lanes,
            };
            ran.push((done, span));
        }
        // Values do not matter, so a pass is not repeated.
        self.ops.end_calls_ahead();
        self.ops.end_pass()?;
        let time = |point| self.ops.devices.at(point);
        let timed = ran.into_iter().map(|(ran, (from, to))| {
            let time = time(to)?.saturating_duration_since(time(from)?);
            // A list of lanes counts its own length.
            let late = self.ops.recorder.late(ran.layer);
            let lanes = late.map_or(ran.lanes, |lanes| lanes.count(0));
            Ok(Ran { time, lanes, ..ran })
        });
        timed.collect()
    }

    /// Checks that the model has all experts of a layer.
    fn check(&self, routed: &RoutedLayer) -> Result<()> {
        let n_expert = self.model.hparams().n_expert;
        match routed.ids.iter().position(|id| id.index() >= n_expert) {
            None => Ok(()),
            Some(at) => Err(Error::ExpertOutOfRange {
                layer: routed.layer,
                position: routed.positions[at / routed.k],
                expert: routed.ids[at],
                n_expert,
            }),
        }
    }

    /// Puts the routing decisions of the `i`-th layer of the pass on the device where the router of a session leaves them, so
    /// that no layer waits for a copy.
    fn place_routing(&mut self, i: usize, routed: &RoutedLayer) -> Result<()> {
        if self.routings.len() <= i {
            self.routings.resize_with(i + 1, Routing::default);
        }
        let routing = &mut self.routings[i];
        routing.set(routed.ids, routed.weights, routed.k);
        let at = self.ops.at(routed.layer);
        if let Some(gpu) = self.ops.devices.gpu(at.device) {
            routing.ids.device(gpu.gpu())?;
            routing.weights.device(gpu.gpu())?;
        }
        Ok(())
    }

    /// Draws the activations of `positions`, unless `x` contains them, and puts them on the layer's device in the state that
    /// the norm of a session leaves: a single row on a GPU is quantized, too.
    fn draw(&mut self, at: At, positions: &[TokenId]) -> Result<()> {
        let (x, seed) = (&mut self.x, self.seed);
        let (before, is_new) = (x.values.home(), self.drawn != positions);
        if is_new {
            self.drawn.clear();
            self.drawn.extend_from_slice(positions);
            let width = self.model.hparams().n_embd;
            x.shape(NodeName::of("ffn_norm", at.il), width, positions.len());
            let fill = |i: usize, row: &mut [f32]| activations::fill(row, seed, positions[i]);
            self.ops.threads.rows(x.data_mut(), width, fill);
        }
        x.name = NodeName::of("ffn_norm", at.il);
        self.ops.positions.clear();
        let numbers = positions.iter().map(|position| position.0);
        self.ops.positions.extend(numbers);
        match self.ops.devices.gpu_mut(at.device) {
            Some(gpu) => {
                if x.values.home() != at.device {
                    x.values.update_device(gpu.gpu())?;
                }
                gpu.quantize_row(x)?;
            }
            None => {
                x.values.fetch()?;
                // In a session the layer waits for its input from the previous layer, which may be on a GPU.
                self.ops.wait_for_gpus()?;
            }
        }
        if is_new || x.values.home() != before {
            self.inputs_are_ready();
        }
        Ok(())
    }

    /// Excludes the preparation of inputs from the time of the next operation.
    fn inputs_are_ready(&mut self) {
        self.ops.devices.ran(DeviceId::Cpu);
        self.ops.recorder.host_is_free();
    }

    /// The device whose clock measures a layer: the device of the layer, or the first GPU, which may compute a part of it.
    fn clock_of(&self, at: At) -> DeviceId {
        let first = self.ops.devices.gpus().first();
        match at.device {
            DeviceId::Cpu => first.map_or(DeviceId::Cpu, Device::id),
            gpu => gpu,
        }
    }

    /// The start of a layer. On a GPU it is the last recorded event if no other work ran since.
    fn start(&mut self, clock: DeviceId) -> cuda::Result<TimePoint> {
        match self.ops.devices.gpu_mut(clock) {
            Some(gpu) => Ok(TimePoint::Gpu(clock, gpu.start_event()?)),
            None => Ok(TimePoint::Cpu(Instant::now())),
        }
    }

    /// The end of a layer on all devices.
    fn end(&mut self, clock: DeviceId) -> cuda::Result<TimePoint> {
        self.ops.devices.join(clock)?;
        match self.ops.devices.gpu_mut(clock) {
            Some(gpu) => Ok(TimePoint::Gpu(clock, gpu.record_event()?)),
            None => Ok(TimePoint::Cpu(Instant::now())),
        }
    }

    /// Number of distinct experts in `ids`.
    fn n_distinct(&mut self, ids: &[ExpertId]) -> u64 {
        self.seen.clear();
        self.seen.resize(self.model.hparams().n_expert, false);
        let is_new = |id: &&ExpertId| !std::mem::replace(&mut self.seen[id.index()], true);
        ids.iter().filter(is_new).count() as u64
    }
}

#[cfg(test)]
mod tests;
