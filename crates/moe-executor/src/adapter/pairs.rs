//! Reads and checks the header of an adapter.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use moe_gguf::map::Start;
use moe_gguf::names::split_layer;
use moe_gguf::{Gguf, Tensor};

use super::{Adapter, AdapterFault, AdapterFile, Pair};
use crate::error::{Error, Result};

/// The key of an aLoRA adapter.
const INVOCATION_TOKENS: &str = "adapter.alora.invocation_tokens";

impl<'g> AdapterFile<'g> {
    /// Reads an adapter, and checks it against the model of architecture `arch`.
    pub(super) fn read(
        model: &Gguf,
        arch: &str,
        adapter: &Adapter<'g>,
        start: Start,
    ) -> Result<AdapterFile<'g>> {
        let gguf = adapter.gguf;
        let alpha = check_keys(gguf, arch, adapter.scale).map_err(|error| error.of(gguf))?;
        let (pairs, ignored) = pairs(gguf).map_err(|fault| of_file(gguf, fault))?;
        for (name, pair) in &pairs {
            check_pair(model, arch, name, pair).map_err(|fault| of_file(gguf, fault))?;
        }
        Ok(AdapterFile {
            gguf,
            start,
            alpha,
            scale: adapter.scale,
            pairs,
            used: RefCell::new(BTreeSet::new()),
            ignored,
        })
    }
}

fn of_file(gguf: &Gguf, source: AdapterFault) -> Error {
    Error::Adapter {
        file: gguf.files()[0].path.clone(),
        source: Box::new(source),
    }
}

/// A fault of the keys.
enum KeyError {
    Type(moe_gguf::Error),
    Value(AdapterFault),
}

impl KeyError {
    fn of(self, gguf: &Gguf) -> Error {
        match self {
            KeyError::Type(error) => Error::Gguf(error),
            KeyError::Value(fault) => of_file(gguf, fault),
        }
    }
}

impl From<moe_gguf::Error> for KeyError {
    fn from(error: moe_gguf::Error) -> KeyError {
        KeyError::Type(error)
    }
}

impl From<AdapterFault> for KeyError {
    fn from(fault: AdapterFault) -> KeyError {
        KeyError::Value(fault)
    }
}

/// Checks the keys of an adapter. Returns `adapter.lora.alpha`, 0 if the key is missing.
fn check_keys(gguf: &Gguf, arch: &str, scale: f32) -> Result<f32, KeyError> {
    let metadata = gguf.metadata();
    let text = |key: &str| -> Result<String, KeyError> {
        Ok(metadata.str(key)?.unwrap_or_default().to_owned())
    };
    let found = text("general.type")?;
    if found != "adapter" {
        return Err(AdapterFault::NotAnAdapter { found }.into());
    }
    let found = text("general.architecture")?;
    if found != arch {
        let expected = arch.to_owned();
        return Err(AdapterFault::Architecture { found, expected }.into());
    }
    let found = text("adapter.type")?;
    if found != "lora" {
        return Err(AdapterFault::Kind { found }.into());
    }
    if metadata.get(INVOCATION_TOKENS).is_some() {
        let key = INVOCATION_TOKENS.to_owned();
        return Err(AdapterFault::Activated { key }.into());
    }
    let alpha = metadata.f32("adapter.lora.alpha")?.unwrap_or(0.0);
    if let Some(bad) = [scale, alpha]
        .into_iter()
        .find(|factor| !factor.is_finite())
    {
        let found = bad.to_string();
        return Err(AdapterFault::Scale { found }.into());
    }
    Ok(alpha)
}

/// The pairs of an adapter by the name of the model's tensor, and the names of its norms, which llama.cpp ignores.
type Pairs<'g> = (BTreeMap<&'g str, Pair<'g>>, Vec<&'g str>);

fn pairs(gguf: &Gguf) -> Result<Pairs<'_>, AdapterFault> {
    let mut found: BTreeMap<&str, [Option<&Tensor>; 2]> = BTreeMap::new();
    let mut ignored = Vec::new();
    for tensor in gguf.tensors() {
        let name = tensor.name.as_str();
        if let Some(base) = name.strip_suffix(".lora_a") {
            found.entry(base).or_default()[0] = Some(tensor);
        } else if let Some(base) = name.strip_suffix(".lora_b") {
            found.entry(base).or_default()[1] = Some(tensor);
        } else if name.ends_with("_norm.weight") {
            ignored.push(name);
        } else {
            return Err(AdapterFault::Suffix {
                tensor: name.to_owned(),
            });
        }
    }
    let mut pairs = BTreeMap::new();
    for (name, parts) in found {
        let missing = |part: &str| AdapterFault::MissingTensor {
            tensor: format!("{name}.{part}"),
        };
        let a = parts[0].ok_or_else(|| missing("lora_a"))?;
        let b = parts[1].ok_or_else(|| missing("lora_b"))?;
        pairs.insert(name, Pair { a, b });
    }
    if pairs.is_empty() {
        return Err(AdapterFault::Empty);
    }
    Ok((pairs, ignored))
}

/// Checks that the model has the tensor of a pair, that its adapter is supported, and that the shapes match.
fn check_pair(model: &Gguf, arch: &str, name: &str, pair: &Pair) -> Result<(), AdapterFault> {
    let tensor = model.tensor(name);
    let tensor = tensor.ok_or_else(|| AdapterFault::UnknownTensor {
        tensor: name.to_owned(),
    })?;
    if let Some(reason) = not_applied(model, arch, name) {
        return Err(AdapterFault::NotApplied {
            tensor: name.to_owned(),
            reason,
        });
    }
    let (a, b, of_model) = (pair.a.ne, pair.b.ne, tensor.ne);
    let rank = a[1];
    let [n_in, n_out, n_expert, rest] = of_model;
    let matches = a == [n_in, rank, n_expert, rest] && b == [rank, n_out, n_expert, rest];
    if !matches || rank == 0 || rest != 1 {
        return Err(AdapterFault::Shape {
            tensor: name.to_owned(),
            a: a.to_vec(),
            b: b.to_vec(),
            model: of_model.to_vec(),
        });
    }
    Ok(())
}

/// Why adapters of a tensor are not supported; `None` if they are.
fn not_applied(model: &Gguf, arch: &str, name: &str) -> Option<&'static str> {
    if name == "token_embd.weight" {
        return Some("adapters of token embeddings are not supported");
    }
    // Products of llama.cpp's graphs without adapters: `ggml_mul_mat` instead of `build_lora_mm` in models/*.cpp.
    let (layer, part) = split_layer(name);
    let has = |part: &str| {
        let name = layer.map(|il| format!("blk.{il}.{part}"));
        name.is_some_and(|name| model.tensor(&name).is_some())
    };
    let plain: &[&str] = match arch {
        "deepseek2" | "mistral4" => &[
            "output.weight",
            "attn_q.weight",
            "attn_q_a.weight",
            "attn_q_b.weight",
            "attn_kv_a_mqa.weight",
            "attn_k_b.weight",
            "attn_v_b.weight",
            "attn_kv_b.weight",
        ],
        "deepseek2-ocr" => &["output.weight"],
        // A layer with Kimi Delta Attention.
        "kimi-linear" if has("ssm_f_a.weight") => &[
            "attn_q.weight",
            "attn_k.weight",
            "attn_v.weight",
            "attn_qkv.weight",
            "attn_output.weight",
            "ssm_f_a.weight",
            "ssm_f_b.weight",
            "ssm_beta.weight",
            "ssm_g_a.weight",
            "ssm_g_b.weight",
        ],
        "kimi-linear" => &[
            "output.weight",
            "attn_q.weight",
            "attn_kv_a_mqa.weight",
            "attn_k_b.weight",
            "attn_v_b.weight",
        ],
        "nemotron_h_moe" => &["ffn_latent_down.weight", "ffn_latent_up.weight"],
        _ => &[],
    };
    let is_plain = plain.contains(&part);
    is_plain.then_some("llama.cpp ignores adapters of this tensor in models of this architecture")
}
