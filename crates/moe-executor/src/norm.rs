//! The weights of a norm. [`Ops::norm`](crate::ops::Ops::norm) computes it.

use crate::error::Result;
use crate::hparams::{HParams, NormKind};
use crate::weights::{Loader, Vector};

/// A norm over groups of `n` elements.
pub struct Norm {
    /// How it scales the elements.
    pub kind: NormKind,
    /// Added to the mean of the squares, or to the variance.
    pub eps: f32,
    /// Elements of a group.
    pub n: usize,
    /// Factors `(n)`, or `(n_group, n)` for the groups of a row; `None` for a norm without weights.
    pub weight: Option<Vector>,
    /// Added after the multiplication `(n)`.
    pub bias: Option<Vector>,
}

impl Norm {
    /// Loads `part.weight`, and `part.bias` if `biased`.
    pub(crate) fn load(
        loader: &Loader,
        hp: &HParams,
        part: &str,
        n: usize,
        biased: bool,
    ) -> Result<Norm> {
        let bias = biased.then(|| loader.vector(&format!("{part}.bias"), n));
        Ok(Norm {
            kind: hp.norm,
            eps: hp.norm_eps,
            n,
            weight: Some(loader.vector(&format!("{part}.weight"), n)?),
            bias: bias.transpose()?,
        })
    }

    /// A norm over groups of `n` elements without weights.
    pub(crate) fn plain(hp: &HParams, n: usize) -> Norm {
        Norm {
            kind: hp.norm,
            eps: hp.norm_eps,
            n,
            weight: None,
            bias: None,
        }
    }

    /// Operations of the norm. Each writes one record per pass.
    pub(crate) fn ops(&self) -> usize {
        1 + usize::from(self.weight.is_some()) + usize::from(self.bias.is_some())
    }
}
