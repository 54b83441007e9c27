//! Command lines that put a plan to use: of llama.cpp's hot-cache fork, and of llama.cpp itself.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use moe_files::text::is_hidden;
use moe_placement::LayerId;
use moe_placement::plan::{Entry, Lane, LayerExperts, MIB, Strategy, WholeLayers};

use super::{Args, Planned};
use crate::learn_files::is_learn_file;

/// The runtime's option of each lane's budget and device.
const LANES: [&str; 3] = ["", "second-", "third-"];

/// The command of the hot-cache runtime for a plan.
pub enum HotCache {
    /// The command that builds the cache of the plan.
    Command(String),
    /// No expert fits the budget.
    Empty,
    /// The command would name a file that does not exist; how to make it.
    Lacking(&'static str),
}

impl HotCache {
    /// The command, if there is one.
    pub fn command(&self) -> Option<&str> {
        match self {
            HotCache::Command(command) => Some(command),
            HotCache::Empty | HotCache::Lacking(_) => None,
        }
    }
}

/// The command that builds the cache of the plan.
pub fn hot_cache(planned: &Planned) -> HotCache {
    let Planned {
        args,
        weighing,
        plan,
        ..
    } = planned;
    if plan.is_empty() {
        return HotCache::Empty;
    }
    let Some(learn) = &planned.learn_file else {
        return HotCache::Lacking(if args.paths.len() > 1 {
            "the runtime reads one learn file: run this command again with --out FILE.json, which writes one"
        } else {
            "the runtime reads a learn file: run this command again with --out FILE.json, or `moe-analyze hotness` with --out FILE.json, \
             which write one"
        });
    };
    let path = match &planned.experts.model {
        Ok(path) => path,
        Err(why) => return HotCache::Lacking(why),
    };
    let is_off = |lane: &Lane| lane.budget_bytes < MIB && !lane.selected.is_empty();
    if plan.lanes.iter().any(is_off) {
        return HotCache::Lacking(
            "the runtime's budgets are whole MiB, and 0 switches a lane off: plan with 1 MiB or more for each lane",
        );
    }
    let curve = weighing.curve.get();
    // The runtime fills room at random unless told not to.
    let fill = u8::from(args.fill_random.is_some());
    let mut words = vec![format!("LLAMA_MOE_HOT_CACHE_FILL_RANDOM={fill}")];
    // Its option takes a single-precision number, and 0.5 for none at all; the variable takes any.
    let is_exact = f64::from(curve as f32) == curve;
    let is_ignored = planned.experts.is_gpt_oss() && curve == 0.5;
    let by_variable = weighing.weighting.uses_curve() && (!is_exact || is_ignored);
    if by_variable {
        words.push(format!("LLAMA_MOE_HOT_CACHE_LAYER_CURVE={curve}"));
    }
    words.push("llama-server".into());
    words.extend(["--model".into(), quoted(path)]);
    words.extend(["--cpu-moe", "--moe-hot-cache", &quoted(learn)].map(String::from));
    let several = plan.lanes.len() > 1;
    for (number, (lane, name)) in plan.lanes.iter().zip(LANES).enumerate() {
        if several {
            words.push(format!("--moe-hot-cache-{name}device CUDA{number}"));
        }
        words.push(format!(
            "--moe-hot-cache-{name}max-mib {}",
            lane.budget_bytes / MIB
        ));
    }
    if several {
        words.push(format!("--moe-hot-cache-device-strategy {}", args.strategy));
    }
    words.push(format!("--moe-hot-cache-weighting {}", weighing.weighting));
    if weighing.weighting.uses_curve() && !by_variable {
        words.push(format!("--moe-hot-cache-layer-curve {curve}"));
    }
    HotCache::Command(words.join(" "))
}

/// The learn file that holds what the plan was made from, if there is one.
///
/// # Errors
/// The input cannot be read.
pub fn learn_file(args: &Args) -> anyhow::Result<Option<PathBuf>> {
    Ok(match (&args.out, args.paths.as_slice()) {
        (Some(out), _) => Some(out.to_path_buf()),
        (None, [path]) if is_learn_file(path)? => Some(path.clone()),
        _ => None,
    })
}

/// Why the runtime would build another cache than the plan's from the same command, if it would.
pub fn caveats(planned: &Planned) -> Vec<&'static str> {
    let Planned { args, plan, .. } = planned;
    let mut caveats = Vec::new();
    if plan.is_empty() {
        return caveats;
    }
    if plan.lanes.iter().any(|lane| lane.budget_bytes % MIB != 0) {
        caveats
            .push("the runtime's budgets are whole MiB (0 switches a lane off), so its cache may be smaller than the plan");
    }
    if args.fill_random.is_some() {
        caveats.push("the runtime fills room in an order of its own");
    }
    if args.strategy == Strategy::EvenSplit && plan.lanes.len() == 1 {
        caveats.push("a strategy says nothing where there is one lane");
    }
    caveats
}

/// What llama.cpp without a hot cache can do with the budget: whole layers of experts on the GPU.
pub struct Stock {
    /// The command, or why there is none.
    pub command: Result<String, &'static str>,
    /// The layers whose experts are on the GPU.
    pub layers: BTreeSet<LayerId>,
    /// Bytes of these.
    pub bytes: u64,
    /// Share of the choices that fell on them.
    pub hit_share: f64,
}

impl Stock {
    /// The last layers that fit (`--n-cpu-moe`), or those with the most choices a byte (`-ot`) where they do better.
    pub fn new(planned: &Planned) -> Stock {
        let hits = hits_by_layer(&planned.ranking);
        let bytes = &planned.experts.layer_bytes;
        let experts: BTreeMap<LayerId, LayerExperts> = bytes
            .iter()
            .map(|(&layer, &bytes)| {
                let hits = hits.get(&layer).copied().unwrap_or(0);
                (layer, LayerExperts { bytes, hits })
            })
            .collect();
        let budgets = planned.plan.lanes.iter().map(|lane| lane.budget_bytes);
        let budget = budgets.fold(0, u64::saturating_add);
        let (last, best) = (
            WholeLayers::last(&experts, budget),
            WholeLayers::best(&experts, budget),
        );
        let on_cpu = |kept: &WholeLayers| -> Vec<LayerId> {
            bytes
                .keys()
                .copied()
                .filter(|layer| !kept.layers.contains(layer))
                .collect()
        };
        let (kept, option) = if best.hits > last.hits {
            let layers: Vec<String> = on_cpu(&best).iter().map(LayerId::to_string).collect();
            let pattern = format!(
                r"blk\.({})\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU",
                layers.join("|")
            );
            (best, Some(format!("--override-tensor '{pattern}'")))
        } else {
            // Blocks are counted, those without experts too.
            let n = on_cpu(&last).last().map(|layer| u64::from(layer.0) + 1);
            let option = match n {
                None => None,
                Some(_) if last.layers.is_empty() => Some("--cpu-moe".into()),
                Some(n) => Some(format!("--n-cpu-moe {n}")),
            };
            (last, option)
        };
        let command = planned.experts.model.as_ref();
        let command = command.map_err(|&why| why).map(|path| {
            let mut words = vec![format!(
                "llama-server --model {} --n-gpu-layers 99",
                quoted(path)
            )];
            words.extend(option);
            words.join(" ")
        });
        Stock {
            command,
            layers: kept.layers,
            bytes: kept.bytes,
            hit_share: share(
                kept.hits,
                hits.values().copied().fold(0, u64::saturating_add),
            ),
        }
    }
}

/// Choices that the ranking counts in each layer.
pub fn hits_by_layer(ranking: &[Entry]) -> BTreeMap<LayerId, u64> {
    let mut hits = BTreeMap::new();
    for entry in ranking {
        let sum: &mut u64 = hits.entry(entry.layer).or_default();
        *sum = sum.saturating_add(entry.hits);
    }
    hits
}

/// A part of a whole, 0 of nothing.
pub fn share(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

/// A path as a shell takes it for one word that is no option; characters that control a terminal as escapes of `$'…'`.
fn quoted(path: &Path) -> String {
    let path = path.to_string_lossy();
    let dot = if path.starts_with('-') { "./" } else { "" };
    if path.contains(is_hidden) {
        return format!("{dot}{}", escaped(&path));
    }
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,@%+".contains(c);
    if !path.is_empty() && path.chars().all(is_plain) {
        format!("{dot}{path}")
    } else {
        format!("{dot}'{}'", path.replace('\'', r"'\''"))
    }
}

fn escaped(path: &str) -> String {
    let mut word = String::from("$'");
    for c in path.chars() {
        match c {
            '\\' | '\'' => word.extend(['\\', c]),
            c if is_hidden(c) => {
                let mut bytes = [0; 4];
                for byte in c.encode_utf8(&mut bytes).bytes() {
                    word += &format!("\\x{byte:02x}");
                }
            }
            c => word.push(c),
        }
    }
    word.push('\'');
    word
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_one_word() {
        assert_eq!(quoted(Path::new("a/b-1.gguf")), "a/b-1.gguf");
        assert_eq!(
            quoted(Path::new("my model's.gguf")),
            r"'my model'\''s.gguf'"
        );
        assert_eq!(quoted(Path::new("$(x)")), "'$(x)'");
        assert_eq!(
            quoted(Path::new("a\u{1b}'\u{202e}.gguf")),
            r"$'a\x1b\'\xe2\x80\xae.gguf'"
        );
    }
}
