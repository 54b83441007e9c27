//! Passes, layers, operations, lanes and devices of a run, from its records.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;

use moe_trace::passes::PassStarts;
use moe_trace::record::{FLAG_CPU_FALLBACK, lane};
use moe_trace::{Expert, LayerId, Operation, Phase, Run, TensorAccessLog};

use super::proto::DebugAnnotation;
use super::timeline::{Counter, Group, Open, Row, Timeline, Times, Unit, event};

/// Name of the row of operations that belong to no layer.
const NO_LAYER_NAME: &str = "no layer";

/// Converts the records of a run, in order. Its memory does not grow with the trace.
pub(super) struct Operations<'a> {
    run: &'a Run,
    /// Size of an expert in each layer, as far as known.
    expert_bytes: &'a BTreeMap<LayerId, u64>,
    /// Backend of each buffer.
    backends: &'a HashMap<u64, String>,
    /// Whether experts are in a cache or are transferred, so that there is a hit rate.
    has_hit_rate: bool,
    /// Start of the last operation.
    now_ns: u64,
    /// Operations whose recorded start is before that of the previous operation.
    n_moved: u64,
    passes: Row,
    layers: BTreeMap<Option<LayerId>, Row>,
    lanes: BTreeMap<u8, Row>,
    devices: BTreeMap<&'a str, Row>,
    hit_rate: Counter,
    expert_rate: Counter,
}

/// The current pass.
struct Pass {
    slice: Open,
    times: Times,
    label: Label,
    /// Activations of experts in a cache or transferred in time, and all activations with a known lane, except those of weights that
    /// are always in GPU memory.
    hits: u64,
    activations: u64,
    /// Bytes of the selected experts.
    expert_bytes: u64,
}

/// Name and annotations of a pass, which the slices of its layers have, too.
struct Label {
    name: String,
    annotations: Vec<DebugAnnotation>,
}

/// The consecutive operations of a layer in a pass.
struct Visit {
    layer: Option<LayerId>,
    slice: Open,
    end_ns: u64,
}

impl<'a> Operations<'a> {
    pub(super) fn new(
        run: &'a Run,
        expert_bytes: &'a BTreeMap<LayerId, u64>,
        backends: &'a HashMap<u64, String>,
    ) -> Self {
        let manifest = run.manifest.as_ref();
        let has_hit_rate = manifest.is_some_and(|manifest| {
            manifest.hot_cache.is_some()
                || manifest.dynamic_cache.is_some()
                || manifest.policy == "post-fetch"
        });
        let model = manifest.map_or("", |manifest| manifest.model.path.as_str());
        let description = format!("Run {} of {model}", run.id());
        Self {
            run,
            expert_bytes,
            backends,
            has_hit_rate,
            now_ns: 0,
            n_moved: 0,
            passes: Row::new(None, "passes", 0)
                .with_description(description.trim_end_matches(" of ").to_owned()),
            layers: BTreeMap::new(),
            lanes: BTreeMap::new(),
            devices: BTreeMap::new(),
            hit_rate: Counter::new("hit rate", Unit::Other("%"), 0),
            expert_rate: Counter::new("selected experts", Unit::Other("B/s"), 1),
        }
    }

    /// Writes all operations. Returns the number of operations that were moved to the start of the previous operation.
    pub(super) fn write(mut self, timeline: &mut Timeline<'_>) -> io::Result<u64> {
        let run = self.run;
        let mut starts = PassStarts::new();
        let mut routing = run
            .routing()
            .map(|operation| operation.first_record())
            .peekable();
        let mut current: Option<(Pass, Visit)> = None;
        for operation in run.trace.operations() {
            let head = operation.head();
            let times = self.times(timeline, head);
            let is_start = starts.is_start(&operation);
            let layer = head.layer();
            let (mut pass, visit) = match current.take() {
                Some((pass, visit)) if !is_start && visit.layer == layer => (pass, visit),
                Some((pass, visit)) if !is_start => {
                    self.end_visit(timeline, &visit)?;
                    let visit = self.start_visit(timeline, &pass.label, layer, times)?;
                    (pass, visit)
                }
                previous => {
                    if let Some((pass, visit)) = previous {
                        self.end_visit(timeline, &visit)?;
                        self.end_pass(timeline, &pass)?;
                    }
                    let pass = self.start_pass(timeline, &operation, times)?;
                    let visit = self.start_visit(timeline, &pass.label, layer, times)?;
                    (pass, visit)
                }
            };
            let experts: Vec<Expert> = operation
                .tokens()
                .flat_map(|token| token.experts())
                .collect();
            if routing.next_if_eq(&operation.first_record()).is_some() {
                self.count(&mut pass, layer, &experts);
            }
            self.operation(timeline, &operation, &experts, &visit, times)?;
            pass.times.end_ns = pass.times.end_ns.max(times.end_ns);
            let end_ns = visit.end_ns.max(times.end_ns);
            current = Some((pass, Visit { end_ns, ..visit }));
        }
        if let Some((pass, visit)) = current {
            self.end_visit(timeline, &visit)?;
            self.end_pass(timeline, &pass)?;
        }
        Ok(self.n_moved)
    }

    /// Start and end of an operation. Starts never decrease, so that slices have the order of the trace.
    fn times(&mut self, timeline: &mut Timeline<'_>, head: &TensorAccessLog) -> Times {
        let start_ns = head.timestamp_ns.get();
        let duration_ns = if head.has_extension() {
            head.duration_ns.get()
        } else {
            0
        };
        let end_ns = start_ns.saturating_add(duration_ns);
        if start_ns < self.now_ns {
            self.n_moved += 1;
        }
        self.now_ns = self.now_ns.max(start_ns);
        timeline.times(self.now_ns, end_ns)
    }

    fn start_pass(
        &mut self,
        timeline: &mut Timeline<'_>,
        operation: &Operation<'_>,
        times: Times,
    ) -> io::Result<Pass> {
        let label = self.label(operation);
        let event = event("pass", label.name.as_str(), label.annotations.clone());
        Ok(Pass {
            slice: self.passes.open(timeline, times.start_ns, event)?,
            times,
            label,
            hits: 0,
            activations: 0,
            expert_bytes: 0,
        })
    }

    fn label(&self, operation: &Operation<'_>) -> Label {
        let head = operation.head();
        let pass = self.run.passes();
        let pass = pass.and_then(|passes| passes.at(operation.first_record()));
        let token = pass.map_or(head.token(), |pass| pass.token_id);
        let n_tokens = head.has_extension().then(|| head.n_tokens.get());
        let name = match (head.phase(), n_tokens) {
            _ if pass.is_some_and(|pass| pass.is_warm_up) => "warm-up".to_owned(),
            (Some(Phase::Prompt), Some(1)) => format!("prompt token {token}"),
            (Some(Phase::Prompt), Some(n)) => format!("prompt of {n} tokens from {token}"),
            (Some(Phase::Prompt), None) => format!("prompt from token {token}"),
            (_, Some(n)) if n > 1 => format!("{n} tokens"),
            _ => format!("token {token}"),
        };
        let mut annotations = vec![DebugAnnotation::number("token", token.0)];
        if let Some(phase) = head.phase() {
            annotations.push(DebugAnnotation::text("phase", phase.name()));
        }
        if let Some(n_tokens) = n_tokens {
            annotations.push(DebugAnnotation::number("n_tokens", n_tokens));
            let sequence = head.sequence_id.get();
            annotations.push(DebugAnnotation::number("sequence", sequence));
        }
        Label { name, annotations }
    }

    fn end_pass(&mut self, timeline: &mut Timeline<'_>, pass: &Pass) -> io::Result<()> {
        let Times { start_ns, end_ns } = pass.times;
        self.passes.close(timeline, pass.slice, end_ns)?;
        if self.has_hit_rate && pass.activations > 0 {
            let hit_rate = 100.0 * pass.hits as f64 / pass.activations as f64;
            self.hit_rate.set(timeline, start_ns, hit_rate)?;
        }
        match pass.times.per_second(pass.expert_bytes) {
            Some(rate) if pass.expert_bytes > 0 => self.expert_rate.set(timeline, start_ns, rate),
            _ => Ok(()),
        }
    }

    fn start_visit(
        &mut self,
        timeline: &mut Timeline<'_>,
        pass: &Label,
        layer: Option<LayerId>,
        times: Times,
    ) -> io::Result<Visit> {
        let row = self.layers.entry(layer).or_insert_with(|| match layer {
            Some(layer) => Row::new(
                Some(Group::Layers),
                format!("layer {layer}"),
                i32::from(layer.0) + 1,
            ),
            None => Row::new(Some(Group::Layers), NO_LAYER_NAME, 0),
        });
        let event = event("layer", pass.name.as_str(), pass.annotations.clone());
        Ok(Visit {
            layer,
            slice: row.open(timeline, times.start_ns, event)?,
            end_ns: times.end_ns,
        })
    }

    fn end_visit(&mut self, timeline: &mut Timeline<'_>, visit: &Visit) -> io::Result<()> {
        match self.layers.get_mut(&visit.layer) {
            Some(row) => row.close(timeline, visit.slice, visit.end_ns),
            None => Ok(()),
        }
    }

    /// Adds the selected experts of a layer to the counters of a pass.
    fn count(&mut self, pass: &mut Pass, layer: Option<LayerId>, experts: &[Expert]) {
        for expert in experts {
            let is_hit = match expert.lane {
                lane::HOT_CACHE | lane::POST_FETCHED | lane::CACHE_HIT => true,
                lane::CPU | lane::POST_FETCH_MISS | lane::CACHE_MISS => false,
                _ => continue,
            };
            // A trace without a manifest has a hit rate if it has a lane of a cache.
            self.has_hit_rate |= expert.lane != lane::CPU;
            pass.activations += 1;
            pass.hits += u64::from(is_hit);
        }
        let bytes = layer.and_then(|layer| self.expert_bytes.get(&layer));
        if let Some(&bytes) = bytes {
            let n_experts = distinct(experts).len() as u64;
            let bytes = bytes.saturating_mul(n_experts);
            pass.expert_bytes = pass.expert_bytes.saturating_add(bytes);
        }
    }

    /// Writes an operation to the rows of its layer, its device and the lanes of its experts.
    fn operation(
        &mut self,
        timeline: &mut Timeline<'_>,
        operation: &Operation<'_>,
        experts: &[Expert],
        visit: &Visit,
        times: Times,
    ) -> io::Result<()> {
        let head = operation.head();
        let name = head.dst_name();
        let annotations = self.annotations(operation, experts);
        if let Some(row) = self.layers.get_mut(&visit.layer) {
            let event = event("operation", &*name, annotations);
            row.slice(timeline, Some(visit.slice), times, event)?;
        }
        if let Some(device) = device(head, self.backends) {
            let rank = i32::from(device != "CPU");
            let row = self
                .devices
                .entry(device)
                .or_insert_with(|| Row::new(Some(Group::Devices), device, rank));
            row.slice(timeline, None, times, event("device", &*name, Vec::new()))?;
        }
        let lanes: BTreeSet<u8> = experts.iter().map(|expert| expert.lane).collect();
        for lane in lanes {
            let Some(lane_name) = lane::NAMES.get(usize::from(lane)) else {
                continue;
            };
            if lane == lane::UNKNOWN {
                continue;
            }
            let on_lane: Vec<Expert> = experts
                .iter()
                .filter(|expert| expert.lane == lane)
                .copied()
                .collect();
            let event = event(
                "lane",
                &*name,
                vec![
                    DebugAnnotation::numbers("experts", distinct(&on_lane)),
                    DebugAnnotation::number("activations", on_lane.len() as u64),
                ],
            );
            let row = self
                .lanes
                .entry(lane)
                .or_insert_with(|| Row::new(Some(Group::Lanes), *lane_name, lane.into()));
            row.slice(timeline, None, times, event)?;
        }
        Ok(())
    }

    /// The operation, and the experts that it computed. Those of a single token have the order of the router, with their weights.
    fn annotations(&self, operation: &Operation<'_>, experts: &[Expert]) -> Vec<DebugAnnotation> {
        let head = operation.head();
        let mut annotations = Vec::new();
        if let Some(name) = self.run.ops().name(head.operation_type) {
            annotations.push(DebugAnnotation::text("operation", name));
        }
        if head.has_flag(FLAG_CPU_FALLBACK) {
            annotations.push(DebugAnnotation::flag("cpu_fallback"));
        }
        if experts.is_empty() {
            return annotations;
        }
        let ids = if head.reads_chunk_experts() {
            "expert_chunks"
        } else {
            "experts"
        };
        if operation.tokens().nth(1).is_some() {
            annotations.push(DebugAnnotation::numbers(ids, distinct(experts)));
            return annotations;
        }
        let selected = experts.iter().map(|expert| expert.expert_id.0);
        annotations.push(DebugAnnotation::numbers(ids, selected));
        let weights: Option<Vec<f32>> = experts.iter().map(|expert| expert.weight).collect();
        if let Some(weights) = weights {
            annotations.push(DebugAnnotation::fractions("weights", weights));
        }
        annotations
    }
}

/// The ids of the experts, ascending and without duplicates.
fn distinct(experts: &[Expert]) -> BTreeSet<u32> {
    experts.iter().map(|expert| expert.expert_id.0).collect()
}

/// The backend of the first buffer that the operation reads, if it is known.
fn device<'a>(head: &TensorAccessLog, backends: &'a HashMap<u64, String>) -> Option<&'a str> {
    let mut buffers = head.sources().iter().filter(|source| !source.is_disk());
    let backend = buffers.find_map(|buffer| backends.get(&buffer.offset_or_buffer_id.get()));
    backend.map(String::as_str)
}
