//! Checks of header values for which llama.cpp aborts the process instead of returning an error, or whose results cannot be
//! recorded.
//!
//! The rules are the assertions of `llama_model_base::load_hparams` and of the graphs in `src/models/` of the llama.cpp version
//! that `llama-cpp-sys-2` builds. All other assertions call the callback of [`on_abort`](crate::on_abort).

use moe_gguf::{Gguf, PerLayer, Value};

use crate::error::{Error, Result};

/// `LLAMA_MAX_LAYERS`.
const MAX_LAYERS: u64 = 512;
/// `LLAMA_MAX_EXPERTS`.
const MAX_EXPERTS: u64 = 1024;
/// Names of `LLAMA_ROPE_SCALING_TYPES`.
const ROPE_SCALING_TYPES: [&str; 4] = ["none", "linear", "yarn", "longrope"];

/// MoE architectures whose graph asserts `n_embd_head_k == n_embd_head_v` and `n_embd_head == n_rot`.
const ROTATE_WHOLE_HEADS: [&str; 24] = [
    "arctic",
    "cohere2moe",
    "dbrx",
    "deepseek",
    "dots1",
    "ernie4_5-moe",
    "exaone-moe",
    "granite_swa",
    "granitemoe",
    "graniteswitch",
    "grok",
    "grovemoe",
    "hunyuan-moe",
    "hy_v3",
    "llada-moe",
    "llama",
    "llama4",
    "mellum",
    "mistral3",
    "olmoe",
    "qwen2moe",
    "qwen3moe",
    "qwen3vlmoe",
    "rnd1",
];

/// Architectures for which llama.cpp supports a list of `expert_used_count` with different values.
const PER_LAYER_EXPERTS: [&str; 2] = ["nemotron_h", "nemotron_h_moe"];

/// Architectures whose graph always reads the cache of a sliding window, which exists only if the window is not 0.
const NEED_WINDOW: [&str; 1] = ["afmoe"];

/// Checks the header of a model. Keys of a wrong type are not checked, because llama.cpp returns an error for them.
///
/// # Errors
/// [`Error::Header`].
pub(crate) fn check(gguf: &Gguf) -> Result<()> {
    let metadata = gguf.metadata();
    let Some(arch) = metadata.str("general.architecture").ok().flatten() else {
        return Ok(());
    };
    let header = Header { gguf, arch };
    let n_block = header.number("block_count");
    if let Some(n) = n_block {
        let range = format!("llama.cpp supports 1 to {MAX_LAYERS}");
        header.refuse("block_count", n, n == 0 || n > MAX_LAYERS, &range)?;
        let n_nextn = header.number("nextn_predict_layers").unwrap_or(0);
        let blocks = format!("it must be smaller than the {n} blocks (`block_count`)");
        header.refuse("nextn_predict_layers", n_nextn, n_nextn >= n, &blocks)?;
    }
    for suffix in [
        "attention.layer_norm_rms_epsilon",
        "attention.layer_norm_epsilon",
    ] {
        let epsilon = metadata.f32(&header.key(suffix)).ok().flatten();
        let is_refused = epsilon.is_some_and(|epsilon| epsilon.is_nan() || epsilon < 0.0);
        header.refuse(
            suffix,
            epsilon.unwrap_or(0.0),
            is_refused,
            "it must be at least 0",
        )?;
    }
    // Without causal attention, the results depend on the division of a prompt into batches.
    const CAUSAL: &str = "attention.causal";
    let is_causal = metadata.bool(&header.key(CAUSAL)).ok().flatten();
    let reason = "the only supported value is true";
    header.refuse(CAUSAL, false, is_causal == Some(false), reason)?;
    header.check_experts()?;
    header.check_used()?;
    let key = header.key("rope.scaling.type");
    if let Some(name) = metadata.str(&key).ok().flatten() {
        let is_unknown = !ROPE_SCALING_TYPES.contains(&name);
        let known = format!("llama.cpp supports {}", ROPE_SCALING_TYPES.join(", "));
        header.refuse("rope.scaling.type", format!("{name:?}"), is_unknown, &known)?;
    }
    header.check_window()?;
    header.check_heads()
}

/// The keys of the model's architecture.
struct Header<'g> {
    gguf: &'g Gguf,
    arch: &'g str,
}

impl Header<'_> {
    fn key(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.arch)
    }

    fn values(&self, suffix: &str) -> Option<PerLayer> {
        let values = self.gguf.metadata().per_layer(&self.key(suffix));
        values.ok().flatten()
    }

    fn number(&self, suffix: &str) -> Option<u64> {
        self.values(suffix)?.uniform()
    }

    /// The first value of a key below 0, which is not one of its [`Header::values`].
    fn first_negative(&self, suffix: &str) -> Option<i128> {
        let is_negative = |n: &i128| *n < 0;
        match self.gguf.metadata().get(&self.key(suffix))? {
            Value::Array(list) => {
                let numbers = list.iter().filter_map(|value| value.as_i128());
                numbers.take(MAX_LAYERS as usize).find(is_negative)
            }
            value => value.as_i128().filter(is_negative),
        }
    }

    fn refuse(
        &self,
        suffix: &str,
        value: impl ToString,
        is_refused: bool,
        reason: &str,
    ) -> Result<()> {
        if !is_refused {
            return Ok(());
        }
        Err(Error::Header {
            path: self.gguf.files()[0].path.clone(),
            key: self.key(suffix),
            value: value.to_string(),
            reason: reason.to_owned(),
        })
    }

    fn check_experts(&self) -> Result<()> {
        const USED: &str = "expert_used_count";
        const GROUPS: &str = "expert_group_count";
        const GROUPS_USED: &str = "expert_group_used_count";
        for suffix in ["expert_count", USED, GROUPS, GROUPS_USED] {
            if let Some(n) = self.first_negative(suffix) {
                self.refuse(suffix, n, true, "it must be at least 0")?;
            }
            if self.gguf.metadata().per_layer(&self.key(suffix)).is_err() {
                return Ok(());
            }
        }
        let n_expert = self.number("expert_count").unwrap_or(0);
        let n_used = self.values(USED).and_then(|used| used.max()).unwrap_or(0);
        let n_group = self.number(GROUPS).unwrap_or(0);
        let n_group_used = self.number(GROUPS_USED).unwrap_or(0);
        let most = format!("llama.cpp supports up to {MAX_EXPERTS}");
        self.refuse("expert_count", n_expert, n_expert > MAX_EXPERTS, &most)?;
        let range = if n_expert > 0 {
            format!("it must be in 1..={n_expert} (`expert_count`)")
        } else {
            "it must be 0 if `expert_count` is 0".to_owned()
        };
        let is_outside = n_used > n_expert || n_used == 0 && n_expert > 0;
        self.refuse(USED, n_used, is_outside, &range)?;
        let groups = format!("it must divide the {n_expert} experts into groups of two or more");
        let is_uneven = n_group > 1 && !n_expert.is_multiple_of(n_group);
        let is_outside = n_group > 0 && n_group >= n_expert;
        self.refuse(GROUPS, n_group, is_uneven || is_outside, &groups)?;
        let range = format!("it must be at least 1 and smaller than the {n_group} groups");
        let is_outside = n_group > 1 && (n_group_used == 0 || n_group_used >= n_group);
        self.refuse(GROUPS_USED, n_group_used, is_outside, &range)
    }

    /// Most graphs select as many experts in every layer as in layer 0, but then read the number of each layer.
    fn check_used(&self) -> Result<()> {
        const KEY: &str = "expert_used_count";
        if PER_LAYER_EXPERTS.contains(&self.arch) {
            return Ok(());
        }
        let Some(PerLayer::Each(used)) = self.values(KEY) else {
            return Ok(());
        };
        let has_experts = |layer: usize| {
            let name = format!("blk.{layer}.ffn_down_exps.weight");
            self.gguf.tensor(&name).is_some()
        };
        let first = used.first().copied().unwrap_or(0);
        let others = used.iter().enumerate().filter(|&(_, &n)| n != first);
        let mut others = others.filter(|&(layer, _)| has_experts(layer));
        let reason =
            "for this architecture, llama.cpp selects as many experts in every layer as in layer 0";
        self.refuse(
            KEY,
            PerLayer::Each(used.clone()),
            others.next().is_some(),
            reason,
        )
    }

    fn check_window(&self) -> Result<()> {
        const WINDOW: &str = "attention.sliding_window";
        let n = self.number(WINDOW).unwrap_or(0);
        let is_refused = n == 0 && NEED_WINDOW.contains(&self.arch);
        let reason = "for this architecture, llama.cpp needs a window of 1 position or more";
        self.refuse(WINDOW, n, is_refused, reason)
    }

    fn check_heads(&self) -> Result<()> {
        const ROTATED: &str = "rope.dimension_count";
        const VALUES: &str = "attention.value_length";
        if !ROTATE_WHOLE_HEADS.contains(&self.arch) {
            return Ok(());
        }
        let n_head = self.values("attention.head_count");
        let n_head = n_head.and_then(|heads| heads.get(0)).unwrap_or(0);
        let Some(of_model) = self
            .number("embedding_length")
            .unwrap_or(0)
            .checked_div(n_head)
        else {
            return Ok(());
        };
        let width = |suffix, default| self.number(suffix).unwrap_or(default);
        let key_length = width("attention.key_length", of_model);
        let value_length = width(VALUES, of_model);
        let n_rotated = width(ROTATED, key_length);
        let reason = format!("for this architecture, llama.cpp needs the head size {key_length}");
        self.refuse(VALUES, value_length, value_length != key_length, &reason)?;
        self.refuse(ROTATED, n_rotated, n_rotated != key_length, &reason)
    }
}
