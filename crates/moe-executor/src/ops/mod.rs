//! The operations of a graph: each computes, and leaves a record under the name that llama.cpp gives the node.
//!
//! Where llama.cpp leaves a node unnamed (`node_57`) the record has a name of its own: `attn_out-N` for the attention's
//! output product, `kqv_out-N` for the fused attention itself, `ffn_moe_sum-N` for the partial sums of the experts,
//! `ffn_shexp_gate_silu-N` for half of a sigmoid, `attn_out_rows-N` and `l_out_rows-N` where a prompt is cut to the rows that are wanted. The choice of expert groups,
//! seven nodes there, is two operations here.
//!
//! An operation runs on the GPU where its weights live, or its layer does; the host does it where the GPU cannot.
//! Values are copied between devices when they are asked for. One kernel may do what several operations are: the first of them
//! has its time, the others have none.
//!
//! Nothing of an operation is kept here while it runs: its start, and whether a GPU has computed it, are in a `Scope`, where its
//! layer is computed in an [`At`], and what the operations of a layer's experts pass on in an [`Experts`](experts::Experts).

mod attention;
mod elementwise;
mod experts;
pub(crate) mod number;
mod post_fetch;
mod router;
mod run;
mod scope;

use moe_engine::Observer;

use crate::activation::{Activation, NodeName};
use crate::cpu::matmul::{self, Quantized, Worklist};
use crate::cpu::rope::Angles;
use crate::cpu::threads::Threads;
use crate::cuda;
use crate::devices::Devices;
use crate::placement::DeviceId;
use crate::recorder::Recorder;
use crate::weights::{Linear, Matrix, Vector};

pub(crate) use crate::cpu::glu::Glu;
pub(crate) use experts::Projection;
pub(crate) use router::{Gating, Groups, RouterSpec, RouterState};
use scope::Scope;

/// Runs operations and records them.
pub(crate) struct Ops<'a> {
    /// Threads that compute.
    pub threads: &'a Threads,
    /// Where records go.
    pub recorder: Recorder,
    /// Told of every routing.
    pub observer: Option<Observer<'a>>,
    /// Devices that compute.
    pub devices: Devices<'a>,
    /// Position of each row of the current operations.
    pub positions: Vec<u32>,
    /// Position of the pass's first row.
    first_position: u32,
    /// Where a value that is no number showed first in this pass.
    pub not_finite: Option<(NodeName, u32)>,
    /// What went wrong on a GPU so that values on it are lost.
    pub fault: Option<cuda::Error>,
    quantized: Quantized,
    work: Worklist,
    angles: Angles,
    /// Experts of a row while the best are found.
    order: Vec<u32>,
    /// Groups that the rows choose from.
    groups: Vec<u32>,
    /// Sums of the chosen weights.
    sums: Vec<f32>,
}

/// A layer, and where it is computed.
#[derive(Clone, Copy)]
pub(crate) struct At {
    /// The layer; as many as there are layers stands for the output.
    pub il: usize,
    /// Where operations run that have no weights in a place of their own.
    pub device: DeviceId,
}

impl<'a> Ops<'a> {
    /// Operations on `devices`, of which the CPU computes with `threads`, recorded by `recorder`.
    pub fn new(threads: &'a Threads, recorder: Recorder, devices: Devices<'a>) -> Ops<'a> {
        Ops {
            threads,
            recorder,
            observer: None,
            devices,
            positions: Vec::new(),
            first_position: 0,
            not_finite: None,
            fault: None,
            quantized: Quantized::default(),
            work: Worklist::default(),
            angles: Angles::default(),
            order: Vec::new(),
            groups: Vec::new(),
            sums: Vec::new(),
        }
    }

    /// Where layer `il` is computed; `n_layer` stands for the output.
    pub fn at(&self, il: usize) -> At {
        At {
            il,
            device: self.devices.layer(il),
        }
    }

    /// Notes the first row of `x` that has a value which is not finite. On a GPU nobody looks: such a value goes on
    /// into all that follows, and shows in the logits.
    pub fn check_finite(&mut self, x: &Activation) {
        if self.not_finite.is_some() || x.values.home() != DeviceId::Cpu {
            return;
        }
        let rows = x.data().chunks_exact(x.width).zip(&self.positions);
        let bad = rows
            .into_iter()
            .find(|(row, _)| row.iter().any(|v| !v.is_finite()));
        self.not_finite = bad.map(|(_, &position)| (x.name, position));
    }

    /// `dst = weights · src` for every row.
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

    /// The product of a matrix, then its bias if it has one, each under its own name.
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
        dst.shape(name, weights.n_out, src.rows);
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
        self.record(&mut scope, number::MUL_MAT, name, &sources);
        if let Some(bias) = product.bias {
            self.bias(scope, biased, bias, dst);
        }
    }
}

/// A matrix and the bias of its result.
struct Product<'a, 'g> {
    weights: &'a Matrix<'g>,
    bias: Option<&'a Vector>,
}
