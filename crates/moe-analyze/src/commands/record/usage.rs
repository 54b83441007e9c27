//! The expert usage tracer: how often each expert was chosen, told at the end of a run.
//!
//! Flags, environment variables and messages follow the llama.cpp fork that planned it (ernestuz-b/llama-prefetch.cpp);
//! the JSON is what that fork's tracer writes. Each (token, layer, expert) counts once, not once a projection.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::bail;
use moe_executor::ops::{Observer, Routed};
use serde_json::json;

use crate::files;

/// What the tracer tells.
#[derive(Debug, Default, clap::Args)]
pub struct UsageArgs {
    /// Count how often each expert is used and print it [env: LLAMA_EXPERT_TRACE_STATS]
    #[arg(long, help_heading = "Expert usage tracer")]
    expert_trace_stats: bool,
    /// Print the tensors of every expert as it is used [env: LLAMA_EXPERT_TRACE_NAMES, LLAMA_EXPERT_TRACE_LOGGING]
    #[arg(
        long,
        alias = "expert-trace-logging",
        help_heading = "Expert usage tracer"
    )]
    expert_trace_names: bool,
    /// Print the counts by layer too [env: LLAMA_EXPERT_TRACE_PER_LAYER]
    #[arg(long, help_heading = "Expert usage tracer")]
    expert_trace_per_layer: bool,
    /// Write the counts to a .json or .csv file [env: LLAMA_EXPERT_TRACE_OUTPUT]
    #[arg(long, value_name = "FILE", help_heading = "Expert usage tracer")]
    expert_trace_output: Option<PathBuf>,
}

/// Counts of a run, filled by an observer of its session.
pub struct Usage {
    names: bool,
    stats: bool,
    per_layer: bool,
    output: Option<PathBuf>,
    force: bool,
    counts: Rc<RefCell<Vec<Vec<u64>>>>,
}

impl Usage {
    /// The tracer that flags and environment ask for, if they ask for one.
    ///
    /// # Errors
    /// An output that exists, or whose extension names no format.
    pub fn new(
        args: &UsageArgs,
        n_layer: usize,
        n_expert: usize,
        force: bool,
    ) -> anyhow::Result<Option<Usage>> {
        let set =
            |name: &str| std::env::var(name).is_ok_and(|value| !matches!(value.as_str(), "" | "0"));
        let names = args.expert_trace_names
            || set("LLAMA_EXPERT_TRACE_NAMES")
            || set("LLAMA_EXPERT_TRACE_LOGGING");
        let per_layer = args.expert_trace_per_layer || set("LLAMA_EXPERT_TRACE_PER_LAYER");
        let stats = args.expert_trace_stats || set("LLAMA_EXPERT_TRACE_STATS") || per_layer;
        let from_env = || std::env::var_os("LLAMA_EXPERT_TRACE_OUTPUT").map(PathBuf::from);
        let output = args.expert_trace_output.clone().or_else(from_env);
        if let Some(path) = &output {
            if !matches!(extension(path), Some("json" | "csv")) {
                bail!(
                    "{}: the expert usage is written as .json or .csv; name the file so",
                    path.display()
                );
            }
            files::check_output(path, force)?;
        }
        let wanted = names || stats || output.is_some();
        let counts = Rc::new(RefCell::new(vec![vec![0; n_expert]; n_layer]));
        Ok(wanted.then_some(Usage {
            names,
            stats,
            per_layer,
            output,
            force,
            counts,
        }))
    }

    /// Counts, and prints names if wanted.
    pub fn observer(&self) -> Observer<'static> {
        let (counts, names) = (self.counts.clone(), self.names);
        Box::new(move |routed: &Routed| {
            let mut counts = counts.borrow_mut();
            for &expert in &routed.routing.ids {
                let layer = counts.get_mut(routed.layer);
                if let Some(count) = layer.and_then(|layer| layer.get_mut(expert as usize)) {
                    *count += 1;
                }
                if names {
                    print_names(routed.layer, expert);
                }
            }
        })
    }

    /// Tells the counts: to stderr, to the file.
    pub fn finish(&self, n_tokens: u64) -> anyhow::Result<()> {
        let counts = self.counts.borrow();
        if self.stats {
            eprint!("{}", report(&counts, n_tokens, self.per_layer));
        }
        if let Some(path) = &self.output {
            let text = match extension(path) {
                Some("csv") => csv(&counts),
                _ => json(&counts),
            };
            files::write_whole(path, self.force, |out| Ok(out.write_all(text.as_bytes())?))?;
            eprintln!("[EXPERT-TRACE] Statistics exported to {}", path.display());
        }
        Ok(())
    }
}

fn extension(path: &Path) -> Option<&str> {
    path.extension().and_then(|extension| extension.to_str())
}

/// Stacked tensors hold all experts: the expert's number stands behind the tensor's name.
fn print_names(layer: usize, expert: i32) {
    for projection in ["gate", "up", "down"] {
        eprintln!(
            "[EXPERT-TRACE] Layer {layer}, Expert {expert}: blk.{layer}.ffn_{projection}_exps.weight[{expert}]"
        );
    }
}

/// Experts that were used, most used first, with their share of all activations in percent.
fn ranked(counts: &[u64]) -> Vec<(usize, u64, f64)> {
    let total: u64 = counts.iter().sum();
    let used = counts.iter().enumerate().filter(|(_, n)| **n > 0);
    let mut ranked: Vec<_> = used
        .map(|(e, &n)| (e, n, 100.0 * n as f64 / total as f64))
        .collect();
    ranked.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    ranked
}

fn report(counts: &[Vec<u64>], n_tokens: u64, per_layer: bool) -> String {
    let mut text = String::from("=== Expert Usage Statistics ===\n");
    let _ = writeln!(text, "Total tokens processed: {n_tokens}");
    let list = |text: &mut String, counts: &[u64]| {
        for (expert, n, percent) in ranked(counts) {
            let _ = writeln!(
                text,
                "  Expert {expert:3}: {n:8} activations ({percent:.2}%)"
            );
        }
    };
    let n_expert = counts.first().map_or(0, Vec::len);
    let all: Vec<u64> = (0..n_expert)
        .map(|e| counts.iter().map(|layer| layer[e]).sum())
        .collect();
    text += "Expert activation counts:\n";
    list(&mut text, &all);
    if per_layer {
        for (layer, counts) in counts.iter().enumerate() {
            let _ = writeln!(text, "Layer {layer}:");
            list(&mut text, counts);
        }
    }
    text
}

fn json(counts: &[Vec<u64>]) -> String {
    let layers: Vec<_> = counts
        .iter()
        .enumerate()
        .map(|(layer, counts)| {
            let experts: Vec<_> = ranked(counts)
                .into_iter()
                .map(|(e, n, percent)| json!({"expert_id": e, "activations": n, "percentage": percent}))
                .collect();
            json!({"layer_id": layer, "total_tokens": counts.iter().sum::<u64>(), "experts": experts})
        })
        .collect();
    format!("{}\n", json!({ "layers": layers }))
}

fn csv(counts: &[Vec<u64>]) -> String {
    let mut text = String::from("layer_id,expert_id,activations,percentage\n");
    for (layer, counts) in counts.iter().enumerate() {
        for (expert, n, percent) in ranked(counts) {
            let _ = writeln!(text, "{layer},{expert},{n},{percent}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_forms_agree() {
        let counts = [vec![0, 3, 1], vec![2, 0, 2]];
        let report = report(&counts, 4, true);
        assert!(report.contains("Total tokens processed: 4"));
        assert!(
            report.contains("  Expert   1:        3 activations (37.50%)\n"),
            "{report}"
        );
        assert!(
            report.contains("Layer 1:\n  Expert   0:        2 activations (50.00%)"),
            "{report}"
        );
        assert_eq!(
            csv(&counts),
            "layer_id,expert_id,activations,percentage\n0,1,3,75\n0,2,1,25\n1,0,2,50\n1,2,2,50\n"
        );
        let json: serde_json::Value = serde_json::from_str(&json(&counts)).unwrap();
        assert_eq!(json["layers"][0]["total_tokens"], 4);
        assert_eq!(json["layers"][0]["experts"][0]["expert_id"], 1);
        assert_eq!(json["layers"][1]["experts"][1]["percentage"], 50.0);
    }
}
