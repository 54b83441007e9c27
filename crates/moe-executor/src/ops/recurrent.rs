//! Operations of recurrent layers: the causal convolution and the gated delta rule. They read and update the states of the cache, on the
//! device of the layer.

use moe_trace::LayerId;

use crate::activation::{Activation, NodeName};
use crate::cpu::convolution;
use crate::cpu::delta_net::{self, Heads, Tokens};
use crate::kv_cache::{KvCache, LayerState, Run};
use crate::ops::{Ops, number};
use crate::recorder::Source;
use crate::weights::Vector;

/// A causal convolution, and the operations after it that its GPU kernel computes.
pub(crate) struct Convolution<'a> {
    /// Name of the convolution.
    pub name: NodeName,
    /// Kernel of each channel `(n, channels)`, the oldest input first.
    pub kernel: &'a Vector,
    /// Added to the result `(channels)`, and the name of the sum.
    pub bias: Option<(&'a Vector, NodeName)>,
    /// Name of the product with its sigmoid, if the result is multiplied by it.
    pub silu: Option<NodeName>,
}

impl Ops<'_> {
    /// Convolves each channel of `x (token, channels)` over the tokens of its sequence; `dst (token, channels)`. Updates the convolution
    /// states of the layer.
    pub fn convolve(
        &mut self,
        il: LayerId,
        it: &Convolution,
        x: &mut Activation,
        cache: &mut KvCache,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        let width = x.width;
        dst.shape(it.name, width, x.rows);
        let device = self.at(il).device;
        let (runs, state) = cache.state_mut(il);
        let done = self.on(&mut scope, device, |gpu| {
            gpu.convolve(it, x, (runs, &mut *state), dst)
        });
        if !done {
            self.fetch(&mut x.values);
            self.fetch(&mut state.convolution);
            for run in runs {
                let elements = run.tokens.start * width..run.tokens.end * width;
                convolution::convolve(
                    self.threads,
                    width,
                    &it.kernel.data,
                    state.convolution_of(run.sequence),
                    &x.data()[elements.clone()],
                    &mut dst.data_mut()[elements],
                );
            }
        }
        let states = convolution_states(il, state, runs);
        let sources = [(&*x).into(), it.kernel.into(), states];
        self.record(&mut scope, number::SSM_CONV, it.name, &sources);
        if !done {
            if let Some((bias, name)) = it.bias {
                self.add_bias(name, bias, dst);
            }
            if let Some(name) = it.silu {
                self.silu(name, dst);
            }
            return;
        }
        if let Some((bias, name)) = it.bias {
            let before = Source::from(&*dst);
            dst.name = name;
            self.record(&mut scope, number::ADD, name, &[before, bias.into()]);
        }
        if let Some(name) = it.silu {
            let before = Source::from(&*dst);
            dst.name = name;
            self.record(&mut scope, number::UNARY, name, &[before]);
        }
    }

    /// The logarithm of the decay of each head, in place: `x = softplus(x + bias) · factors`; `bias` and `factors` have one element
    /// for each column of `x`.
    pub fn decay(&mut self, name: NodeName, bias: &Vector, factors: &Vector, x: &mut Activation) {
        let mut scope = self.start();
        let before = Source::from(&*x);
        let device = x.values.home();
        let done = self.on(&mut scope, device, |gpu| gpu.decay(bias, factors, x));
        if !done {
            self.fetch(&mut x.values);
            let width = x.width.max(1);
            self.threads.rows(x.data_mut(), width, |_, row| {
                let constants = bias.data.iter().zip(&factors.data);
                for (x, (bias, factor)) in row.iter_mut().zip(constants) {
                    *x = softplus(*x + bias) * factor;
                }
            });
        }
        x.name = name;
        let sources = [before, bias.into(), factors.into()];
        self.record(&mut scope, number::MUL, name, &sources);
    }

    /// The gated delta rule for the tokens of each sequence: normalizes queries and keys of `qkv`, updates the states of the layer, and
    /// stores the values that the queries read in `dst (token, n_v · width)`. `decay` is `(token, n_v)`, or `(token, n_v · width)` with a
    /// decay for each element of a key; `beta` is `(token, n_v)`.
    pub fn delta_net(
        &mut self,
        il: LayerId,
        name: NodeName,
        (heads, eps): (Heads, f32),
        [qkv, decay, beta]: [&mut Activation; 3],
        cache: &mut KvCache,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        dst.shape(name, heads.v_width(), qkv.rows);
        let device = self.at(il).device;
        let (runs, state) = cache.state_mut(il);
        let done = self.on(&mut scope, device, |gpu| {
            let inputs = [&mut *qkv, &mut *decay, &mut *beta];
            gpu.delta_net((heads, eps), inputs, (runs, &mut *state), dst)
        });
        if !done {
            for x in [&mut *qkv, &mut *decay, &mut *beta] {
                self.fetch(&mut x.values);
            }
            delta_net::normalize(self.threads, heads, eps, qkv.data_mut());
            self.fetch(&mut state.state);
            for run in runs {
                let of = |width: usize| run.tokens.start * width..run.tokens.end * width;
                let tokens = Tokens {
                    qkv: &qkv.data()[of(heads.qkv_width())],
                    decay: &decay.data()[of(decay.width)],
                    beta: &beta.data()[of(heads.n_v)],
                };
                let out = &mut dst.data_mut()[of(heads.v_width())];
                let state = state.state_of(run.sequence);
                delta_net::delta_net(self.threads, heads, tokens, state, out);
            }
        }
        let sources = [
            (&*qkv).into(),
            (&*decay).into(),
            (&*beta).into(),
            recurrent_states(il, state, runs),
        ];
        self.record(&mut scope, number::GATED_DELTA_NET, name, &sources);
    }
}

/// `ln(1 + exp(x))`, computed like in ggml.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { (1.0 + x.exp()).ln() }
}

/// The convolution states of the sequences of a pass as a source.
pub(super) fn convolution_states<'a>(il: LayerId, state: &LayerState, runs: &[Run]) -> Source<'a> {
    let (address, n) = (state.convolution.address(), state.shape().convolution());
    states((il, 0), "cache_r_l", address, [n, runs.len()])
}

/// The states that the tokens of a pass update as a source.
pub(super) fn recurrent_states<'a>(il: LayerId, state: &LayerState, runs: &[Run]) -> Source<'a> {
    let (address, n) = (state.state.address(), state.shape().state);
    states((il, 1), "cache_s_l", address, [n, runs.len()])
}

fn states<'a>(
    (il, half): (LayerId, usize),
    stem: &'static str,
    address: u64,
    [width, rows]: [usize; 2],
) -> Source<'a> {
    Source::Buffer {
        name: NodeName::cache(stem, il),
        suffix: "",
        buffer_id: KvCache::buffer_id(il, half),
        address,
        size_bytes: (width * rows * size_of::<f32>()) as u64,
        ne: [width as u64, rows as u64],
        dtype: "f32",
    }
}

#[cfg(test)]
mod tests {
    use super::softplus;

    #[test]
    fn softplus_agrees_with_its_formula() {
        for x in [-30.0f32, -3.0, 0.0, 0.5, 19.0, 21.0, 80.0] {
            let expected = f64::from(x).exp().ln_1p();
            assert!((f64::from(softplus(x)) - expected).abs() < 1e-5, "{x}");
        }
    }
}
