//! Command lines that use a plan: for this program, for llama.cpp's hot-cache fork, and for upstream llama.cpp.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use moe_files::text::is_hidden;
use moe_placement::LayerId;
use moe_placement::plan::{Entry, Lane, LayerCurve, LayerExperts, MIB, OffloadedLayers, Strategy};

use super::{Args, Planned};
use crate::learn_files::is_learn_file;

/// Prefix of the fork's options for the budget and device of each lane.
const LANES: [&str; 3] = ["", "second-", "third-"];

/// A command that runs a model with the cache of a plan.
pub enum HotCache {
    /// The command that builds the cache of the plan.
    Command(String),
    /// No expert fits the budget.
    Empty,
    /// The command needs a file that does not exist, or is impossible; the reason and advice.
    Unavailable(&'static str),
}

impl HotCache {
    /// Returns the command, if there is one.
    pub fn command(&self) -> Option<&str> {
        match self {
            HotCache::Command(command) => Some(command),
            HotCache::Empty | HotCache::Unavailable(_) => None,
        }
    }
}

/// The command, or the reason why there is no command.
impl fmt::Display for HotCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HotCache::Command(command) => f.write_str(command),
            HotCache::Empty => f.write_str("no command, because no expert fits"),
            HotCache::Unavailable(why) => f.write_str(why),
        }
    }
}

/// Returns the command of this program that builds the cache of the plan from its learn file.
pub fn own_hot_cache(planned: &Planned) -> HotCache {
    const NEEDS_PLAN: &str = "write the plan with `-o json > plan.json`, and pass it to `moe-analyze record --policy hot-cache --hot-cache plan.json`";
    let Planned {
        args,
        weighing,
        plan,
        ..
    } = planned;
    if plan.is_empty() {
        return HotCache::Empty;
    }
    let path = match &planned.experts.model {
        Ok(path) => path,
        Err(why) => return HotCache::Unavailable(why),
    };
    let has_default_curve = weighing.curve == planned.default_curve();
    let is_of_mib = plan.lanes.iter().all(|lane| lane.budget_bytes % MIB == 0);
    let is_exact = is_of_mib && args.fill_random.is_none();
    let is_exact = is_exact && (has_default_curve || !weighing.weighting.uses_curve());
    let learn = match &planned.learn_file {
        Some(learn) if is_exact => learn,
        _ => return HotCache::Unavailable(NEEDS_PLAN),
    };
    let n_lanes = plan.lanes.len();
    let devices: Vec<String> = (0..n_lanes).map(|gpu| format!("cuda:{gpu}")).collect();
    let budgets = plan.lanes.iter().map(|lane| lane.budget_bytes / MIB);
    let budgets: Vec<String> = budgets.map(|mib| mib.to_string()).collect();
    let mut words = vec![format!("moe-analyze record --model {}", quoted(path))];
    words.push(format!("--device {}", devices.join(",")));
    words.push(format!("--policy hot-cache --hot-cache {}", quoted(learn)));
    words.push(format!("--hot-cache-mib {}", budgets.join(",")));
    if n_lanes > 1 {
        words.push(format!("--hot-cache-strategy {}", args.strategy));
    }
    words.push(format!("--hot-cache-weighting {}", weighing.weighting));
    words.extend(args.memory.of_record());
    HotCache::Command(words.join(" "))
}

/// Returns the command of the fork that builds the cache of the plan.
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
        return HotCache::Unavailable(if args.paths.len() > 1 {
            "the fork reads one learn file: run this command again with --out FILE.json to write it"
        } else {
            "the fork reads a learn file: run this command again with --out FILE.json, or write one with `moe-analyze hotness --out \
             FILE.json`"
        });
    };
    let path = match &planned.experts.model {
        Ok(path) => path,
        Err(why) => return HotCache::Unavailable(why),
    };
    let is_off = |lane: &Lane| lane.budget_bytes < MIB && !lane.selected.is_empty();
    if plan.lanes.iter().any(is_off) {
        return HotCache::Unavailable(
            "the fork's budgets are integers of MiB, and 0 disables a lane: plan with at least 1 MiB for each lane",
        );
    }
    let curve = weighing.curve.get();
    // The fork fills free space with random experts by default.
    let fill = u8::from(args.fill_random.is_some());
    let mut words = vec![format!("LLAMA_MOE_HOT_CACHE_FILL_RANDOM={fill}")];
    // The fork's option is a single-precision number, and 0.5 means unset. The environment variable has no such limits.
    let is_exact = f64::from(curve as f32) == curve;
    let is_ignored = planned.default_curve() != LayerCurve::DEFAULT && curve == 0.5;
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
    words.extend(args.memory.of_llama_cpp());
    HotCache::Command(words.join(" "))
}

/// Returns the learn file that contains the counts of the plan, if there is one.
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

/// Returns the reasons why the fork may build another cache with the printed command.
pub fn caveats(planned: &Planned) -> Vec<&'static str> {
    let Planned { args, plan, .. } = planned;
    let mut caveats = Vec::new();
    if plan.is_empty() {
        return caveats;
    }
    if plan.lanes.iter().any(|lane| lane.budget_bytes % MIB != 0) {
        caveats
            .push("the fork's budgets are integers of MiB (0 disables a lane), so its cache may be smaller than the plan");
    }
    if args.fill_random.is_some() {
        caveats.push("the fork fills free space with experts in a different random order");
    }
    if args.strategy == Strategy::EvenSplit && plan.lanes.len() == 1 {
        caveats.push("the strategy has no effect with one lane");
    }
    caveats
}

/// The best use of the budget with upstream llama.cpp: all experts of some layers on the GPU.
pub struct Stock {
    /// The command, or the reason why it is unavailable.
    pub command: Result<String, &'static str>,
    /// Layers whose experts are on the GPU.
    pub layers: BTreeSet<LayerId>,
    /// Size of these experts in bytes.
    pub bytes: u64,
    /// Fraction of activations of experts on the GPU, 0 to 1.
    pub hit_rate: f64,
}

impl Stock {
    /// Selects the last layers that fit (`--n-cpu-moe`), or the layers with the most activations per byte (`-ot`) if they have a higher
    /// hit rate.
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
            OffloadedLayers::last(&experts, budget),
            OffloadedLayers::best(&experts, budget),
        );
        let on_cpu = |kept: &OffloadedLayers| -> Vec<LayerId> {
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
            // --n-cpu-moe counts all blocks, including dense blocks.
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
            words.extend(planned.args.memory.of_llama_cpp());
            words.join(" ")
        });
        Stock {
            command,
            layers: kept.layers,
            bytes: kept.bytes,
            hit_rate: fraction(
                kept.hits,
                hits.values().copied().fold(0, u64::saturating_add),
            ),
        }
    }
}

/// Returns the activations of each layer in the ranking.
pub fn hits_by_layer(ranking: &[Entry]) -> BTreeMap<LayerId, u64> {
    let mut hits = BTreeMap::new();
    for entry in ranking {
        let sum: &mut u64 = hits.entry(entry.layer).or_default();
        *sum = sum.saturating_add(entry.hits);
    }
    hits
}

/// Returns `part / whole`, or 0 if `whole` is 0.
pub fn fraction(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

/// Quotes a path as one shell word that is not an option. Control characters and bytes that are not UTF-8 are escaped with `$'…'`.
fn quoted(path: &Path) -> String {
    let bytes = path.as_os_str().as_encoded_bytes();
    let dot = if bytes.starts_with(b"-") { "./" } else { "" };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,@%+".contains(c);
    match path.to_str() {
        Some(path) if !path.is_empty() && path.chars().all(is_plain) => format!("{dot}{path}"),
        Some(path) if !path.contains(is_hidden) => {
            format!("{dot}'{}'", path.replace('\'', r"'\''"))
        }
        _ => format!("{dot}{}", escaped(bytes)),
    }
}

fn escaped(path: &[u8]) -> String {
    let mut word = String::from("$'");
    let escape = |word: &mut String, bytes: &[u8]| {
        for byte in bytes {
            *word += &format!("\\x{byte:02x}");
        }
    };
    for chunk in path.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\\' | '\'' => word.extend(['\\', c]),
                c if is_hidden(c) => escape(&mut word, c.encode_utf8(&mut [0; 4]).as_bytes()),
                c => word.push(c),
            }
        }
        escape(&mut word, chunk.invalid());
    }
    word.push('\'');
    word
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_paths_as_one_word() {
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
        #[cfg(unix)]
        {
            use std::os::unix::ffi::OsStrExt;
            let path = std::ffi::OsStr::from_bytes(b"-\xff'\xc3\xa9.gguf");
            assert_eq!(quoted(Path::new(path)), r"./$'-\xff\'é.gguf'");
        }
    }
}
