//! `synth`: writes a synthetic model with the shapes and header of a real model.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, anyhow};
use clap::builder::PossibleValuesParser;
use moe_files::text::counted;
use moe_synth::model::{Description, Error, Spec, Synth, SynthOptions};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::files::{self, OutputPath};
use crate::json_input;
use crate::large_output;
use crate::option_values::{ValueError, integer_in, number};
use crate::output::human_bytes;

const EXAMPLE: &str =
    "Example:\n  moe-analyze synth --like gpt-oss-20b --layers 4 --out small.gguf";

const DESCRIPTION: &str = r#"Keys of the JSON object in --spec that are required:
  arch           gpt-oss, qwen3moe, qwen3next, llama (Mixtral) or olmoe
  n_layer, n_embd, n_head, n_expert, n_expert_used, n_ff_exp
  vocab          an object with n_tokens; optional keys: model (gpt2 or llama), pre, n_merges,
                 n_special, text_bytes, bos, eos, pad
Optional keys, with their default in brackets:
  name [arch], size_label [empty], n_head_kv [n_head], head_dim [n_embd / n_head], n_ff [n_ff_exp],
  n_ff_shexp [n_ff_exp], context_length [4096], rope_freq_base [10000], rope_dims [head_dim],
  yarn {factor, original_context_length} [unset], rms_eps [1e-6], sliding_window [128],
  quant [F16], linear_attention {conv_kernel, state_size, group_count, time_step_rank,
  full_attention_interval} [unset; required for qwen3next]

  {"arch": "qwen3moe", "n_layer": 2, "n_embd": 256, "n_head": 4, "n_expert": 16,
   "n_expert_used": 4, "n_ff_exp": 256, "quant": "Q4_K", "vocab": {"n_tokens": 1000, "pre": "qwen2"}}

For all other architectures, --spec lists the tensors. Required keys:
  arch           value of general.architecture
  keys           keys of the header without the prefix `ARCH.`. A number with a decimal point or an
                 exponent is F32, another number U32. Booleans and strings are possible, too.
                 A list has one value for each layer
  vocab          like above
  tensors        shapes of the tensors outside the layers, innermost dimension first
  layers         list of {from, to, tensors}: shapes of the tensors of layers `from` to `to` - 1,
                 without `blk.N.`. Optional keys: only, except (lists of layers of the range)
Optional keys: name [arch], quant [F16], scales [1]: factors on the standard deviation of matrices.
The files in fixtures/architectures of the repository are examples.

Example:
  moe-analyze synth --like gpt-oss-20b --layers 4 --out small.gguf"#;

/// Write a synthetic GGUF model with the shapes and header of a real model, and random weights
///
/// The file runs like the real model, with a synthetic vocabulary. In each layer, the frequencies with
/// which the router selects experts follow a Zipf law; which expert is the hottest is random. The same arguments always yield the same file.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE, after_long_help = DESCRIPTION)]
#[command(group = clap::ArgGroup::new("what").required(true))]
pub struct Args {
    /// Model whose shapes and header to imitate
    #[arg(long, value_name = "MODEL", group = "what", value_parser = presets())]
    like: Option<String>,
    /// JSON file with the shapes or the tensors of a model; --help lists the keys
    #[arg(long, value_name = "FILE.json", group = "what")]
    spec: Option<PathBuf>,
    /// Quantization of the weights: a type such as Q4_K, Q8_0 or F16; a mixture Q4_K_M, Q5_K_M or MXFP4_MOE; or MXFP4 for experts in
    /// MXFP4 and other tensors in F16 [default: that of --like or --spec]
    #[arg(long, value_name = "TYPE")]
    quant: Option<String>,
    /// Number of layers, 1 to 4096 [default: that of --like or --spec]. Models of --spec with the key layers, and of --like except
    /// gpt-oss-*, qwen3-*, mixtral-8x7b and olmoe-1b-7b, can only be shortened: to at most their number of blocks, and at least to the
    /// first layer with experts. MTP blocks are removed first
    #[arg(long, value_name = "N", value_parser = integer_in(1..=4096u32))]
    layers: Option<u32>,
    /// Random seed for weights, vocabulary and expert order
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Exponent S of the Zipf law: the expert of rank r is selected with a frequency proportional to 1 / r^S; 0 or more, 0 is uniform
    #[arg(
        long,
        value_name = "S",
        default_value_t = 1.0,
        allow_negative_numbers = true,
        value_parser = exponent
    )]
    zipf: f64,
    /// Write the header and a hole instead of the weights; the hole takes no disk space and reads as zeros
    #[arg(long)]
    sparse: bool,
    /// File to write
    #[arg(long, value_name = "FILE.gguf")]
    out: OutputPath,
    /// Replace the file of --out if it exists
    #[arg(long)]
    force: bool,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    files::require_extension(&args.out, "gguf")?;
    files::check_output(&args.out, args.force)?;
    let options = SynthOptions {
        seed: args.seed,
        zipf: args.zipf,
    };
    let synth = plan(&args, options)?.map_err(|error| {
        // A weight type of --quant is not in the file.
        let is_of_type = matches!(
            error,
            Error::Quant { .. } | Error::Spec { key: "quant", .. }
        );
        let is_of_file = args.quant.is_none() || !is_of_type;
        match &args.spec {
            Some(path) if is_of_file => anyhow!("{}: {error}", path.display()),
            _ => error.into(),
        }
    })?;
    let size = synth.file_size()?;
    let started = Instant::now();
    if args.sparse {
        files::write(&args.out, args.force, |file| {
            file.write_all(&synth.header_bytes()?)?;
            file.flush()?;
            file.get_ref()
                .file()
                .set_len(size)
                .with_context(|| format!("cannot create a hole of {}", human_bytes(size)))
        })?;
    } else {
        large_output::write(ctx, &args.out, args.force, size, |out| {
            synth.write(out).map(drop)
        })?;
    }
    let seconds = started.elapsed().as_secs_f64();
    ctx.note(format_args!(
        "wrote {}: {}, {}{}",
        args.out.display(),
        counted(synth.tensors().len(), "tensor"),
        human_bytes(size),
        if args.sparse {
            ", sparse".to_owned()
        } else {
            format!(", {:.0} MB/s", size as f64 / 1e6 / seconds.max(1e-9))
        }
    ));
    Ok(ExitStatus::Done)
}

fn exponent(text: &str) -> Result<f64, ValueError> {
    number(text, "a number of at least 0", |value| {
        (0.0..=f64::MAX).contains(value)
    })
}

/// The names of all known models.
fn presets() -> PossibleValuesParser {
    PossibleValuesParser::new(Spec::PRESETS.into_iter().chain(Description::presets()))
}

/// What the options --like and --spec contain.
enum Model {
    Spec(Spec),
    Description(Description),
}

/// Plans the model of the options. The inner error is one of the model's values.
fn plan(args: &Args, options: SynthOptions) -> anyhow::Result<Result<Synth, Error>> {
    Ok(match model(args)? {
        Model::Spec(mut spec) => {
            if let Some(quant) = &args.quant {
                spec.quant.clone_from(quant);
            }
            if let Some(layers) = args.layers {
                spec.n_layer = layers;
            }
            Synth::new(&spec, options)
        }
        Model::Description(mut description) => {
            if let Some(quant) = &args.quant {
                description.quant.clone_from(quant);
            }
            let cut = match args.layers {
                Some(layers) => description.with_layers(layers),
                None => Ok(description),
            };
            cut.and_then(|description| Synth::of_description(&description, options))
        }
    })
}

fn model(args: &Args) -> anyhow::Result<Model> {
    const ADVICE: &str = "`moe-analyze synth --help` describes the keys";
    match (&args.like, &args.spec) {
        (Some(name), _) => Spec::like(name)
            .map(Model::Spec)
            .or_else(|| Description::like(name).map(Model::Description))
            .with_context(|| format!("the model {name} is not known")),
        (None, Some(path)) => {
            let json: serde_json::Value = json_input::read(path, ADVICE)?;
            // Only a description lists tensors.
            let lists_tensors = ["keys", "tensors", "layers"]
                .iter()
                .any(|key| json.get(key).is_some());
            Ok(if lists_tensors {
                Model::Description(json_input::read(path, ADVICE)?)
            } else {
                Model::Spec(json_input::read(path, ADVICE)?)
            })
        }
        (None, None) => anyhow::bail!("pass --like or --spec"),
    }
}
