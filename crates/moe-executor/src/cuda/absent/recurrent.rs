//! Operations of recurrent layers, and the activation of experts without a gate.

use std::ops::Range;

use super::{Device, Result};
use crate::activation::Activation;
use crate::cpu::delta_net::Heads;
use crate::cpu::state_space::SsmHeads;
use crate::kv_cache::{LayerState, Run};
use crate::ops::Convolution;
use crate::weights::Vector;

impl Device {
    pub(crate) fn convolve(
        &mut self,
        _: &Convolution,
        _: &mut Activation,
        _: (&[Run], &mut LayerState),
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn convolve_qkv(
        &mut self,
        _: &[Vector; 3],
        _: [&mut Activation; 3],
        _: (&[Run], &mut LayerState),
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn delta_net(
        &mut self,
        _: (Heads, f32),
        _: [&mut Activation; 3],
        _: (&[Run], &mut LayerState),
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn ssm_scan(
        &mut self,
        _: SsmHeads,
        _: &Vector,
        _: [&mut Activation; 2],
        _: (&[Run], &mut LayerState),
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn decay(&mut self, _: &Vector, _: &Vector, _: &mut Activation) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn add_scaled_heads(
        &mut self,
        _: SsmHeads,
        _: &Vector,
        _: [&mut Activation; 3],
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn add_bias(&mut self, _: &Vector, _: &mut Activation) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn multiply_columns(
        &mut self,
        _: [usize; 2],
        _: &mut Activation,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn multiply_by_columns(
        &mut self,
        _: usize,
        _: &mut Activation,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn copy_groups(
        &mut self,
        _: usize,
        _: &[Range<usize>],
        _: &mut Activation,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn squared_relu(&mut self, _: &mut Activation) -> Result<()> {
        match self.never {}
    }
}
