//! The planned contents of a cache: experts of each lane.

use std::collections::BTreeMap;

use anyhow::bail;
use moe_executor::hot_cache::LaneContents;
use moe_executor::placement::DeviceId;
use moe_executor::{CacheParams, Devices, Model};
use moe_gguf::kv_cache::{Cells, KvShape, KvTypes, LayerBytes};
use moe_gguf::map::{Category, OffsetMap};
use moe_gguf::text::counted;
use moe_placement::learn::LayerObservation;
use moe_placement::plan::{ExpertSizes, LayerCurve, MIB, Plan, PlanVerdict, Weighting, rank};
use moe_trace::hot_cache::{HotCache, HotLane};
use moe_trace::{ExpertId, LayerId, ModelInfo};
use sysinfo::{MemoryRefreshKind, RefreshKind, System};

use super::HotCacheArgs;
use super::budget::LaneBudget;
use super::source::{PlanExpert, PlanFile, Source};
use crate::context::Context;
use crate::experts::sizes_of;

/// Random seed of experts that fill free memory, the same as in the fork.
const FILL_SEED: u64 = 0x6d_6f_65;

/// A planned cache.
#[derive(Clone)]
pub struct Planned {
    /// Contents of each lane.
    pub lanes: Vec<LaneContents>,
    /// Sizes of the model's experts in bytes.
    pub sizes: ExpertSizes,
    pub weighting: Weighting,
    pub curve: LayerCurve,
    /// Description for the manifest, without what is known only at the end of the run.
    pub manifest: HotCache,
}

/// What a plan depends on.
pub struct Machine<'m, 'g> {
    pub model: &'m Model<'g>,
    pub devices: &'m Devices<'m>,
    /// Type and positions of the KV cache; no positions if there is no KV cache.
    pub kv_cache: CacheParams,
    /// Maximum number of tokens of a pass.
    pub n_batch: usize,
}

impl Planned {
    /// Plans a cache from the file of `--hot-cache`.
    ///
    /// # Errors
    /// The file cannot be read or is of another model, or options do not fit to the file or the devices.
    pub fn read(args: &HotCacheArgs, machine: &Machine, ctx: &Context) -> anyhow::Result<Planned> {
        let Some(path) = &args.hot_cache else {
            bail!("a cache needs a plan or a learn file; pass --hot-cache FILE");
        };
        let mut planned = match Source::read(path, facts(machine.model)?, ctx)? {
            Source::Plan(plan) => {
                args.check_plan_options()?;
                Planned::of_plan(args, &plan, machine)?
            }
            Source::Learn(observations) => Planned::of_learn(args, &observations, machine, ctx)?,
        };
        planned.manifest.source = path.display().to_string();
        Ok(planned)
    }

    /// Plans a cache from observations.
    pub fn of_learn(
        args: &HotCacheArgs,
        observations: &[LayerObservation],
        machine: &Machine,
        ctx: &Context,
    ) -> anyhow::Result<Planned> {
        let budgets = args.budgets();
        if budgets.is_empty() {
            bail!(
                "a cache that is planned from counts needs a size; pass --hot-cache-mib N or --hot-cache-mib auto"
            );
        }
        let devices = lane_devices(budgets.len(), machine.devices)?;
        let sizes = sizes(machine.model)?;
        let (weighting, curve) = weighting(args, machine.model)?;
        let reserves = args.reserves();
        let budgets = budgets.into_iter().enumerate().map(|(lane, budget)| {
            let bytes = |free, needed| budget.bytes(lane, reserves.get(lane).copied(), free, needed);
            if budget != LaneBudget::Auto {
                return bytes(0, 0);
            }
            let (free, needed) = (machine.free(devices[lane]), machine.needed(devices[lane]));
            let budget = bytes(free, needed);
            ctx.note(format_args!(
                "lane {lane}: {} MiB, with {} MiB free on {} and {} MiB for the model and its context",
                budget / MIB,
                free / MIB,
                devices[lane],
                needed / MIB
            ));
            budget
        });
        let budgets: Vec<u64> = budgets.collect();
        let fill = args.fill_random()?;
        let seed = fill.then_some(FILL_SEED);
        let ranking = rank(observations, weighting, curve);
        let plan = Plan::new(&ranking, &sizes, &budgets, args.strategy(), seed)?;
        let unknown = plan.decisions.iter();
        let unknown = unknown.filter(|d| d.verdict == PlanVerdict::UnknownSize);
        let unknown = unknown.count();
        if unknown > 0 {
            ctx.note(format_args!(
                "warning: {} of the learn file not in the model; check that the learn file is of this model",
                match unknown {
                    1 => "1 expert is".to_owned(),
                    n => format!("{n} experts are"),
                }
            ));
        }
        if plan.is_empty() {
            ctx.note("the hot cache is empty: its size allows no expert, and the empty expert that each layer needs");
        }
        let lanes = plan.lanes.iter().zip(devices);
        let contents = lanes
            .clone()
            .map(|(lane, device)| LaneContents::new(device, lane));
        let contents: Vec<LaneContents> = contents.collect();
        let described = lanes
            .zip(&contents)
            .map(|((lane, device), contents)| HotLane {
                device: device.to_string(),
                budget_bytes: lane.budget_bytes,
                planned_bytes: lane.used_bytes,
                bytes: 0,
                experts: contents.experts.clone(),
            });
        Ok(Planned {
            manifest: HotCache {
                kind: "learn".into(),
                strategy: args.strategy().name().into(),
                fill_random: fill,
                lanes: described.collect(),
                ..described_settings(args, weighting, curve)?
            },
            lanes: contents,
            sizes,
            weighting,
            curve,
        })
    }

    /// The cache of a plan.
    fn of_plan(args: &HotCacheArgs, plan: &PlanFile, machine: &Machine) -> anyhow::Result<Planned> {
        let sizes = sizes(machine.model)?;
        let is_unknown = |e: &&PlanExpert| sizes.get(e.layer, e.expert).is_none();
        if let Some(unknown) = plan.selected.iter().find(is_unknown) {
            bail!(
                "the plan contains expert {} of layer {}, which the model does not have; plan again with this model",
                unknown.expert,
                unknown.layer
            );
        }
        let weighting = args.weighting()?.map_or_else(|| plan.weighting(), Ok)?;
        let curve = args.curve()?.unwrap_or(plan.curve());
        let devices = lane_devices(plan.lanes.len(), machine.devices)?;
        let experts = |lane: usize| {
            let mut experts: BTreeMap<LayerId, Vec<ExpertId>> = BTreeMap::new();
            for expert in plan.selected.iter().filter(|expert| expert.lane == lane) {
                experts.entry(expert.layer).or_default().push(expert.expert);
            }
            experts
        };
        let lanes = devices.into_iter().enumerate();
        let lanes = lanes.map(|(lane, device)| LaneContents {
            device,
            experts: experts(lane),
        });
        let lanes: Vec<LaneContents> = lanes.collect();
        let described = plan
            .lanes
            .iter()
            .zip(&lanes)
            .map(|(lane, contents)| HotLane {
                device: contents.device.to_string(),
                budget_bytes: lane.budget_bytes,
                planned_bytes: lane.used_bytes,
                bytes: 0,
                experts: contents.experts.clone(),
            });
        Ok(Planned {
            manifest: HotCache {
                kind: "plan".into(),
                strategy: plan.strategy()?.name().into(),
                fill_random: plan.selected.iter().any(|expert| expert.hits == 0),
                lanes: described.collect(),
                ..described_settings(args, weighting, curve)?
            },
            lanes,
            sizes,
            weighting,
            curve,
        })
    }

    /// Whether the learn file of `--hot-cache` must be learned first: it does not exist.
    pub fn must_learn(args: &HotCacheArgs) -> bool {
        let path = args.hot_cache.as_ref();
        args.auto_learn && path.is_some_and(|path| !path.exists())
    }
}

impl Machine<'_, '_> {
    /// Free memory of a device in bytes, within its limit. On a GPU, weights and buffers that are allocated already count as free:
    /// [`Machine::needed`] contains them.
    fn free(&self, device: DeviceId) -> u64 {
        match device {
            DeviceId::Cpu => {
                let memory = MemoryRefreshKind::nothing().with_ram();
                let kind = RefreshKind::nothing().with_memory(memory);
                System::new_with_specifics(kind).available_memory()
            }
            DeviceId::Gpu(index) => self.devices.gpus().get(index).map_or(0, |gpu| {
                let (_, _, limit) = gpu.gpu().memory();
                limit
            }),
        }
    }

    /// Memory in bytes that the model needs on a device in addition to the cache: its other weights and the KV cache, an equal part for each
    /// GPU, and the buffers of a pass. On the CPU, the weights are mapped from the file.
    fn needed(&self, device: DeviceId) -> u64 {
        let n_gpus = self.devices.gpus().len() as u64;
        if device == DeviceId::Cpu || n_gpus == 0 {
            return 0;
        }
        let map = OffsetMap::new(self.model.gguf());
        let rows = map.rows.iter();
        let rows = rows.filter(|row| row.category != Category::Expert);
        let weights = rows.map(|row| row.size_bytes).fold(0, u64::saturating_add);
        let compute = self.model.compute_memory(self.n_batch);
        let context = self.kv_bytes();
        (weights.saturating_add(context) / n_gpus)
            .saturating_add(compute.gpu_bytes)
            .saturating_add(compute.expert_copy_bytes)
    }

    /// Bytes of the KV cache in all layers; 0 if its structure is unknown.
    fn kv_bytes(&self) -> u64 {
        let types = KvTypes {
            k: self.kv_cache.k.ggml(),
            v: self.kv_cache.v.ggml(),
        };
        let cells = Cells::uniform(self.kv_cache.n_positions as u64, 1);
        let layers = KvShape::of(self.model.gguf()).and_then(|shape| shape.bytes(types, cells));
        let layers = layers.unwrap_or_default();
        layers
            .iter()
            .map(LayerBytes::total)
            .fold(0, u64::saturating_add)
    }
}

/// Devices of `n` lanes: the GPUs in the order of the list, or the CPU without a GPU.
fn lane_devices(n: usize, devices: &Devices) -> anyhow::Result<Vec<DeviceId>> {
    let n_gpus = devices.gpus().len();
    if n_gpus == 0 {
        return Ok(vec![DeviceId::Cpu; n]);
    }
    if n > n_gpus {
        bail!(
            "the hot cache has {} for {}; list a GPU for each lane in --device, or pass fewer values to --hot-cache-mib",
            counted(n, "lane"),
            counted(n_gpus, "GPU")
        );
    }
    Ok((0..n).map(DeviceId::Gpu).collect())
}

/// The weighting of the options, or the fork's default for the model.
fn weighting(args: &HotCacheArgs, model: &Model) -> anyhow::Result<(Weighting, LayerCurve)> {
    let is_gpt_oss = model.hparams().arch == "gpt-oss";
    let default = if is_gpt_oss {
        (Weighting::Time, LayerCurve::new(1.0))
    } else {
        (Weighting::default(), LayerCurve::DEFAULT)
    };
    Ok((
        args.weighting()?.unwrap_or(default.0),
        args.curve()?.unwrap_or(default.1),
    ))
}

fn described_settings(
    args: &HotCacheArgs,
    weighting: Weighting,
    curve: LayerCurve,
) -> anyhow::Result<HotCache> {
    Ok(HotCache {
        weighting: weighting.name().into(),
        layer_curve: curve.get(),
        perf: args.perf()?.name().into(),
        update_policy: args.update_policy().name().into(),
        update_rate: args.update_rate(),
        update_after: args.update_after().name().into(),
        ..HotCache::default()
    })
}

fn facts(model: &Model) -> anyhow::Result<ModelInfo> {
    let gguf = model.gguf();
    let path = gguf.files()[0].path.to_string_lossy().into_owned();
    Ok(ModelInfo::from_gguf(&path, gguf)?)
}

fn sizes(model: &Model) -> anyhow::Result<ExpertSizes> {
    let n_layer = facts(model)?.n_hidden_layer();
    Ok(sizes_of(&OffsetMap::new(model.gguf()), n_layer))
}
