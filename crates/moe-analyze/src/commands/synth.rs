//! `synth`: a model with the shapes and header of a real one, and made-up contents.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use moe_gguf::text::counted;
use moe_synth::model::{Spec, Synth, SynthOptions};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::files::{self, OutputPath};
use crate::json_input;
use crate::large_output;
use crate::output::human_bytes;

const DESCRIPTION: &str = r#"A description is a JSON object. These keys must be there:
  arch           gpt-oss, qwen3moe, qwen3next, llama (Mixtral) or olmoe
  n_layer, n_embd, n_head, n_expert, n_expert_used, n_ff_exp
  vocab          an object: n_tokens must be there; model (gpt2 or llama), pre, n_merges, n_special,
                 text_bytes, bos, eos, pad may be
These may be, the value in brackets is taken otherwise:
  name [arch], size_label [empty], n_head_kv [n_head], head_dim [n_embd / n_head], n_ff [n_ff_exp],
  n_ff_shexp [n_ff_exp], context_length [4096], rope_freq_base [10000], rope_dims [head_dim],
  yarn {factor, original_context_length} [none], rms_eps [1e-6], sliding_window [128],
  quant [F16], linear_attention {conv_kernel, state_size, group_count, time_step_rank,
  full_attention_interval} [none; qwen3next must have it]

  {"arch": "qwen3moe", "n_layer": 2, "n_embd": 256, "n_head": 4, "n_expert": 16,
   "n_expert_used": 4, "n_ff_exp": 256, "quant": "Q4_K", "vocab": {"n_tokens": 1000, "pre": "qwen2"}}"#;

/// Write a model with the true shapes and header of a known one, and random weights
///
/// The file runs like the real one. Its router rows give each layer's experts, in a random order, the frequencies of a
/// Zipf law. The vocabulary is made up. The same arguments give the same file.
#[derive(Debug, clap::Args)]
#[command(after_long_help = DESCRIPTION)]
#[command(group = clap::ArgGroup::new("what").required(true))]
pub struct Args {
    /// A known model
    #[arg(long, value_name = "MODEL", group = "what", value_parser = Spec::PRESETS)]
    like: Option<String>,
    /// A description of a model (see below, or --help)
    #[arg(long, value_name = "FILE.json", group = "what")]
    spec: Option<PathBuf>,
    /// Types of the weights: a type such as Q4_K, Q8_0 or F16; Q4_K_M, Q5_K_M or MXFP4_MOE; MXFP4, which leaves all but
    /// the experts in F16 [default: the model's usual ones]
    #[arg(long, value_name = "TYPE")]
    quant: Option<String>,
    /// Layers [default: as many as the model has]
    #[arg(long, value_name = "N")]
    layers: Option<u32>,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// How uneven experts are chosen: the one of rank r for a share of the tokens proportional to 1 / r^S; 0 = all alike
    #[arg(
        long,
        value_name = "S",
        default_value_t = 1.0,
        allow_negative_numbers = true
    )]
    zipf: f64,
    /// Write the header, and leave the weights a hole, which takes no room and reads as zeros
    #[arg(long)]
    sparse: bool,
    /// The file to write
    #[arg(long, value_name = "FILE.gguf")]
    out: OutputPath,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    files::require_extension(&args.out, "gguf")?;
    files::check_output(&args.out, args.force)?;
    let synth = Synth::new(
        &spec(&args)?,
        SynthOptions {
            seed: args.seed,
            zipf: args.zipf,
        },
    )?;
    let size = synth.file_size()?;
    let started = Instant::now();
    if args.sparse {
        files::write_whole(&args.out, args.force, |file| {
            file.write_all(&synth.header_bytes()?)?;
            file.flush()?;
            file.get_ref()
                .file()
                .set_len(size)
                .with_context(|| format!("cannot make a hole of {}", human_bytes(size)))
        })?;
    } else {
        large_output::write(ctx, &args.out, args.force, size, |out| {
            synth.write(out).map(drop)
        })?;
    }
    let seconds = started.elapsed().as_secs_f64();
    ctx.remark(format_args!(
        "wrote {}: {}, {}{}",
        args.out.display(),
        counted(synth.tensors().len(), "tensor"),
        human_bytes(size),
        if args.sparse {
            ", all but the header a hole".to_owned()
        } else {
            format!(", {:.0} MB/s", size as f64 / 1e6 / seconds.max(1e-9))
        }
    ));
    Ok(ExitStatus::Done)
}

fn spec(args: &Args) -> anyhow::Result<Spec> {
    let mut spec = match (&args.like, &args.spec) {
        (Some(name), _) => Spec::like(name).with_context(|| format!("no model {name} is known"))?,
        (None, Some(path)) => {
            json_input::read(path, "`moe-analyze synth --help` describes the keys")?
        }
        (None, None) => anyhow::bail!("give --like or --spec"),
    };
    if let Some(quant) = &args.quant {
        spec.quant.clone_from(quant);
    }
    if let Some(layers) = args.layers {
        spec.n_layer = layers;
    }
    Ok(spec)
}
