//! The weights of a norm. [`Ops::norm`](crate::ops::Ops::norm) computes it.

use crate::error::Result;
use crate::hparams::{HParams, NormKind};
use crate::weights::{Loader, Vector};

/// A norm over groups of `weight.n` elements.
pub struct Norm {
    /// How it scales the elements.
    pub kind: NormKind,
    /// Added to the mean of the squares, or to the variance.
    pub eps: f32,
    /// Factors `(n)`.
    pub weight: Vector,
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
            weight: loader.vector(&format!("{part}.weight"), n)?,
            bias: bias.transpose()?,
        })
    }

    /// Operations of the norm. Each writes one record per pass.
    pub(crate) fn ops(&self) -> usize {
        2 + usize::from(self.bias.is_some())
    }
}
