//! Replaces [`crate::cuda`] in builds without the feature `cuda`. It has the same items for the rest of the crate, but the types
//! for a GPU have no values. So the rest of the crate is the same in both builds, and its GPU branches are unreachable.
#![allow(
    missing_docs,
    reason = "the items are documented in the modules that this file replaces"
)]

mod handles;
mod policy;

use std::marker::PhantomData;
use std::rc::Rc;
use std::time::Instant;

use moe_gguf::{ExpertId, GgmlType, LayerId};
use moe_trace::manifest;
use zerocopy::{Immutable, IntoBytes};

use crate::activation::Activation;
use crate::cpu::attention::Shape;
use crate::cpu::glu::Glu;
use crate::hot_cache::Projections;
use crate::hparams::Rope;
use crate::kv_cache::{Batch, CacheTensor, KvLayer};
use crate::mirrored::Mirrored;
use crate::ops::RouterSpec;
use crate::placement::{DeviceId, Placement};
use crate::recorder::Routing;
use crate::weights::{Linear, Matrix, Vector};

pub(crate) use handles::{Event, Ptr, Wanted};
pub use policy::{Fallbacks, GpuInfo, GpuSpec, Policy};
use post_fetch::{Sample, Settings};

/// Post-Fetch, which needs a GPU.
pub mod post_fetch {
    mod settings;
    mod transfer;

    pub use settings::{InjectedFault, Settings};
    pub use transfer::{Observer, Reason, Sample, State, Transfer};
}

/// Why no GPU can be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error(
        "this program was built without support for NVIDIA GPUs: build it with the feature `cuda`"
    )]
    NotBuilt,
}

impl Error {
    pub fn is_out_of_memory(&self) -> bool {
        false
    }
}

pub type Result<T> = std::result::Result<T, Error>;

/// A type without values.
#[derive(Clone, Copy)]
enum Never {}

/// Has no values. The field is private so that the compiler does not warn of unreachable code in the rest of the crate.
pub struct Gpu(Never);

impl Gpu {
    pub fn detect() -> Result<()> {
        Err(Error::NotBuilt)
    }

    pub fn open_all(_: &[GpuSpec]) -> Result<Vec<Gpu>> {
        Err(Error::NotBuilt)
    }

    pub fn index(&self) -> usize {
        match self.0 {}
    }

    pub fn info(&self) -> &GpuInfo {
        match self.0 {}
    }

    pub fn memory(&self) -> (u64, u64, u64) {
        match self.0 {}
    }

    pub fn bandwidth(&self, _: usize) -> Result<f64> {
        match self.0 {}
    }

    pub fn waits(&self) -> u64 {
        match self.0 {}
    }

    pub(crate) fn alloc(&self, _: usize) -> Result<DeviceBuffer> {
        match self.0 {}
    }

    pub(crate) fn quantized_row(&self, _: usize, _: Option<DeviceBuffer>) -> Option<DeviceBuffer> {
        match self.0 {}
    }

    pub(crate) fn upload<T: IntoBytes + Immutable + ?Sized>(&self, _: Ptr, _: &T) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn receive(&self, _: &DeviceBuffer, _: &DeviceBuffer, _: usize) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn follow(&self, _: &Gpu) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn register<'m>(&self, _: &'m [u8]) -> Result<Registered<'m>> {
        match self.0 {}
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        match self.0 {}
    }
}

/// Has no values.
pub struct Registered<'m> {
    _never: Never,
    _mapped: PhantomData<&'m [u8]>,
}

/// Has no values.
pub struct DeviceBuffer(Never);

impl DeviceBuffer {
    pub fn ptr(&self) -> Ptr {
        match self.0 {}
    }

    pub fn size_bytes(&self) -> usize {
        match self.0 {}
    }

    pub fn download(&self, _: &mut [u8]) -> Result<()> {
        match self.0 {}
    }

    pub fn grown(&self, _: usize, _: usize) -> Result<DeviceBuffer> {
        match self.0 {}
    }
}

/// A copy that is never started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Download;

impl Download {
    pub fn gpu(&self) -> usize {
        0
    }
}

/// Rows of activations on a GPU; has no values.
#[derive(Clone, Copy)]
pub(crate) struct HotInput(Never);

/// A call of a lane of the hot cache.
pub(crate) struct HotCall<'a, 'g> {
    pub lane: usize,
    pub linears: Projections<'a, 'g>,
    pub glu: Glu,
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

/// What a search for slots has found.
pub(crate) struct Found {
    pub missing: u32,
    pub ids: Vec<i32>,
}

/// Has no values.
pub struct Device {
    never: Never,
    pub fallbacks: Fallbacks,
}

impl Device {
    pub(crate) fn new(gpu: Gpu, _: Rc<Placement>) -> Device {
        match gpu.0 {}
    }

    pub fn id(&self) -> DeviceId {
        match self.never {}
    }

    pub fn gpu(&self) -> &Gpu {
        match self.never {}
    }

    pub(crate) fn enable_post_fetch(&mut self, _: Settings) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn files_are_registered(&mut self) {
        match self.never {}
    }

    pub fn observe_transfers(&mut self, _: post_fetch::Observer) {
        match self.never {}
    }

    pub fn post_fetch_settings(&self) -> Option<&Settings> {
        match self.never {}
    }

    pub fn scratchpad_bytes(&self) -> usize {
        match self.never {}
    }

    pub(crate) fn describe(&self, _: Option<usize>) -> manifest::Gpu {
        match self.never {}
    }

    pub fn bandwidth(&self) -> Result<f64> {
        match self.never {}
    }
}

/// Passes, times and transfers.
impl Device {
    pub(crate) fn begin_pass(&mut self) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn end_pass(&mut self) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn find_times(_: &[Device]) {}

    pub(crate) fn record_event(&mut self) -> Result<Event> {
        match self.never {}
    }

    pub(crate) fn start_event(&mut self) -> Result<Event> {
        match self.never {}
    }

    pub(crate) fn end_events(&mut self, _: Event) -> Result<(Event, Event)> {
        match self.never {}
    }

    pub(crate) fn time(&self, _: Event) -> Result<Instant> {
        match self.never {}
    }

    pub(crate) fn others_ran(&mut self) {
        match self.never {}
    }

    pub(crate) fn waited(&mut self) {
        match self.never {}
    }

    pub(crate) fn fetch_together(&mut self, _: &mut [Wanted]) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn begin_download(&mut self, _: &mut Routing) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn begin_id_download(&mut self, _: &mut Routing) -> Result<Download> {
        match self.never {}
    }

    pub(crate) fn downloaded(&self, _: &Download) -> Result<(&[i32], &[f32])> {
        match self.never {}
    }

    pub(crate) fn holds(&mut self, _: &Matrix) -> bool {
        match self.never {}
    }

    pub(crate) fn insert_hot(&mut self, _: usize, _: Projections, _: &[ExpertId]) -> Result<u64> {
        match self.never {}
    }

    pub(crate) fn replace_hot(
        &mut self,
        _: usize,
        _: Projections,
        _: usize,
        _: ExpertId,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn insert_slots(&mut self, _: usize, _: &[Projections], _: usize) -> Result<u64> {
        match self.never {}
    }

    pub(crate) fn enable_finder(&mut self, _: usize, _: usize, _: usize) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn find_slots(
        &mut self,
        _: LayerId,
        _: u32,
        _: usize,
        _: &mut Routing,
    ) -> Result<Ptr> {
        match self.never {}
    }

    pub(crate) fn found(&self, _: LayerId, _: u32, _: usize) -> Result<Option<Found>> {
        match self.never {}
    }

    pub(crate) fn answer(&mut self, _: LayerId, _: u32, _: &[u32]) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn release(&self, _: LayerId, _: u32) {
        match self.never {}
    }

    pub(crate) fn load_slot_ahead(
        &mut self,
        _: (usize, u32),
        _: Projections,
        _: ExpertId,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn load_slot(&mut self, _: (usize, u32), _: Projections, _: ExpertId) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn prefetch_slot(
        &mut self,
        _: (usize, u32),
        _: Projections,
        _: ExpertId,
    ) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn wait_for_slot(&mut self, _: (usize, u32)) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn slot_is_complete(&self, _: (usize, u32)) -> bool {
        match self.never {}
    }

    pub(crate) fn free_slot(&mut self, _: Projections, _: ExpertId) {
        match self.never {}
    }

    pub(crate) fn clear_hot(&mut self) {
        match self.never {}
    }

    pub(crate) fn has_all_hot(&self, _: &Matrix) -> bool {
        match self.never {}
    }

    pub(crate) fn is_hot(&self, _: &Matrix, _: i32) -> bool {
        match self.never {}
    }

    pub(crate) fn begin_post_fetch(&mut self, _: usize, _: &Matrix, _: &[i32], _: usize) -> bool {
        match self.never {}
    }

    pub(crate) fn start_transfers(&mut self) {
        match self.never {}
    }

    pub(crate) fn post_fetch_window(&mut self, _: Instant, _: Instant) {
        match self.never {}
    }

    pub(crate) fn transfers_failed(&self) -> bool {
        match self.never {}
    }

    pub(crate) fn samples(&mut self) -> Result<Vec<Sample>> {
        match self.never {}
    }
}

/// Operations.
impl Device {
    pub(crate) fn supports(_: GgmlType) -> bool {
        false
    }

    pub(crate) fn supports_router(_: &RouterSpec, _: usize) -> bool {
        false
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

    pub(crate) fn route(
        &mut self,
        _: &RouterSpec,
        _: &mut Activation,
        _: &mut Routing,
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
        _: &mut Activation,
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

    pub(crate) fn hot_input(&mut self, _: &mut Activation) -> Result<HotInput> {
        match self.never {}
    }

    pub(crate) fn hot_lane(&mut self, _: &HotCall, _: &mut Activation) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn add_to(&mut self, _: &mut Activation, _: &mut Activation) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn merge(
        &mut self,
        _: &mut Activation,
        _: &mut Routing,
        _: &mut Activation,
    ) -> Result<()> {
        match self.never {}
    }
}
