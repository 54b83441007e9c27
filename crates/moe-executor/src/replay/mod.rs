//! The MoE layers alone, with the routing of a trace: what follows the router is what a session runs.
//!
//! Activations are random and seeded; all layers of a pass get the same rows, so that nothing is copied between them. What they
//! hold changes no time.

mod activations;
mod collect;
mod routes;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use moe_gguf::LayerId;
use moe_gguf::experts::expert_bytes_by_layer;
use moe_gguf::map::OffsetMap;

use crate::activation::{Activation, NodeName};
use crate::cpu::threads::Threads;
use crate::cuda::{self, Device, Event};
use crate::devices::Devices;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::moe::MoeState;
use crate::ops::{At, Ops};
use crate::placement::DeviceId;
use crate::recorder::{self, LaneCounts, Recorder, Routing};

pub use collect::Collector;
pub use routes::{Chosen, RoutedPass, Routes};

/// Runs the MoE layers of a model.
pub struct Replay<'a, 'g> {
    model: &'a Model<'g>,
    ops: Ops<'a>,
    state: MoeState,
    /// Input of the experts `(token, n_embd)`.
    x: Activation,
    /// What the last layer gave `(token, n_embd)`.
    out: Activation,
    /// The choices of a pass's layers.
    choices: Vec<Routing>,
    seed: u64,
    /// Positions that the input was drawn for.
    drawn: Vec<u32>,
    /// Experts that a layer chose.
    seen: Vec<bool>,
    /// Bytes of an expert of each layer.
    expert_bytes: BTreeMap<LayerId, u64>,
}

/// A layer that ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ran {
    /// Layer.
    pub layer: LayerId,
    /// Rows.
    pub n_tokens: usize,
    /// From when the rows are where the layer reads them to when its output is there; on the GPU by its own clock.
    pub time: Duration,
    /// Bytes of the distinct experts that were chosen, and of the shared one.
    pub bytes: u64,
    /// Where the down product of each row's experts was computed.
    pub lanes: LaneCounts,
}

/// A time that the host took, or an event of a GPU.
#[derive(Clone, Copy)]
enum Moment {
    Host(Instant),
    Gpu(DeviceId, Event),
}

impl<'a, 'g> Replay<'a, 'g> {
    /// The MoE layers of `model` on `devices`, of which the CPU uses `threads`.
    pub fn new(
        model: &'a Model<'g>,
        threads: &'a Threads,
        devices: Devices<'a>,
        recorder: Recorder,
        seed: u64,
    ) -> Replay<'a, 'g> {
        let mut replay = Replay {
            expert_bytes: expert_bytes_by_layer(&OffsetMap::new(model.gguf())),
            model,
            ops: Ops::new(threads, Recorder::new(None), devices),
            state: MoeState::new(64),
            x: Activation::new(2),
            out: Activation::new(3),
            choices: Vec::new(),
            seed,
            drawn: Vec::new(),
            seen: Vec::new(),
        };
        replay.record(recorder);
        replay
    }

    /// Records the passes that follow with another recorder; returns the one so far.
    pub fn record(&mut self, mut recorder: Recorder) -> Recorder {
        if !self.ops.devices.gpus().is_empty() {
            recorder.wait_for_gpu();
        }
        std::mem::replace(&mut self.ops.recorder, recorder)
    }

    /// The devices that compute.
    pub fn devices(&self) -> &Devices<'a> {
        &self.ops.devices
    }

    /// Runs the layers of a pass that have experts, one after the other.
    ///
    /// # Errors
    /// An expert that the model does not have, a GPU that failed where the host cannot take over, or a record that cannot be
    /// written.
    pub fn run(&mut self, pass: &RoutedPass) -> Result<Vec<Ran>> {
        let model = self.model;
        let layers = || {
            pass.layers()
                .filter_map(|chosen| Some((chosen, model.decoder.moe(chosen.layer.index())?)))
        };
        layers().try_for_each(|(chosen, _)| self.check(&chosen))?;
        self.ops.recorder.begin(recorder::PassInfo {
            sequence_id: pass.sequence_id,
            phase: pass.phase,
            is_whole: false,
        });
        self.ops.positions.clear();
        let first = layers().flat_map(|(chosen, _)| chosen.positions).next();
        self.ops.positions.extend(first);
        self.ops.begin_pass()?;
        for (i, (chosen, _)) in layers().enumerate() {
            self.choose(i, &chosen)?;
        }
        self.prepared();
        let mut ran = Vec::new();
        for (i, (chosen, moe)) in layers().enumerate() {
            let at = self.ops.at(chosen.layer.index());
            self.draw(at, chosen.positions)?;
            let clock = self.clock_of(at);
            let from = self.start(clock)?;
            let (ops, choice) = (&mut self.ops, &mut self.choices[i]);
            let (state, x, out) = (&mut self.state, &mut self.x, &mut self.out);
            let lanes = moe.forward_chosen(ops, at, state, choice, x, out);
            let span = (from, self.end(clock)?);
            let expert = self.expert_bytes.get(&chosen.layer).copied().unwrap_or(0);
            let shared = moe.shared_bytes();
            let done = Ran {
                layer: chosen.layer,
                n_tokens: chosen.positions.len(),
                time: Duration::ZERO,
                bytes: expert * self.n_distinct(chosen.ids) + shared,
                lanes,
            };
            ran.push((done, span));
        }
        self.ops.end_pass()?;
        let time = |moment| match moment {
            Moment::Gpu(gpu, event) => self.ops.devices.time(gpu, event),
            Moment::Host(at) => Ok(at),
        };
        let timed = ran.into_iter().map(|(ran, (from, to))| {
            let time = time(to)?.saturating_duration_since(time(from)?);
            Ok(Ran { time, ..ran })
        });
        timed.collect()
    }

    fn check(&self, chosen: &Chosen) -> Result<()> {
        let n_expert = self.model.hparams().n_expert;
        let is_known = |&id: &i32| usize::try_from(id).is_ok_and(|id| id < n_expert);
        match chosen.ids.iter().position(|id| !is_known(id)) {
            None => Ok(()),
            Some(at) => Err(Error::ExpertOutOfRange {
                layer: chosen.layer,
                position: chosen.positions[at / chosen.k],
                expert: chosen.ids[at],
                n_expert,
            }),
        }
    }

    /// Puts the choice of the pass's layer number `i` where a session's router would leave it: behind one on the GPU nobody
    /// waits for it.
    fn choose(&mut self, i: usize, chosen: &Chosen) -> Result<()> {
        if self.choices.len() <= i {
            self.choices.resize_with(i + 1, Routing::default);
        }
        let choice = &mut self.choices[i];
        choice.choose(chosen.ids, chosen.weights, chosen.k);
        let at = self.ops.at(chosen.layer.index());
        if let Some(gpu) = self.ops.devices.gpu(at.device) {
            choice.ids.device(gpu.gpu())?;
            choice.weights.device(gpu.gpu())?;
        }
        Ok(())
    }

    /// Draws the rows at `positions`, if they are not there, and puts them where a session would have them, as its norm leaves
    /// them: one row on the GPU is quantized, too.
    fn draw(&mut self, at: At, positions: &[u32]) -> Result<()> {
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
        self.ops.positions.extend_from_slice(positions);
        match self.ops.devices.gpu_mut(at.device) {
            Some(gpu) => {
                if x.values.home() != at.device {
                    x.values.update_device(gpu.gpu())?;
                }
                gpu.quantize_row(x)?;
            }
            None => {
                x.values.fetch()?;
                // In a session the layer reads what the one before it left on a GPU, and waits for that.
                self.ops.wait_for_gpus()?;
            }
        }
        if is_new || x.values.home() != before {
            self.prepared();
        }
        Ok(())
    }

    /// What a layer reads was put in its place, which is no part of its time.
    fn prepared(&mut self) {
        self.ops.devices.ran(DeviceId::Cpu);
        self.ops.recorder.host_is_free();
    }

    /// The device whose clock measures a layer: that of the layer, or a GPU that may take part in it.
    fn clock_of(&self, at: At) -> DeviceId {
        let first = self.ops.devices.gpus().first();
        match at.device {
            DeviceId::Cpu => first.map_or(DeviceId::Cpu, Device::id),
            gpu => gpu,
        }
    }

    /// The start of a layer; on a GPU the last moment, if nothing was done since.
    fn start(&mut self, clock: DeviceId) -> cuda::Result<Moment> {
        match self.ops.devices.gpu_mut(clock) {
            Some(gpu) => Ok(Moment::Gpu(clock, gpu.start_event()?)),
            None => Ok(Moment::Host(Instant::now())),
        }
    }

    /// The end of a layer, on every GPU.
    fn end(&mut self, clock: DeviceId) -> cuda::Result<Moment> {
        self.ops.devices.join(clock)?;
        match self.ops.devices.gpu_mut(clock) {
            Some(gpu) => Ok(Moment::Gpu(clock, gpu.record_event()?)),
            None => Ok(Moment::Host(Instant::now())),
        }
    }

    fn n_distinct(&mut self, ids: &[i32]) -> u64 {
        self.seen.clear();
        self.seen.resize(self.model.hparams().n_expert, false);
        let is_new = |&&id: &&i32| !std::mem::replace(&mut self.seen[id as usize], true);
        ids.iter().filter(is_new).count() as u64
    }
}

#[cfg(test)]
mod tests;
