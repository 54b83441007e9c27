//! The planned contents of a cache: experts of each lane.

use std::collections::BTreeMap;

use anyhow::{Context as _, bail};
use moe_executor::hot_cache::LaneContents;
use moe_executor::{CacheParams, DeviceId, Devices, Model};
use moe_gguf::kv_cache::KvTypes;
use moe_gguf::map::OffsetMap;
use moe_placement::learn::LayerObservation;
use moe_placement::plan::{ExpertSizes, LayerCurve, Plan, Weighting, rank};
use moe_trace::hot_cache::{HotCache, HotLane};
use moe_trace::{ExpertId, LayerId, ModelInfo};
use sysinfo::{MemoryRefreshKind, RefreshKind, System};

use super::HotCacheArgs;
use super::lanes::LaneArgs;
use super::source::Source;
use crate::context::Context;
use crate::experts::sizes_of;
use crate::lane_budget::{AutoBudget, LaneBudget};
use crate::model_memory::{ContextSize, GpuMemory, Memory};
use crate::plan_file::PlanFile;
use crate::plan_warnings::plan_warnings;

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
                let sizes = sizes(machine.model)?;
                plan.check_sizes(&sizes)
                    .with_context(|| path.display().to_string())?;
                Planned::of_plan(args, &plan, sizes, machine)?
            }
            Source::Learn(observations) => {
                let sizes = sizes(machine.model)?;
                let mut experts = observations.iter().flat_map(|layer| {
                    let experts = layer.experts.iter();
                    experts.map(|expert| (layer.layer, expert.expert))
                });
                if !experts.any(|(layer, expert)| sizes.get(layer, expert).is_some()) {
                    bail!(
                        "{} contains no expert of the model; pass a file of this model",
                        path.display()
                    );
                }
                Planned::of_learn(args, &observations, machine, ctx)?
            }
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
        let budgets = args.lanes.budgets();
        if budgets.is_empty() {
            bail!(
                "a cache that is planned from counts needs a size; pass --hot-cache-mib N or --hot-cache-mib auto"
            );
        }
        let devices = args.lanes.devices(budgets.len(), machine.devices)?;
        let sizes = sizes(machine.model)?;
        let arch = Some(machine.model.hparams().arch.as_str());
        let weighting = args.weighting()?.unwrap_or(Weighting::default_for(arch));
        let curve = args.curve()?.unwrap_or(LayerCurve::default_for(arch));
        let budgets = machine.budgets(&args.lanes, &devices, ctx);
        let fill = args.fill_random()?;
        let seed = fill.then_some(FILL_SEED);
        let ranking = rank(observations, weighting, curve);
        let plan = Plan::new(&ranking, &sizes, &budgets, args.strategy(), seed)?;
        for warning in plan_warnings(&plan, None) {
            ctx.note(warning);
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
    fn of_plan(
        args: &HotCacheArgs,
        plan: &PlanFile,
        sizes: ExpertSizes,
        machine: &Machine,
    ) -> anyhow::Result<Planned> {
        let weighting = args.weighting()?.map_or_else(|| plan.weighting(), Ok)?;
        let curve = args.curve()?.unwrap_or(plan.curve());
        let devices = args.lanes.devices(plan.lanes.len(), machine.devices)?;
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
}

impl Machine<'_, '_> {
    /// Returns the budget of each lane in bytes, and prints automatic budgets. Lanes that share CPU memory share what is free.
    pub fn budgets(&self, args: &LaneArgs, lanes: &[DeviceId], ctx: &Context) -> Vec<u64> {
        let budgets = args.budgets();
        let memory = budgets.contains(&LaneBudget::Auto).then(|| self.memory());
        let mut on_cpu = 0u64;
        let lanes = budgets.iter().zip(lanes).enumerate();
        let lanes = lanes.map(|(lane, (budget, &device))| {
            let bytes = match (budget.fixed_bytes(), &memory) {
                (None, Some(memory)) => {
                    let (free, needed) = match device {
                        DeviceId::Cpu => (
                            available_memory().saturating_sub(on_cpu),
                            memory.host.buffers.unwrap_or(0),
                        ),
                        DeviceId::Gpu(index) => (
                            self.limit_of_gpu(index),
                            memory
                                .gpus
                                .get(index)
                                .map_or(0, GpuMemory::needed_by_executor),
                        ),
                    };
                    let reserve = args.reserve_mib(lane);
                    let budget = AutoBudget::new(lane, free, needed, reserve);
                    ctx.note(budget);
                    budget.bytes()
                }
                (fixed, _) => fixed.unwrap_or(0),
            };
            if device == DeviceId::Cpu {
                on_cpu = on_cpu.saturating_add(bytes);
            }
            bytes
        });
        lanes.collect()
    }

    /// Bytes that this program may use on a GPU. Those in use are tensors and buffers, which [`Memory`] contains.
    fn limit_of_gpu(&self, index: usize) -> u64 {
        let gpu = self.devices.gpus().get(index);
        gpu.map_or(0, |gpu| gpu.gpu().memory().2)
    }

    /// Memory of the model and its context.
    fn memory(&self) -> Memory {
        let context = ContextSize {
            n_ctx: Some(self.kv_cache.n_positions as u64),
            n_seq: self.kv_cache.n_seq as u64,
            n_batch: self.n_batch as u64,
            types: KvTypes {
                k: self.kv_cache.k.ggml(),
                v: self.kv_cache.v.ggml(),
            },
        };
        let (placement, n_gpus) = (self.devices.placement(), self.devices.gpus().len());
        let mut memory = Memory::of(self.model.gguf(), context, placement, n_gpus);
        // A pass has at most as many tokens as a sequence. A replay has no positions.
        let n_tokens = match self.kv_cache.n_positions {
            0 => self.n_batch,
            n => self.n_batch.min(n),
        };
        memory.add_executor(self.model, placement, n_tokens as u64);
        memory
    }
}

/// CPU memory in bytes that can be allocated without swapping.
fn available_memory() -> u64 {
    let memory = MemoryRefreshKind::nothing().with_ram();
    let kind = RefreshKind::nothing().with_memory(memory);
    System::new_with_specifics(kind).available_memory()
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

/// Sizes of the model's experts in bytes.
pub fn sizes(model: &Model) -> anyhow::Result<ExpertSizes> {
    let n_layer = facts(model)?.n_hidden_layer();
    Ok(sizes_of(&OffsetMap::new(model.gguf()), n_layer))
}
