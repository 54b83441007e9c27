//! The expert usage tracer: prints the activations of each expert at the end of a run.
//!
//! Options, environment variables, messages and JSON are those of the tracer in ernestuz-b/llama-prefetch.cpp. Each (token, layer,
//! expert) counts once, not once per projection.

use std::cell::RefCell;
use std::io::Write as _;
use std::path::Path;
use std::rc::Rc;

use anyhow::bail;
use moe_engine::{Observer, RouterOutput};
use moe_trace::LayerId;

use crate::expert_usage::{self, LayerUsage, report};
use crate::files::{self, OutputPath};
use crate::output::{Format, message};

/// Options of the tracer.
#[derive(Debug, Default, clap::Args)]
pub struct UsageArgs {
    /// Print the number of activations of each expert id, summed over layers [env: LLAMA_EXPERT_TRACE_STATS]
    #[arg(long, help_heading = "Expert usage tracer")]
    expert_trace_stats: bool,
    /// Print each use of an expert with the names of its tensors [env: LLAMA_EXPERT_TRACE_NAMES, LLAMA_EXPERT_TRACE_LOGGING]
    #[arg(
        long,
        alias = "expert-trace-logging",
        help_heading = "Expert usage tracer"
    )]
    expert_trace_names: bool,
    /// Also print the activations of each expert in each layer [env: LLAMA_EXPERT_TRACE_PER_LAYER]
    #[arg(long, help_heading = "Expert usage tracer")]
    expert_trace_per_layer: bool,
    /// Write the numbers of activations to a file; the extension selects the format: json, csv
    #[arg(
        long,
        env = "LLAMA_EXPERT_TRACE_OUTPUT",
        value_name = "FILE",
        help_heading = "Expert usage tracer"
    )]
    expert_trace_output: Option<OutputPath>,
}

/// The tracer of a run. An observer of its session counts.
pub struct Usage {
    names: bool,
    stats: bool,
    per_layer: bool,
    output: Option<OutputPath>,
    force: bool,
    counts: Rc<RefCell<Vec<Vec<u64>>>>,
}

impl Usage {
    /// Returns the tracer, or `None` if no option and no variable enables it.
    ///
    /// # Errors
    /// The output exists, or its extension selects no format.
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
        let output = args.expert_trace_output.clone();
        if let Some(path) = &output {
            if !matches!(extension(path), Some("json" | "csv")) {
                bail!("{}: the extension must be .json or .csv", path.display());
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

    /// Returns an observer that counts, and prints names if enabled.
    pub fn observer(&self) -> Observer<'static> {
        let (counts, names) = (self.counts.clone(), self.names);
        Box::new(move |routed: &RouterOutput| {
            let mut counts = counts.borrow_mut();
            for &expert in routed.ids {
                let layer = counts.get_mut(routed.layer.index());
                if let Some(count) = layer.and_then(|layer| layer.get_mut(expert as usize)) {
                    *count += 1;
                }
                if names {
                    print_names(routed.layer, expert);
                }
            }
        })
    }

    /// Prints the counts to stderr and writes them to the file, as enabled.
    pub fn finish(&self, n_tokens: u64) -> anyhow::Result<()> {
        let counts = self.counts.borrow();
        let layers: Vec<LayerUsage> = (0..)
            .map(LayerId)
            .zip(counts.iter().cloned())
            .map(|(layer, counts)| LayerUsage { layer, counts })
            .collect();
        if self.stats {
            for line in report(&layers, n_tokens, self.per_layer).lines() {
                message::print(line);
            }
        }
        if let Some(path) = &self.output {
            files::write(path, self.force, |out| {
                match extension(path) {
                    Some("csv") => expert_usage::write(out, Format::Csv, &layers)?,
                    _ => out.write_all(expert_usage::json(&layers).as_bytes())?,
                }
                Ok(())
            })?;
            message::print(format_args!(
                "[EXPERT-TRACE] Statistics exported to {}",
                path.display()
            ));
        }
        Ok(())
    }
}

fn extension(path: &Path) -> Option<&str> {
    path.extension().and_then(|extension| extension.to_str())
}

/// Prints the tensor names of an expert. A stacked tensor contains all experts, so the expert id follows the tensor name.
fn print_names(layer: LayerId, expert: i32) {
    for projection in ["gate", "up", "down"] {
        message::print(format_args!(
            "[EXPERT-TRACE] Layer {layer}, Expert {expert}: blk.{layer}.ffn_{projection}_exps.weight[{expert}]"
        ));
    }
}
