//! Operations.

use moe_gguf::GgmlType;

use super::{Device, Never, Ptr, Result};
use crate::activation::Activation;
use crate::cpu::attention::Shape;
use crate::cpu::glu::Glu;
use crate::cpu::heads::Part;
use crate::cpu::map::Map;
use crate::hot_cache::Projections;
use crate::hparams::Rope;
use crate::kv_cache::{Batch, CacheTensor, KvLayer};
use crate::mirrored::Mirrored;
use crate::norm::Norm;
use crate::ops::{ExpertScales, Join, RouterSpec};
use crate::recorder::Routing;
use crate::weights::{Linear, Matrix, Vector};

/// Rows of activations on a GPU; has no values.
#[derive(Clone, Copy)]
pub(crate) struct HotInput(Never);

/// A call of a lane of the hot cache.
pub(crate) struct HotCall<'a, 'g> {
    pub lane: usize,
    pub linears: Projections<'a, 'g>,
    pub glu: Glu,
    pub weights_first: bool,
    pub input: HotInput,
    pub tokens: usize,
    pub k: usize,
    pub entries: Entries<'a>,
}

/// Slots and router weights of a call.
#[derive(Clone, Copy)]
pub(crate) enum Entries<'a> {
    Staged(&'a [u32]),
    OnGpu { slots: Ptr, router: Ptr },
}

impl Device {
    pub(crate) fn supports(_: GgmlType) -> bool {
        false
    }

    pub(crate) fn supports_router(_: usize) -> bool {
        false
    }

    pub(crate) fn follow_launches(&mut self) {
        match self.never {}
    }

    pub(crate) fn mul_mat(
        &mut self,
        _: &Matrix,
        _: Option<&Vector>,
        _: &mut Activation,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn get_rows(
        &mut self,
        _: &mut Activation,
        _: &[u32],
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn rms_norm(
        &mut self,
        _: &mut Activation,
        _: &Vector,
        _: f32,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn quantize_row(&mut self, _: &mut Activation) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn scale_rows_by_sigmoid(
        &mut self,
        _: &mut Activation,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn add(
        &mut self,
        _: &mut Activation,
        _: &mut Activation,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn glu(&mut self, _: Glu, _: &mut Activation, _: &mut Activation) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn group_norm(
        &mut self,
        _: &mut Activation,
        _: &Norm,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn map(&mut self, _: Map, _: &mut Activation) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn multiply(&mut self, _: &Vector, _: &mut Activation) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn multiply_rows(
        &mut self,
        _: &mut Mirrored<f32>,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn copy_columns(
        &mut self,
        _: &mut Activation,
        _: usize,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn put_row(&mut self, _: &mut Activation, _: usize, _: &[f32]) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn rope(
        &mut self,
        _: &Rope,
        _: &mut Mirrored<f32>,
        _: usize,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn store_rows(
        &mut self,
        _: &mut Activation,
        _: Batch,
        _: &mut CacheTensor,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn attention(
        &mut self,
        _: &Shape,
        _: Option<&Vector>,
        _: Batch,
        _: &mut Activation,
        _: &mut KvLayer,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn head_products(
        &mut self,
        _: &Matrix,
        _: &mut Activation,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn absorbed_queries(
        &mut self,
        _: &Matrix,
        _: Option<(&Rope, &mut Mirrored<f32>)>,
        _: (&mut Activation, Part),
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn rope_ends(
        &mut self,
        _: &Rope,
        _: &mut Mirrored<f32>,
        _: usize,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn join_heads(
        &mut self,
        _: Option<(&Rope, &mut Mirrored<f32>)>,
        _: &mut Join,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn copy_of_heads(
        &mut self,
        _: Option<(&Rope, &mut Mirrored<f32>)>,
        _: (&mut Activation, Part),
        _: usize,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn route(
        &mut self,
        _: &RouterSpec,
        _: &mut Activation,
        _: &mut Routing,
        _: bool,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn experts_gate_up(
        &mut self,
        _: [&Linear; 2],
        _: Glu,
        _: &mut Activation,
        _: &mut Routing,
        _: usize,
        _: [&mut Activation; 2],
    ) -> Result<Option<Ptr>> {
        match self.never {}
    }

    pub(crate) fn experts_down(
        &mut self,
        _: &Linear,
        _: Ptr,
        _: &mut Routing,
        _: &mut Activation,
        _: &mut Activation,
    ) -> Result<bool> {
        match self.never {}
    }

    pub(crate) fn mul_mat_id(
        &mut self,
        _: &Linear,
        _: &mut Activation,
        _: &mut Routing,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn mul_mat_fetched(
        &mut self,
        _: &Linear,
        _: &mut Activation,
        _: &mut Routing,
        _: &mut Activation,
    ) -> Result<Vec<bool>> {
        match self.never {}
    }

    pub(crate) fn scale_experts(
        &mut self,
        _: &ExpertScales,
        _: &mut Routing,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn hot_input(&mut self, _: &mut Activation) -> Result<HotInput> {
        match self.never {}
    }

    pub(crate) fn hot_lane(&mut self, _: &HotCall, _: &mut Activation) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn add_to(&mut self, _: &mut Activation, _: &mut Activation) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn weigh_inputs(
        &mut self,
        _: &mut Activation,
        _: &mut Routing,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn merge(
        &mut self,
        _: &mut Activation,
        _: &mut Routing,
        _: bool,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }
}
