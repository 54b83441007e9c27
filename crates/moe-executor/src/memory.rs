//! Memory that a forward pass needs, computed from the model before it is allocated.
//!
//! The buffers are those of the inventory (`buffers.jsonl`): activations, routing decisions and converted activations. Vectors with
//! one integer or factor per token and scratch memory of threads are not included.

use moe_gguf::GgmlType;
use moe_gguf::names::{Projection, Role};

use crate::adapter::AdaptedTensor;
use crate::arch::decoder::{DenseBlock, OutputRows};
use crate::attention::LatentSpec;
use crate::cpu::quant::Kernel;
use crate::hparams::{Gating, HParams, Heads, LayerCache};
use crate::model::Model;
use crate::moe::SharedWidth;

/// Bytes that scratch buffers on a GPU are rounded up to.
const GPU_ALIGN: u64 = 1 << 16;

/// Maximum number of tokens of a pass, so that no size overflows.
const MAX_TOKENS: usize = 1 << 24;

/// A buffer of a forward pass in CPU memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferSize {
    /// Its name in the buffer events.
    pub name: &'static str,
    /// Size in bytes.
    pub bytes: u64,
}

/// Memory of forward passes over at most a number of tokens, with logits of the last token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ComputeMemory {
    /// Buffers in CPU memory, of size 1 or more.
    pub buffers: Vec<BufferSize>,
    /// Estimate of the memory on each GPU that computes layers, in bytes: copies of the buffers, and scratch memory of kernels
    /// without that of the attention.
    pub gpu_bytes: u64,
    /// Bytes on a GPU for the experts of one layer, which are copied from CPU memory for large batches.
    pub expert_copy_bytes: u64,
}

impl ComputeMemory {
    /// Size of all buffers in CPU memory in bytes.
    pub fn cpu_bytes(&self) -> u64 {
        let sizes = self.buffers.iter().map(|buffer| buffer.bytes);
        sizes.fold(0, u64::saturating_add)
    }
}

impl Model<'_> {
    /// Returns the memory of forward passes over up to `n_tokens` tokens, 1 to 2^24; other numbers are clamped.
    pub fn compute_memory(&self, n_tokens: usize) -> ComputeMemory {
        let rows = Rows::of(self, n_tokens.clamp(1, MAX_TOKENS) as u64);
        let sizes = self.activations(&rows);
        let mut buffers: Vec<BufferSize> = sizes
            .into_iter()
            .map(|(name, values)| BufferSize {
                name,
                bytes: values.saturating_mul(4),
            })
            .filter(|buffer| buffer.bytes > 0)
            .collect();
        let on_gpu = buffers.iter().map(|buffer| power_of_two(buffer.bytes));
        let on_gpu = on_gpu.fold(0, u64::saturating_add);
        let products = self.products(&rows);
        let quantized = products.iter().map(|product| product.converted_bytes());
        buffers.push(BufferSize {
            name: "quantized activations",
            bytes: quantized.max().unwrap_or(0),
        });
        let quantized = products.iter().map(|product| {
            let n = product.rows.saturating_mul(product.n_in);
            // One byte per element, and 8 bytes per group of 32.
            n.saturating_add(n / 4)
        });
        let worklist = rows.selected().saturating_mul(4);
        let scratch = [quantized.max().unwrap_or(0), worklist].map(aligned);
        ComputeMemory {
            buffers,
            gpu_bytes: scratch.into_iter().fold(on_gpu, u64::saturating_add),
            expert_copy_bytes: self.expert_copies(),
        }
    }

    /// Names of buffers and their number of 4-byte values.
    fn activations(&self, rows: &Rows) -> Vec<(&'static str, u64)> {
        let hp = self.hparams();
        let spec = self.decoder.spec();
        let moe = &spec.moe;
        let (t, f, w) = (rows.tokens, rows.block, rows.wanted);
        let n_embd = hp.n_embd as u64;
        // The widest heads of the layers with one of the caches.
        let most = |caches: &[LayerCache], width: &dyn Fn(&Heads) -> usize| {
            let layers = hp.heads.iter().zip(&hp.caches);
            let layers = layers.filter(|(_, cache)| caches.contains(cache));
            let widths = layers.map(|(heads, _)| width(heads) as u64);
            t * widths.max().unwrap_or(0)
        };
        let with_values = [LayerCache::KeysAndValues];
        let attending = [LayerCache::KeysAndValues, LayerCache::Keys];
        let normed = most(&attending, &|heads| {
            let qk = [heads.n_q(), heads.n_k()].into_iter();
            let qk = qk.filter(|_| spec.attention.qk_norm.is_some());
            let v = spec.attention.value_norm.map(|_| heads.n_v());
            qk.chain(v).max().unwrap_or(0)
        });
        let n_expert = hp.n_expert as u64;
        let widest = |width: &dyn Fn(usize) -> u64| {
            let layers = rows.moe_layers.iter();
            let sizes = layers.map(|&(layer, rows)| rows.saturating_mul(width(layer)));
            sizes.max().unwrap_or(0)
        };
        let k = |layer: usize| hp.n_expert_used_by_layer[layer] as u64;
        let n_ff = |layer: usize| hp.n_ff_exp_by_layer[layer] as u64;
        let routed = widest(&|_| 1);
        let hidden = widest(&|layer| k(layer).saturating_mul(n_ff(layer)));
        let dense = rows.dense_layers.iter();
        let dense = dense.map(|&(layer, rows)| rows * hp.n_ff_by_layer[layer] as u64);
        let beside = if spec.dense_block == DenseBlock::None {
            0
        } else {
            routed * n_embd
        };
        let dense_of_moe = match spec.dense_block {
            DenseBlock::None => 0,
            DenseBlock::BeforeExperts => routed * n_embd,
            DenseBlock::WithExperts | DenseBlock::Normed => {
                widest(&|layer| hp.n_ff_by_layer[layer] as u64)
            }
        };
        let dense = dense.max().unwrap_or(0).max(dense_of_moe);
        let kept_scores = if moe.routes_ahead { n_expert } else { 0 };
        let has_gated_queries = spec.attention.gated_queries.is_some();
        let fused = self.decoder.fused_heads().map(|heads| {
            let queries = if has_gated_queries { 2 } else { 1 };
            queries * heads.n_q() + heads.n_k() + heads.n_v()
        });
        let fused = fused.max();
        let gates = match spec.attention.gate {
            Some(gate) if gate.per_head => most(&attending, &|heads| heads.n),
            Some(_) => most(&attending, &Heads::n_out),
            None if has_gated_queries => most(&attending, &Heads::n_q),
            None => 0,
        };
        // Queries and their gates.
        let joint = if has_gated_queries {
            2 * most(&attending, &Heads::n_q)
        } else {
            0
        };
        let input = match spec.post_attention_norm {
            Some(_) if !spec.norms_output_rows => t,
            _ => f.max(w),
        };
        let gates_of = |up: u64| if moe.ungated.is_some() { 0 } else { up };
        let is_selected_twice = moe.selection_bias || hp.expert_groups.is_some();
        let has_probs = moe.gating != Gating::SoftmaxOfSelected;
        let shared = moe.shared.map_or([0; 4], |shared| {
            let width = widest(&|layer| match shared.width {
                SharedWidth::Own(width) => width as u64,
                SharedWidth::Experts(n) => (n as u64).saturating_mul(n_ff(layer)),
            });
            let score = if shared.gated { routed } else { 0 };
            let weight = if shared.sigmoid.is_some() { 0 } else { score };
            [width, score, weight, routed * n_embd]
        });
        let latent = moe.latent.map_or(0, |n_latent| routed * n_latent as u64);
        let expert_out = moe.latent.map_or(n_embd, |n_latent| n_latent as u64);
        let recurrent = spec.recurrent.map(|spec| {
            let has_joint_inputs = self.decoder.has_joint_inputs();
            spec.buffers(hp, t, has_joint_inputs)
        });
        let mut sizes = vec![
            ("residual stream", t * n_embd),
            ("block input", input * n_embd),
            ("block output", t * n_embd),
            ("residual stream before the experts", f * n_embd),
            ("experts next to a dense block", beside),
            ("kept rows", w * n_embd.max(kept_scores)),
            ("logits", w * hp.n_vocab as u64),
            ("attention input", most(&attending, &|_| hp.n_embd)),
            ("queries", most(&attending, &Heads::n_q)),
            ("keys", most(&attending, &Heads::n_k)),
            ("values", most(&with_values, &Heads::n_v)),
            ("queries, keys or values before their norm", normed),
            ("attention heads", most(&attending, &Heads::n_out)),
            ("queries, keys and values", t * fused.unwrap_or(0) as u64),
            ("queries and their gates", joint),
            ("attention gates", gates),
            ("dense gate", dense),
            ("dense up", dense),
            ("router scores", routed * n_expert),
            (
                "router probabilities",
                if has_probs { routed * n_expert } else { 0 },
            ),
            (
                "router selection",
                if is_selected_twice {
                    routed * n_expert
                } else {
                    0
                },
            ),
            ("selected experts", rows.selected()),
            ("weights of the selected experts", rows.selected()),
            ("dense gate", gates_of(shared[0])),
            ("dense up", shared[0]),
            ("expert gate", gates_of(hidden)),
            ("expert up", hidden),
            ("expert down", rows.selected().saturating_mul(expert_out)),
            (
                "weighted inputs of experts",
                if moe.weights_first {
                    rows.selected().saturating_mul(n_embd)
                } else {
                    0
                },
            ),
            ("shared expert score", shared[1]),
            ("shared expert weight", shared[2]),
            ("sum of the selected experts", shared[3]),
            ("shared expert", shared[3]),
            ("latent expert input", latent),
            ("latent sum of the selected experts", latent),
        ];
        if let Some(latent) = &spec.attention.latent {
            sizes.extend(latent_buffers(hp, latent, t));
        }
        sizes.extend(recurrent.into_iter().flatten());
        sizes.extend(self.adapter_buffers(rows));
        sizes
    }

    /// Names of the buffers of products with adapters and their number of 4-byte values.
    fn adapter_buffers(&self, rows: &Rows) -> [(&'static str, u64); 2] {
        let largest = |width: &dyn Fn(&AdaptedTensor) -> u64| {
            let sizes = self.adapted().iter().map(|tensor| {
                let n_rows = rows.of_adapted(tensor).map_or(0, |(_, n_out)| n_out);
                n_rows.saturating_mul(width(tensor))
            });
            sizes.max().unwrap_or(0)
        };
        // The two halves of a tensor with gate and up are multiplied one after the other.
        let n_out = |tensor: &AdaptedTensor| match Role::of(&tensor.name).projection {
            Some(Projection::GateUp) => tensor.n_out / 2,
            _ => tensor.n_out,
        };
        [
            ("adapter products of rank", largest(&|tensor| tensor.rank)),
            ("adapter products", largest(&n_out)),
        ]
    }

    /// The matrix products of a pass.
    fn products(&self, rows: &Rows) -> Vec<Product> {
        let tensors = self.gguf().tensors().iter();
        let has_output = self.gguf().tensor("output.weight").is_some();
        let products = tensors.filter_map(|tensor| {
            let role = Role::of(&tensor.name);
            let part = tensor.name.strip_suffix(".weight")?;
            let n_rows = match role.layer_id {
                None if part == "output" || (part == "token_embd" && !has_output) => rows.wanted,
                None => return None,
                Some(layer) => {
                    let part = part.rsplit('.').next().unwrap_or(part);
                    rows.of_part(part, layer.index())?
                }
            };
            Some(Product {
                ty: tensor.ty,
                n_in: tensor.ne[0],
                rows: n_rows,
            })
        });
        let adapted = self.adapted().iter().flat_map(|tensor| {
            let (rows_in, rows_out) = rows.of_adapted(tensor).unwrap_or((0, 0));
            let [ty_a, ty_b] = tensor.types;
            let product = |ty, n_in, rows| Product { ty, n_in, rows };
            [
                product(ty_a, tensor.n_in, rows_in),
                product(ty_b, tensor.rank, rows_out),
            ]
        });
        products.chain(adapted).collect()
    }

    /// Bytes of the largest gate, up and down stacks, which a GPU holds at the same time.
    fn expert_copies(&self) -> u64 {
        let largest = |projection| {
            let sizes = self.gguf().tensors().iter().filter_map(|tensor| {
                let role = Role::of(&tensor.name);
                let size = match role.projection? {
                    // One half is gate, the other one up.
                    Projection::GateUp if projection != Projection::Down => tensor.size_bytes / 2,
                    own if own == projection => tensor.size_bytes,
                    _ => return None,
                };
                role.stacked.then_some(size)
            });
            sizes.max().map_or(0, aligned)
        };
        let projections = [Projection::Gate, Projection::Up, Projection::Down];
        projections.map(largest).iter().sum()
    }
}

/// Names of the buffers of latent attention over `t` tokens and their number of 4-byte values.
fn latent_buffers(hp: &HParams, latent: &LatentSpec, t: u64) -> [(&'static str, u64); 8] {
    let (n_head, n_rot) = (hp.n_head as u64, hp.rope.n_dims as u64);
    let [rank, key_dim, value_dim] =
        [latent.kv_rank, latent.key_dim, latent.value_dim].map(|n| n as u64);
    let q_rank = latent.q_rank.unwrap_or(0) as u64;
    let [queries, rotated, decompressed] = if latent.absorbed {
        [key_dim, 0, value_dim]
    } else {
        [0, n_rot, key_dim - n_rot + value_dim]
    };
    [
        ("compressed queries", t * q_rank),
        ("normed compressed queries", t * q_rank),
        ("queries of decompressed keys", t * n_head * queries),
        ("compressed rows with rotated elements", t * (rank + n_rot)),
        ("compressed keys and values", t * rank),
        ("normed compressed keys and values", t * rank),
        ("rotated elements of keys", t * rotated),
        ("decompressed keys and values", t * n_head * decompressed),
    ]
}

/// A product of rows of activations with a matrix.
struct Product {
    ty: GgmlType,
    n_in: u64,
    rows: u64,
}

impl Product {
    /// Bytes of the rows in the type that they are converted to.
    fn converted_bytes(&self) -> u64 {
        let n_in = usize::try_from(self.n_in).unwrap_or(usize::MAX / 8);
        let row = Kernel::for_type(self.ty).map_or(0, |kernel| kernel.activation().row_size(n_in));
        self.rows.saturating_mul(row as u64)
    }
}

/// Numbers of rows of activations in a pass.
struct Rows {
    /// Tokens of the pass.
    tokens: u64,
    /// Rows whose logits are computed.
    wanted: u64,
    /// Maximum number of rows after the attention.
    block: u64,
    /// Layers with a dense block, and the rows of the block.
    dense_layers: Vec<(usize, u64)>,
    /// MoE layers, and their rows.
    moe_layers: Vec<(usize, u64)>,
    /// Selected experts per token, by layer.
    n_expert_used: Vec<usize>,
    /// Number of query heads.
    n_head: u64,
    /// Whether each selected expert reads a row of its own.
    weights_first: bool,
}

impl Rows {
    fn of(model: &Model, tokens: u64) -> Rows {
        let (hp, spec) = (model.hparams(), model.decoder.spec());
        let in_last = spec.output_rows == OutputRows::InLastLayer;
        let rows = |layer| {
            if in_last && layer + 1 == hp.n_layer {
                1
            } else {
                tokens
            }
        };
        let layers = |is_moe: bool| {
            let layers = (0..hp.n_layer).filter(|&layer| hp.has_block[layer]);
            let layers = layers.filter(|&layer| spec.is_moe(layer) == is_moe);
            layers.map(|layer| (layer, rows(layer))).collect()
        };
        Rows {
            tokens,
            wanted: 1,
            block: (0..hp.n_layer).map(rows).max().unwrap_or(0),
            dense_layers: layers(false),
            moe_layers: layers(true),
            weights_first: spec.moe.weights_first,
            n_expert_used: hp.n_expert_used_by_layer.clone(),
            n_head: hp.n_head as u64,
        }
    }

    /// Maximum number of selected experts of a layer, of all tokens.
    fn selected(&self) -> u64 {
        let selected = self.moe_layers.iter();
        let selected = selected.map(|&(layer, rows)| rows * self.n_expert_used[layer] as u64);
        selected.max().unwrap_or(0)
    }

    /// Rows of the products with the two matrices of an adapter.
    fn of_adapted(&self, tensor: &AdaptedTensor) -> Option<(u64, u64)> {
        let Some(layer) = Role::of(&tensor.name).layer_id else {
            return Some((self.wanted, self.wanted));
        };
        let part = tensor.name.strip_suffix(".weight")?;
        let part = part.rsplit('.').next().unwrap_or(part);
        let rows_in = self.of_part(part, layer.index())?;
        let rows_out = if tensor.is_stacked {
            self.of_part("ffn_down_exps", layer.index())?
        } else {
            rows_in
        };
        Some((rows_in, rows_out))
    }

    /// Rows of the product with a matrix of a layer; `None` for a tensor that is not a matrix.
    fn of_part(&self, part: &str, layer: usize) -> Option<u64> {
        let of_block = || {
            let layers = self.dense_layers.iter().chain(&self.moe_layers);
            layers
                .into_iter()
                .find(|(at, _)| *at == layer)
                .map(|&(_, rows)| rows)
        };
        match part {
            "attn_q" | "attn_k" | "attn_v" | "attn_qkv" | "attn_gate" | "attn_output"
            | "attn_q_a" | "attn_q_b" | "attn_kv_a_mqa" | "attn_kv_b" => Some(self.tokens),
            "attn_k_b" | "attn_v_b" => Some(self.tokens.saturating_mul(self.n_head)),
            // Of recurrent layers.
            "in_proj" | "out_proj" | "ssm_in" | "ssm_ba" | "ssm_alpha" | "ssm_beta" | "ssm_out"
            | "ssm_f_a" | "ssm_f_b" | "ssm_g_a" | "ssm_g_b" => Some(self.tokens),
            "ffn_gate" | "ffn_up" | "ffn_down" | "ffn_gate_inp" | "ffn_gate_inp_shexp"
            | "ffn_gate_shexp" | "ffn_up_shexp" | "ffn_down_shexp" | "ffn_latent_down"
            | "ffn_latent_up" => of_block(),
            "ffn_gate_exps" | "ffn_up_exps" | "ffn_gate_up_exps" if !self.weights_first => {
                of_block()
            }
            "ffn_gate_exps" | "ffn_up_exps" | "ffn_gate_up_exps" | "ffn_down_exps" => {
                Some(of_block()? * self.n_expert_used[layer] as u64)
            }
            _ => None,
        }
    }
}

fn aligned(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(GPU_ALIGN).unwrap_or(bytes)
}

fn power_of_two(bytes: u64) -> u64 {
    bytes.checked_next_power_of_two().unwrap_or(bytes)
}
