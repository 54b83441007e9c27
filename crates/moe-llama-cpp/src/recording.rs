//! Writes records for the nodes of llama.cpp's graphs.

use std::collections::HashMap;
use std::time::Instant;

use llama_cpp_sys_2 as sys;
use moe_engine::{Mode, Observer, RouterOutput, TokenSequence, TraceClock};
use moe_gguf::Gguf;
use moe_gguf::map::Start;
use moe_trace::graph::GraphBuilder;
use moe_trace::record::{self, MAX_EXPERTS, MAX_SOURCES};
use moe_trace::{LayerId, NO_TENSOR, Phase, RunWriter, TensorAccessLog, TokenId};

use crate::context::EvalCallback;
use crate::graph::{self, Buffers};
use crate::layer::{ends_layer, is_unnamed, layer_of};
use crate::node::Node;
use crate::ops::OpNumbers;

/// Location of a tensor in the model's files.
struct Place {
    tensor_idx: u32,
    file: u16,
    offset: u64,
    size_bytes: u64,
}

/// Results of a layer's router in this pass, token by token.
#[derive(Default)]
struct Router {
    logits: Vec<f32>,
    weights: Vec<f32>,
}

/// The selected experts of a node's tokens.
struct Routing {
    /// Selected experts `(token, n_expert_used)`.
    ids: Vec<i32>,
    /// Their weights `(token, n_expert_used)`.
    weights: Vec<f32>,
    n_expert_used: usize,
}

/// The tokens of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    /// Sequence (request).
    pub sequence_id: u32,
    /// Phase of the tokens.
    pub phase: Phase,
    /// Position of the first token.
    pub position: usize,
    /// Number of tokens.
    pub n_tokens: usize,
    /// Whether the logits of the last token are requested. Those of the others never are.
    pub with_logits: bool,
}

/// Writes a record for every computed node of a context, and calls an observer with the routing.
pub struct Recording<'a> {
    writer: Option<RunWriter>,
    mode: Mode,
    observer: Option<Observer<'a>>,
    clock: TraceClock,
    numbers: OpNumbers,
    places: HashMap<String, Place>,
    sequence_id: u32,
    phase: Phase,
    /// Position of each token of the batch.
    positions: Vec<u32>,
    /// Positions with requested logits. In the last layer, llama.cpp reduces the batch to these tokens.
    output_positions: Vec<u32>,
    /// Whether the batch has been reduced to these tokens.
    is_reduced: bool,
    start: Instant,
    /// Layer of the preceding node; `None` after the end of a layer.
    layer: Option<LayerId>,
    routers: HashMap<LayerId, Router>,
    /// The last layer for which the observer was called.
    observed: Option<LayerId>,
    /// Number of nodes of this pass with one record, and of nodes with a record for each token.
    n_ops: [u64; 2],
    /// The graph of this pass, if it will be stored: that of the first complete pass of each phase.
    graph: Option<GraphBuilder>,
    kept: [bool; Phase::ALL.len()],
    buffers: Buffers,
    failed: Option<moe_trace::Error>,
}

impl<'a> Recording<'a> {
    /// Records to a run directory, if given, and calls `observer` with the routing of each layer. Sources are matched by name with
    /// the tensors of `gguf`.
    pub fn new(
        gguf: &Gguf,
        writer: Option<RunWriter>,
        mode: Mode,
        observer: Option<Observer<'a>>,
    ) -> Recording<'a> {
        let place = |t: &moe_gguf::Tensor| Place {
            tensor_idx: t.index,
            file: t.file,
            offset: t.offset,
            size_bytes: t.size_bytes,
        };
        let tensors = gguf.tensors().iter();
        Recording {
            writer,
            mode,
            observer,
            clock: TraceClock::new(),
            numbers: OpNumbers::new(),
            places: tensors.map(|t| (t.name.clone(), place(t))).collect(),
            sequence_id: 0,
            phase: Phase::Prompt,
            positions: Vec::new(),
            output_positions: Vec::new(),
            is_reduced: false,
            start: Instant::now(),
            layer: None,
            routers: HashMap::new(),
            observed: None,
            n_ops: [0; 2],
            graph: None,
            kept: [false; Phase::ALL.len()],
            buffers: Buffers::new(),
            failed: None,
        }
    }

    /// Also matches sources with the tensors of LoRA adapters of the model `gguf`. A name that several adapters have is not matched,
    /// because the tensors of llama.cpp do not contain the name of their adapter.
    pub fn with_adapters(mut self, gguf: &Gguf, adapters: &[&Gguf]) -> Recording<'a> {
        let mut ambiguous = Vec::new();
        let starts = Start::of_adapters(gguf, adapters.iter().copied());
        for (adapter, start) in adapters.iter().zip(starts) {
            for tensor in adapter.tensors() {
                let place = Place {
                    tensor_idx: start.tensor_idx.saturating_add(tensor.index),
                    file: start.file.saturating_add(tensor.file),
                    offset: tensor.offset,
                    size_bytes: tensor.size_bytes,
                };
                if self.places.insert(tensor.name.clone(), place).is_some() {
                    ambiguous.push(&tensor.name);
                }
            }
        }
        for name in ambiguous {
            self.places.remove(name);
        }
        self
    }

    /// Starts a pass over a batch.
    pub fn begin(&mut self, batch: Batch) {
        self.sequence_id = batch.sequence_id;
        self.phase = batch.phase;
        self.positions.clear();
        let positions = (batch.position..).take(batch.n_tokens);
        self.positions.extend(positions.map(|p| p as u32));
        self.output_positions.clear();
        let last = self.positions.last().filter(|_| batch.with_logits);
        self.output_positions.extend(last);
        self.is_reduced = false;
        self.layer = None;
        for router in self.routers.values_mut() {
            router.logits.clear();
            router.weights.clear();
        }
        self.observed = None;
        self.n_ops = [0; 2];
        let is_new = !self.kept[usize::from(batch.phase.number())];
        self.graph =
            (is_new && batch.with_logits && self.writer.is_some()).then(GraphBuilder::default);
    }

    /// Ends a pass and flushes its records. Returns the number of nodes with one record, and of nodes with a record for each
    /// token.
    ///
    /// # Errors
    /// The first write that failed in this pass.
    pub fn end(&mut self) -> Result<[u64; 2], moe_trace::Error> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        let Some(writer) = &mut self.writer else {
            return Ok(self.n_ops);
        };
        writer.flush()?;
        let new_buffers = self.buffers.take_new();
        if !new_buffers.is_empty() {
            writer.write_buffer_events(&new_buffers)?;
        }
        if let Some(graph) = self.graph.take() {
            let first = TokenId(self.positions.first().copied().unwrap_or(0));
            writer.write_graph(self.phase, &graph.finish(self.phase, first))?;
            self.kept[usize::from(self.phase.number())] = true;
        }
        Ok(self.n_ops)
    }

    /// Writes the records of the following passes to a run directory.
    pub fn set_writer(&mut self, writer: RunWriter) {
        self.writer = Some(writer);
    }

    /// The writer during the run.
    pub fn writer(&self) -> Option<&RunWriter> {
        self.writer.as_ref()
    }

    /// Takes the writer at the end of the run.
    pub fn take_writer(&mut self) -> Option<RunWriter> {
        self.writer.take()
    }

    /// Which operations are recorded.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Positions of the tokens that a node computes.
    fn rows(&self) -> &[u32] {
        if self.is_reduced {
            &self.output_positions
        } else {
            &self.positions
        }
    }

    /// The layer of a node, from its name. Otherwise it is the layer of its weights, or else the highest layer of its sources and
    /// the preceding node.
    fn find_layer(&self, node: Node<'_>) -> Option<LayerId> {
        let name = node.name();
        if !is_unnamed(name) {
            return layer_of(name);
        }
        let weights = node.sources().filter(Node::is_weight);
        if let Some(layer) = weights.filter_map(|w| layer_of(w.name())).next() {
            return Some(layer);
        }
        // A node that reads the result of a layer is not part of that layer.
        let sources = node.sources().filter(|source| !ends_layer(source.name()));
        let sources = sources.filter_map(|source| layer_of(source.name()));
        sources.chain(self.layer).max()
    }

    /// Stores the result of a router's node.
    fn look_at_router(&mut self, node: Node<'_>) {
        let name = node.name();
        let is_logits = name.starts_with("ffn_moe_logits")
            // Without softmax or sigmoid, llama.cpp names the biased logits like probabilities.
            || name.starts_with("ffn_moe_probs-") && node.op() == sys::GGML_OP_ADD;
        if !is_logits && !is_weights(name) {
            return;
        }
        let (Some(layer), Some(values)) = (layer_of(name), node.f32s()) else {
            return;
        };
        let router = self.routers.entry(layer).or_default();
        if is_logits {
            router.logits = values
        } else {
            router.weights = values
        }
    }

    /// The selected experts of a `MUL_MAT_ID` or `ADD_ID` with their router weights.
    fn routing(&self, node: Node<'_>, layer: Option<LayerId>) -> Option<Routing> {
        let ids = node.source(2)?;
        let n_expert_used = ids.ne()[0];
        let ids = ids.i32s()?;
        let router = layer.and_then(|layer| self.routers.get(&layer));
        let known = router.map(|router| &router.weights);
        let weights = match known {
            Some(weights) if weights.len() == ids.len() => weights.clone(),
            _ => vec![0.0; ids.len()],
        };
        Some(Routing {
            ids,
            weights,
            n_expert_used,
        })
    }

    /// Replaces the observer, and returns the previous one.
    pub fn replace_observer(&mut self, observer: Option<Observer<'a>>) -> Option<Observer<'a>> {
        std::mem::replace(&mut self.observer, observer)
    }

    /// Calls the observer with a layer's routing, once in a pass.
    fn observe(&mut self, layer: LayerId, routing: &Routing) {
        let Some(mut observer) = self.observer.take() else {
            return;
        };
        if self.observed != Some(layer) {
            self.observed = Some(layer);
            let logits = self.routers.get(&layer).map(|router| &router.logits);
            let sequence = TokenSequence {
                id: self.sequence_id,
                phase: self.phase,
            };
            observer(&RouterOutput {
                layer,
                positions: self.rows(),
                sequences: &vec![sequence; self.rows().len()],
                logits: logits.map_or(&[], Vec::as_slice),
                ids: &routing.ids,
                weights: &routing.weights,
                n_expert_used: routing.n_expert_used,
            });
        }
        self.observer = Some(observer);
    }

    /// The record of a node without experts.
    fn record_of(&self, node: Node<'_>, layer: Option<LayerId>, duration: u64) -> TensorAccessLog {
        let rows = self.rows();
        let mut log = TensorAccessLog {
            ext_version: record::EXT_V1,
            operation_type: self.numbers.number(node.op()),
            phase: self.phase.number(),
            ..TensorAccessLog::default()
        };
        log.timestamp_ns.set(self.clock.ns(self.start));
        log.duration_ns.set(duration);
        log.token_id.set(rows.first().copied().unwrap_or(0));
        log.layer_id.set(record::layer_number(layer));
        log.sequence_id.set(self.sequence_id);
        log.n_tokens.set(rows.len() as u32);
        record::set_name(&mut log.dst_name, node.name());
        for (at, source) in node.sources().enumerate() {
            if at == MAX_SOURCES {
                log.flags |= record::FLAG_SOURCES_OMITTED;
                break;
            }
            log.num_sources += 1;
            self.set_source(&mut log, at, source);
        }
        log
    }

    fn set_source(&self, log: &mut TensorAccessLog, at: usize, source: Node<'_>) {
        let (storage, offset) = source.storage();
        let mut size_bytes = source.size_bytes();
        let slot = &mut log.sources[at];
        record::set_name(&mut slot.name, source.name());
        slot.tensor_ptr.set(source.address());
        slot.layer_id
            .set(record::layer_number(layer_of(source.name())));
        // A weight is recorded with its place in the file, also if llama.cpp uses a repacked copy.
        let place = self
            .places
            .get(storage.name())
            .filter(|_| source.is_weight());
        match place {
            Some(place) => {
                size_bytes = size_bytes.min(place.size_bytes.saturating_sub(offset));
                slot.memory_source = record::SOURCE_DISK;
                slot.offset_or_buffer_id
                    .set(place.offset.saturating_add(offset));
                slot.tensor_idx.set(place.tensor_idx);
                log.source_file[at].set(place.file);
            }
            None => {
                slot.memory_source = record::SOURCE_BUFFER;
                let buffer = source.buffer().map_or(0, |buffer| buffer.address);
                slot.offset_or_buffer_id.set(buffer);
                slot.tensor_idx.set(NO_TENSOR);
            }
        }
        log.set_source_size(at, size_bytes);
    }

    /// Writes the record of a node. An expert operation has one for each token, and more for tokens with more than 16 experts.
    fn write(&mut self, log: &TensorAccessLog, routing: Option<&Routing>) {
        let Some(writer) = self.writer.as_mut().filter(|_| self.failed.is_none()) else {
            return;
        };
        let rows = if self.is_reduced {
            &self.output_positions
        } else {
            &self.positions
        };
        let mut put = |log: &TensorAccessLog| match writer.next_record() {
            Ok(slot) => slot.clone_from(log),
            Err(error) => self.failed = self.failed.take().or(Some(error)),
        };
        let Some(routing) = routing else {
            put(log);
            return;
        };
        let k = routing.n_expert_used.max(1);
        let of_rows = routing
            .ids
            .chunks_exact(k)
            .zip(routing.weights.chunks_exact(k));
        for (row, (ids, weights)) in of_rows.enumerate() {
            let pieces = ids.chunks(MAX_EXPERTS).zip(weights.chunks(MAX_EXPERTS));
            for (piece, (ids, weights)) in pieces.enumerate() {
                let mut log = *log;
                if let Some(&position) = rows.get(row) {
                    log.token_id.set(position);
                }
                log.num_experts = ids.len() as u8;
                log.expert_slot_base = (piece * MAX_EXPERTS) as u8;
                if piece > 0 {
                    log.flags |= record::FLAG_CONTINUATION;
                }
                for (at, (&id, &weight)) in ids.iter().zip(weights).enumerate() {
                    log.expert_ids[at].set(id);
                    log.expert_weights[at].set(weight);
                    log.expert_lane[at] = record::lane::CPU;
                }
                put(&log);
            }
        }
    }
}

/// Whether a node contains weights of the selected experts. The last of these nodes in a layer has the applied weights.
fn is_weights(name: &str) -> bool {
    name.starts_with("ffn_moe_weights") && !name.starts_with("ffn_moe_weights_sum")
}

/// Whether a node reduces the batch to the tokens with requested logits.
fn reduces_batch(node: Node<'_>) -> bool {
    node.op() == sys::GGML_OP_GET_ROWS && node.source(1).is_some_and(|ids| ids.name() == "out_ids")
}

/// Whether a node clears or reads the state of a recurrent layer.
fn reads_state(node: Node<'_>) -> bool {
    let is_state = |source: Node<'_>| {
        let name = source.storage().0.name();
        name.starts_with("cache_r_") || name.starts_with("cache_s_")
    };
    [sys::GGML_OP_GET_ROWS, sys::GGML_OP_SCALE].contains(&node.op())
        && node.source(0).is_some_and(is_state)
}

impl EvalCallback for Recording<'_> {
    fn before(&mut self, node: Node<'_>) -> bool {
        if self.writer.is_none() && self.observer.is_none() {
            return false;
        }
        if node.is_operation() {
            self.n_ops[usize::from(node.is_expert_operation())] += 1;
        }
        self.start = Instant::now();
        // Softmax weights are named when they are reshaped, which is not a computed node.
        node.is_computed() || is_weights(node.name())
    }

    fn after(&mut self, node: Node<'_>) {
        let duration = self.start.elapsed().as_nanos() as u64;
        self.look_at_router(node);
        if !node.is_computed() {
            return;
        }
        self.is_reduced |= reduces_batch(node);
        let layer = self.find_layer(node);
        // The state of a recurrent layer may be read among the nodes of the layer before it.
        if !reads_state(node) {
            self.layer = if ends_layer(node.name()) { None } else { layer };
        }
        let routing = if node.is_expert_operation() {
            self.routing(node, layer)
        } else {
            None
        };
        if let (Some(layer), Some(routing)) = (layer, &routing) {
            self.observe(layer, routing);
        }
        if self.writer.is_none() {
            return;
        }
        self.buffers.see(node);
        node.sources().for_each(|source| self.buffers.see(source));
        if let Some(mut builder) = self.graph.take() {
            let op = self.numbers.name(node.op());
            graph::add(&mut builder, op, node, layer, self.rows().len());
            self.graph = Some(builder);
        }
        if routing.is_some() || self.mode == Mode::All {
            let log = self.record_of(node, layer, duration);
            self.write(&log, routing.as_ref());
        }
    }
}
