//! A session: tokens in, logits out, every operation recorded.

mod batch;

use std::time::Instant;

use moe_engine::{Decode, Logits, Observer, TokenSequence};
use moe_placement::perf::SharedCounters;
use moe_trace::{Phase, RunWriter, manifest};

use crate::activation::NodeName;
use crate::arch::decoder::{OutputRows, State};
use crate::buffers::{Inventory, Ledger};
use crate::cpu::threads::Threads;
use crate::devices::Devices;
use crate::error::Result;
use crate::hot_cache::{DynamicSlots, ExpertCache, HotCache, Profile};
use crate::kv_cache::{CacheParams, KvCache, Run};
use crate::model::Model;
use crate::ops::Ops;
use crate::recorder::{PassInfo, Recorder};

/// Evaluates sequences with one model. Its key-value cache has a slot for each sequence that is evaluated at the same time;
/// [`Session::select_slot`] switches between them. After the start, slot 0 is selected.
pub struct Session<'a, 'g> {
    model: &'a Model<'g>,
    ops: Ops<'a>,
    state: State,
    cache: KvCache,
    /// The selected slot of the cache.
    slot: usize,
    /// Sequence id in records, by slot.
    sequence_ids: Vec<u32>,
    ledger: Ledger,
    /// Maxima so far: tokens of a pass, tokens of a pass with logits, rows of logits, and positions reserved in the cache. The
    /// sizes of all buffers depend on these numbers only.
    maxima: [usize; 4],
}

impl<'a, 'g> Session<'a, 'g> {
    /// Starts a session on the CPU with an empty cache of `cache`. `recorder` records its operations.
    ///
    /// # Errors
    /// The model does not support the types of the cache.
    pub fn new(
        model: &'a Model<'g>,
        threads: &'a Threads,
        recorder: Recorder,
        cache: CacheParams,
    ) -> Result<Session<'a, 'g>> {
        Session::with_devices(model, threads, Devices::cpu(), recorder, cache)
    }

    /// Starts a session on `devices` with an empty cache of `cache`. `recorder` records its operations. The CPU uses `threads`.
    ///
    /// # Errors
    /// The model does not support the types of the cache, or it has adapters, and there is a GPU.
    pub fn with_devices(
        model: &'a Model<'g>,
        threads: &'a Threads,
        devices: Devices<'a>,
        mut recorder: Recorder,
        cache: CacheParams,
    ) -> Result<Session<'a, 'g>> {
        let hp = model.hparams();
        model.check_adapters(&devices)?;
        cache.check(model.gguf(), hp)?;
        let cache = KvCache::new(hp, cache);
        if !devices.gpus().is_empty() {
            recorder.wait_for_gpu();
        }
        Ok(Session {
            model,
            ledger: Ledger::new(),
            maxima: [0; 4],
            ops: Ops::new(threads, recorder, devices),
            state: State::default(),
            slot: 0,
            sequence_ids: vec![0; cache.n_seq()],
            cache,
        })
    }

    /// The model.
    pub fn model(&self) -> &'a Model<'g> {
        self.model
    }

    /// Calls `observer` with the routing decisions of each MoE layer.
    pub fn observe(&mut self, observer: Observer<'a>) {
        self.ops.observer = Some(observer);
    }

    /// Replaces the recorder for the following passes. Returns the previous recorder.
    pub fn record(&mut self, mut recorder: Recorder) -> Recorder {
        if !self.ops.devices.gpus().is_empty() {
            recorder.wait_for_gpu();
        }
        std::mem::replace(&mut self.ops.recorder, recorder)
    }

    /// Selects the slot whose sequence the following calls of [`Decode`] continue.
    ///
    /// # Errors
    /// [`Error::SlotOutOfRange`](crate::Error::SlotOutOfRange).
    pub fn select_slot(&mut self, slot: usize) -> Result<()> {
        self.slot = self.existing(slot)?;
        Ok(())
    }

    /// The hot or dynamic cache: builds one, or replaces experts.
    pub fn expert_cache(&mut self) -> ExpertCache<'_, 'a, 'g> {
        ExpertCache::new(&mut self.ops, self.model)
    }

    /// Replaces the settings of the model's architecture in the hot cache, if it is enabled: for comparisons.
    pub fn set_hot_cache_profile(&mut self, profile: Profile) {
        if let Some(cache) = &mut self.ops.hot {
            cache.set_profile(profile);
        }
    }

    /// The dynamic cache, if it is enabled.
    pub fn dynamic_cache(&self) -> Option<&DynamicSlots<'a>> {
        self.ops.dynamic.as_deref()
    }

    /// Removes the hot cache or the dynamic cache, and frees its memory.
    pub fn disable_hot_cache(&mut self) {
        self.ops.disable_hot_cache();
    }

    /// The hot cache, if it is enabled.
    pub fn hot_cache(&self) -> Option<&HotCache> {
        self.ops.hot.as_deref()
    }

    /// The counters of the hot cache. Another thread may read them while the session runs.
    pub fn counters(&self) -> Option<SharedCounters> {
        Some(self.hot_cache()?.counters().clone())
    }

    /// Runs a forward pass over `tokens`, which are within the vocabulary and the context.
    fn evaluate(&mut self, tokens: &[u32], phase: Phase, logits: Logits) -> Result<()> {
        let n_past = self.cache.len(self.slot);
        let (ops, s) = (&mut self.ops, &mut self.state);
        ops.positions.clear();
        ops.positions
            .extend((n_past..n_past + tokens.len()).map(|p| p as u32));
        ops.sequences.clear();
        let sequence = TokenSequence {
            id: self.sequence_ids[self.slot],
            phase,
        };
        ops.sequences.resize(tokens.len(), sequence);
        s.tokens.clear();
        s.tokens.extend_from_slice(tokens);
        s.wanted.clear();
        if logits == Logits::Last {
            s.wanted.push(tokens.len() as u32 - 1);
        }
        let run = Run {
            sequence: self.slot,
            tokens: 0..tokens.len(),
        };
        self.pass([run], n_past + tokens.len())
    }

    /// Runs a forward pass over the tokens, positions, sequences and wanted rows that `state` and `ops` contain. Their slots are
    /// `runs`, and the longest sequence has `n_positions` positions afterwards.
    fn pass(&mut self, runs: impl IntoIterator<Item = Run>, n_positions: usize) -> Result<()> {
        let start = Instant::now();
        let (n_tokens, n_wanted) = (self.state.tokens.len(), self.state.wanted.len());
        let info = PassInfo {
            first: self.ops.sequences[0],
            is_complete: n_wanted > 0,
        };
        // A pass that failed may have left them.
        (self.ops.not_finite, self.ops.fault) = (None, None);
        self.ops.recorder.begin(info);
        self.cache.begin_pass(runs, n_positions)?;
        self.ops.begin_pass()?;
        self.forward();
        if self.ops.must_repeat() {
            self.ops.wait_for_gpus()?;
            self.ops.not_finite = None;
            self.ops.recorder.begin(info);
            self.ops.begin_pass()?;
            self.forward();
        }
        self.cache.end_pass();
        self.ops.end_pass()?;
        self.record_buffers([n_tokens, n_wanted], start)
    }

    /// The operations of a pass.
    fn forward(&mut self) {
        let (ops, s) = (&mut self.ops, &mut self.state);
        self.model.decoder.embed(ops, &self.model.tok_embd, s);
        self.model.decoder.forward(ops, s, &mut self.cache);
        let norms_all = self.model.decoder.spec().output_rows == OutputRows::AfterNorm;
        if norms_all || !s.wanted.is_empty() {
            self.head();
        }
    }

    /// Final norm and output product for the rows whose logits are wanted. If they are selected after the norm, it is computed for all
    /// rows, like in llama.cpp.
    fn head(&mut self) {
        let (ops, s, model) = (&mut self.ops, &mut self.state, self.model);
        let device = ops.output_device();
        let names = ["norm", model.decoder.spec().output_norm.node].map(NodeName::global);
        ops.norm(device, names, &mut s.x, &model.output_norm, &mut s.normed);
        if s.wanted.is_empty() {
            return;
        }
        model.decoder.select_normed_rows(ops, s);
        let result = NodeName::global("result_output");
        let spec = model.decoder.spec();
        let (scale, bound) = (spec.scales.logits, spec.logits_bound);
        let unscaled = match (scale, bound) {
            (None, None) => result,
            _ => NodeName::global("result_output_unscaled"),
        };
        let names = match &model.output.bias {
            Some(_) => [NodeName::global("result_output_no_bias"), unscaled],
            None => [unscaled; 2],
        };
        ops.linear(names, &model.output, &mut s.normed, &mut s.logits);
        if let Some(factor) = scale {
            ops.scale(result, factor, &mut s.logits);
        }
        if let Some(bound) = bound {
            let steps = ["result_output_scaled", "result_output_tanh"].map(NodeName::global);
            ops.bound([steps[0], steps[1], result], bound, &mut s.logits);
        }
        ops.recorder.result((&s.logits).into());
        ops.fetch_rows(&mut s.logits);
        ops.check_finite(&s.logits);
    }

    /// Records events for the buffers that the pass created or enlarged.
    fn record_buffers(&mut self, [tokens, wanted]: [usize; 2], start: Instant) -> Result<()> {
        let with_logits = if wanted == 0 { 0 } else { tokens };
        let now = [tokens, with_logits, wanted, self.cache.reserved()];
        let pairs = || now.iter().zip(&self.maxima);
        if pairs().all(|(now, before)| now <= before) {
            return Ok(());
        }
        for (before, now) in self.maxima.iter_mut().zip(now) {
            *before = now.max(*before);
        }
        let mut inventory = Inventory::default();
        self.model.buffers(&mut inventory);
        self.cache.buffers(&mut inventory);
        self.state.buffers(&mut inventory);
        self.ops.buffers(&mut inventory);
        let events = self
            .ledger
            .changes(inventory, self.ops.recorder.timestamp(start));
        self.ops.recorder.buffers(&events)
    }

    fn check(&self, tokens: &[u32]) -> moe_engine::Result<()> {
        let hp = self.model.hparams();
        let n_past = self.cache.len(self.slot);
        let wanted = n_past + tokens.len();
        if wanted > self.n_ctx() || tokens.is_empty() {
            return Err(moe_engine::Error::ContextFull {
                tokens: wanted,
                context: self.n_ctx(),
                trained: hp.n_ctx_train,
            });
        }
        match tokens.iter().position(|&t| t as usize >= hp.n_vocab) {
            Some(at) => Err(moe_engine::Error::TokenOutOfRange {
                token: tokens[at],
                position: n_past + at,
                n_vocab: hp.n_vocab,
            }),
            None => Ok(()),
        }
    }

    /// Reports a value of the last pass that is not finite.
    fn check_finite(&mut self) -> moe_engine::Result<()> {
        match self.ops.not_finite.take() {
            Some((node, position)) => Err(moe_engine::Error::NotFinite {
                node: node.to_string(),
                position,
            }),
            None => Ok(()),
        }
    }

    /// The devices of the session.
    pub fn devices(&self) -> &Devices<'a> {
        &self.ops.devices
    }

    /// Ends the session and returns its devices, with the weights that they hold. The last buffer events are not recorded.
    pub fn into_devices(mut self) -> Devices<'a> {
        self.disable_hot_cache();
        self.ops.devices
    }

    /// Ends the session and returns its recorder, whose writer can then be finished. The second value is an error if the
    /// last buffer events could not be written. The run is complete without them.
    pub fn into_recorder(mut self) -> (Recorder, Result<()>) {
        let now = self.ops.recorder.timestamp(Instant::now());
        let written = self.ops.recorder.buffers(&self.ledger.end(now));
        (self.ops.recorder, written)
    }
}

impl Decode for Session<'_, '_> {
    fn begin_sequence(&mut self, sequence_id: u32) {
        self.sequence_ids[self.slot] = sequence_id;
        self.cache.clear(self.slot);
    }

    fn n_past(&self) -> usize {
        self.cache.len(self.slot)
    }

    fn n_ctx(&self) -> usize {
        self.cache.capacity()
    }

    fn n_ctx_train(&self) -> usize {
        self.model.hparams().n_ctx_train
    }

    fn is_eog(&self, token: u32) -> bool {
        self.model.tokenizer().is_eog(token)
    }

    fn has_room(&self, n_tokens: usize) -> bool {
        let recorder = &self.ops.recorder;
        let records = self.model.records_per_pass(n_tokens, recorder.mode());
        recorder.has_room(records)
    }

    fn decode(
        &mut self,
        tokens: &[u32],
        phase: Phase,
        logits: Logits,
    ) -> moe_engine::Result<&[f32]> {
        self.check(tokens)?;
        self.evaluate(tokens, phase, logits)?;
        self.check_finite()?;
        Ok(match logits {
            Logits::None => &[],
            Logits::Last => self.state.logits.data(),
        })
    }
}

impl moe_engine::Session for Session<'_, '_> {
    fn stop_observing(&mut self) {
        self.ops.observer = None;
    }

    fn batches(&mut self) -> Option<&mut dyn moe_engine::BatchSession> {
        Some(self)
    }

    fn set_trace(&mut self, mode: Option<moe_engine::Mode>) -> moe_engine::Result<()> {
        self.ops.recorder.set_mode(mode);
        Ok(self.ops.recorder.wait()?)
    }

    fn gpus(&self) -> Vec<manifest::Gpu> {
        self.devices().describe()
    }

    fn gpu_bandwidth(&self) -> Option<moe_engine::Result<f64>> {
        let measured = self.devices().gpus().first()?.bandwidth();
        Some(measured.map_err(moe_engine::Error::engine))
    }

    fn into_writer(self: Box<Self>) -> (Option<RunWriter>, moe_engine::Result<()>) {
        let (recorder, ended) = self.into_recorder();
        (
            recorder.into_writer(),
            ended.map_err(moe_engine::Error::from),
        )
    }
}
