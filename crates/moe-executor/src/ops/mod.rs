//! The operations of a graph. Each computes its result and writes a record with the node's name in llama.cpp.
//!
//! Nodes without a name in llama.cpp (`node_57`) have a name here:
//!
//! | name | node |
//! |---|---|
//! | `kqv_out-N` | fused attention |
//! | `k_pe_repeated-N` | rotated dimensions of the keys, repeated for each head |
//! | `ffn_residual-N` | sum of a block next to the attention and the residual stream |
//! | `ffn_out_sum-N` | sum of the selected experts and the shared expert, before a multiplication by a constant |
//! | `ffn_inp_normed-N` | norm before the experts of Llama 4 |
//! | `attn_out-N`, `attn_o-N` | output product of the attention |
//! | `ffn_moe_sum-N` | partial sum of the experts |
//! | `ffn_moe_down_scales-N`, `ffn_moe_down_scale-N` | factors of the experts for each token, and those of the selected experts |
//! | `ffn_moe_repeated-N` | input of the experts for each selected expert |
//! | `ffn_moe_inp_normed-N`, `ffn_moe_inp_scaled-N`, `ffn_moe_inp-N` | input of a router with its own norm |
//! | `ffn_shexp_gate_silu-N` | first operation of a sigmoid, which llama.cpp's graph computes as `silu(x) / x` |
//! | `conv_input-N`, `conv_gated-N` | products of the input and the output of a short convolution with its gates |
//! | `ssm_…-N` | operations of a Mamba-2 layer |
//! | `kda_…-N`, `f_a-N`, `g_a-N` | operations of Kimi Delta Attention; `kda_g1-N`, `kda_normed-N` and `kda_out-N` are names of llama.cpp |
//! | `ffn_moe_relu-N` | first operation of a squared ReLU |
//! | `ffn_latent_down-N`, `ffn_latent_up-N` | products before and after experts of another width |
//! | `attn_out_rows-N`, `l_out_rows-N`, `ffn_moe_logits_rows-N` | selection of the rows whose logits are wanted |
//! | `embd_unscaled`, `attn_out_scaled-N`, `ffn_out_scaled-N`, `l_out_unscaled-N`, `result_output_unscaled` | before or after a multiplication by a constant |
//! | `result_output_scaled`, `result_output_tanh` | steps of a bound of the logits |
//! | `ffn_moe_group_…-N` | selection of expert groups |
//! | `kq_capped-N` | attention scores divided by their bound |
//! | `NAME_base-N`, `NAME_lora_a-N`, `NAME_lora_b-N`, `NAME_lora-N`, `NAME_lora_sum-N` | a product `NAME-N` with LoRA adapters |
//!
//! The copies of the states of recurrent layers are nodes in llama.cpp and part of an operation here.
//!
//! An operation runs on the GPU of its weights or of its layer. The CPU computes it if the GPU cannot. Values are copied
//! between devices when an operation needs them. If one kernel computes several operations, the record of the first
//! contains its time, and the duration of the others is 0. Products of LoRA adapters run on the CPU only.
//!
//! [`Ops`] keeps no state of a running operation. Its start and its device are in a `Scope`, the device of its layer is in
//! an [`At`], and what the expert operations of a layer pass to each other is in an [`Experts`](experts::Experts).

mod attention;
mod dynamic;
mod elementwise;
mod expert_scales;
mod experts;
mod hot_cache;
mod kimi;
mod latent;
mod limits;
mod low_rank;
mod mamba2;
mod norm;
pub(crate) mod number;
mod observed;
mod post_fetch;
mod recurrent;
mod router;
mod run;
mod scaling;
mod scope;
mod ungated;
mod weighted_inputs;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use moe_engine::{Observer, TokenSequence};
use moe_trace::{LayerId, TokenId};

use crate::activation::{Activation, AdapterStep, NodeName};
use crate::cpu::matmul::{self, Quantized, Worklist};
use crate::cpu::rope::Angles;
use crate::cpu::threads::Threads;
use crate::cuda;
use crate::device_id::DeviceId;
use crate::devices::Devices;
use crate::hot_cache::{DynamicSlots, HotCache};
use crate::mirrored::Mirrored;
use crate::recorder::Recorder;
use crate::weights::{Linear, Matrix, Vector};

pub(crate) use crate::cpu::glu::Glu;
pub(crate) use expert_scales::ExpertScales;
pub(crate) use experts::Projection;
pub(crate) use hot_cache::{ExpertIo, ExpertNodes, MergeNames};
pub(crate) use latent::Join;
pub(crate) use limits::SwigluLimit;
use low_rank::LowRankBuffers;
use observed::BatchObserver;
pub(crate) use recurrent::Convolution;
pub(crate) use router::{RouterSpec, RouterState};
use scope::Scope;
pub(crate) use ungated::{Unary, UngatedNodes};

/// Smallest size in bytes of values that all threads check together. The threads sleep while a GPU computes; waking them takes longer
/// than a smaller check.
const MIN_PARALLEL_CHECK: usize = 4 << 20;

/// Runs operations and records them.
pub(crate) struct Ops<'a> {
    /// Threads of the CPU.
    pub threads: &'a Threads,
    /// Writes the records.
    pub recorder: Recorder,
    /// Called with the routing decisions of each MoE layer.
    pub observer: Option<Observer<'a>>,
    /// Called at the end of a pass.
    pub batch_observer: BatchObserver<'a>,
    /// Devices of the session.
    pub devices: Devices<'a>,
    /// The hot expert cache, if it is enabled.
    pub hot: Option<Box<HotCache>>,
    /// The slots of `hot` whose experts change while a request runs, if it is a dynamic cache.
    pub dynamic: Option<Box<DynamicSlots<'a>>>,
    /// Position of each token of the current operations, in its sequence.
    pub positions: Vec<u32>,
    /// Sequence and phase of each token of the current operations.
    pub sequences: Vec<TokenSequence>,
    /// Position of the first token of the pass.
    first_position: TokenId,
    /// Node and position of the first value in this pass that is not finite.
    pub not_finite: Option<(NodeName, u32)>,
    /// A GPU error after which values on the GPU are lost.
    pub fault: Option<cuda::Error>,
    quantized: Quantized,
    work: Worklist,
    angles: Angles,
    /// Scratch of a top-k selection: indices of the candidates.
    order: Vec<u32>,
    /// Selected expert groups `(token, n_used)`.
    groups: Vec<u32>,
    /// Sum of the weights of the selected experts `(token)`.
    sums: Vec<f32>,
    /// Factors of an operation that multiplies rows `(token)`.
    row_factors: Mirrored<f32>,
    /// Results of products with adapters.
    low_rank: LowRankBuffers,
}

/// A layer and its device.
#[derive(Clone, Copy)]
pub(crate) struct At {
    /// The layer.
    pub il: LayerId,
    /// Device of the operations without weights.
    pub device: DeviceId,
}

impl<'a> Ops<'a> {
    /// Operations on `devices`, recorded by `recorder`. The CPU uses `threads`.
    pub fn new(threads: &'a Threads, recorder: Recorder, devices: Devices<'a>) -> Ops<'a> {
        Ops {
            threads,
            recorder,
            observer: None,
            batch_observer: BatchObserver::default(),
            devices,
            hot: None,
            dynamic: None,
            positions: Vec::new(),
            sequences: Vec::new(),
            first_position: TokenId::default(),
            not_finite: None,
            fault: None,
            quantized: Quantized::default(),
            work: Worklist::default(),
            angles: Angles::default(),
            order: Vec::new(),
            groups: Vec::new(),
            sums: Vec::new(),
            row_factors: Mirrored::default(),
            low_rank: LowRankBuffers::new(),
        }
    }

    /// A layer with its device.
    pub fn at(&self, il: LayerId) -> At {
        At {
            il,
            device: self.devices.layer(il),
        }
    }

    /// The device of the output: the final norm and the selection of rows after the last layer.
    pub fn output_device(&self) -> DeviceId {
        self.devices.output()
    }

    /// Notes the first row of `x` with a value that is not finite. Values on a GPU are not checked: such a value propagates
    /// to the logits, which are checked.
    pub fn check_finite(&mut self, x: &Activation) {
        if self.not_finite.is_some() || x.values.home() != DeviceId::Cpu {
            return;
        }
        let data = x.data();
        let has_bad = AtomicBool::new(false);
        let check = |part: Range<usize>| {
            // Without an early end, several values are compared at a time: a row of logits has up to 10^6.
            if data[part].iter().fold(false, |bad, v| bad | !v.is_finite()) {
                has_bad.store(true, Ordering::Relaxed);
            }
        };
        if size_of_val(data) < MIN_PARALLEL_CHECK {
            check(0..data.len());
        } else {
            self.threads.split(data.len(), size_of_val(data), check);
        }
        if has_bad.into_inner() {
            let mut rows = data.chunks_exact(x.width).zip(&self.positions);
            let bad = rows.find(|(row, _)| row.iter().any(|v| !v.is_finite()));
            self.not_finite = bad.map(|(_, &position)| (x.name, position));
        }
    }

    /// `dst = weights · src` for each row of `src (row, n_in)`, `dst (row, n_out)`.
    pub fn mul_mat(
        &mut self,
        name: NodeName,
        weights: &Matrix,
        src: &mut Activation,
        dst: &mut Activation,
    ) {
        let linear = Product {
            weights,
            bias: None,
        };
        self.product([name; 2], &linear, src, dst);
    }

    /// `dst = weights · src + bias` for each row. Product and bias are two operations with their own names.
    pub fn linear(
        &mut self,
        names: [NodeName; 2],
        linear: &Linear,
        src: &mut Activation,
        dst: &mut Activation,
    ) {
        let product = Product {
            weights: &linear.weights,
            bias: linear.bias.as_ref(),
        };
        self.product(names, &product, src, dst);
    }

    fn product(
        &mut self,
        [name, biased]: [NodeName; 2],
        product: &Product,
        src: &mut Activation,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        let weights = product.weights;
        let own = if weights.is_adapted() {
            name.adapter_step(AdapterStep::Base)
        } else {
            name
        };
        dst.shape(own, weights.n_out, src.rows);
        let here = self.device_of(weights, src.rows);
        let on_gpu = self.on(&mut scope, here, |device| {
            device.mul_mat(weights, product.bias, src, dst)
        });
        if !on_gpu {
            self.fetch(&mut src.values);
            matmul::mul_mat(
                self.threads,
                weights,
                src.data(),
                dst.data_mut(),
                &mut self.quantized,
            );
        }
        let sources = [weights.into(), (&*src).into()];
        self.record(&mut scope, number::MUL_MAT, own, &sources);
        if weights.is_adapted() {
            self.add_low_rank(&mut scope, name, weights, src, dst);
        }
        if let Some(bias) = product.bias {
            self.bias(scope, biased, bias, dst);
        }
    }
}

/// A matrix and an optional bias.
struct Product<'a, 'g> {
    weights: &'a Matrix<'g>,
    bias: Option<&'a Vector>,
}
