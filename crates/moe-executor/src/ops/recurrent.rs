//! Operations of recurrent layers: the causal convolution and the gated delta rule. They read and update the states of the cache. No
//! GPU has kernels for them.

use moe_trace::LayerId;

use crate::activation::{Activation, NodeName};
use crate::cpu::convolution;
use crate::cpu::delta_net::{self, Heads, Tokens};
use crate::kv_cache::{KvCache, LayerState, Run};
use crate::ops::{Ops, number};
use crate::recorder::Source;
use crate::weights::Vector;

impl Ops<'_> {
    /// Convolves each channel of `x (token, channels)` over the tokens of its sequence with `kernel (n, channels)`, whose oldest input
    /// is first; `dst (token, channels)`. Updates the convolution states of the layer.
    pub fn convolve(
        &mut self,
        il: LayerId,
        name: NodeName,
        kernel: &Vector,
        x: &mut Activation,
        cache: &mut KvCache,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        self.fetch(&mut x.values);
        let width = x.width;
        dst.shape(name, width, x.rows);
        let (runs, state) = cache.state_mut(il);
        self.fetch(&mut state.convolution);
        for run in runs {
            let elements = run.tokens.start * width..run.tokens.end * width;
            let (past, _) = state.of(run.sequence);
            convolution::convolve(
                self.threads,
                width,
                &kernel.data,
                past,
                &x.data()[elements.clone()],
                &mut dst.data_mut()[elements],
            );
        }
        let states = convolution_states(il, state, runs);
        let sources = [(&*x).into(), kernel.into(), states];
        self.record(&mut scope, number::SSM_CONV, name, &sources);
    }

    /// The logarithm of the decay of each head, in place: `x = softplus(x + bias) · factors`; `bias` and `factors` have one element
    /// for each column of `x`.
    pub fn decay(&mut self, name: NodeName, bias: &Vector, factors: &Vector, x: &mut Activation) {
        let mut scope = self.start();
        self.fetch(&mut x.values);
        let before = Source::from(&*x);
        let width = x.width.max(1);
        self.threads.rows(x.data_mut(), width, |_, row| {
            let constants = bias.data.iter().zip(&factors.data);
            for (x, (bias, factor)) in row.iter_mut().zip(constants) {
                *x = softplus(*x + bias) * factor;
            }
        });
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
        for x in [&mut *qkv, &mut *decay, &mut *beta] {
            self.fetch(&mut x.values);
        }
        dst.shape(name, heads.v_width(), qkv.rows);
        delta_net::normalize(self.threads, heads, eps, qkv.data_mut());
        let (runs, state) = cache.state_mut(il);
        self.fetch(&mut state.state);
        for run in runs {
            let of = |width: usize| run.tokens.start * width..run.tokens.end * width;
            let tokens = Tokens {
                qkv: &qkv.data()[of(heads.qkv_width())],
                decay: &decay.data()[of(decay.width)],
                beta: &beta.data()[of(heads.n_v)],
            };
            let (_, state) = state.of(run.sequence);
            let out = &mut dst.data_mut()[of(heads.v_width())];
            delta_net::delta_net(self.threads, heads, tokens, state, out);
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
