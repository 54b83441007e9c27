//! A GPU as a device of a session: passes, times and transfers.

use std::rc::Rc;
use std::time::Instant;

use moe_trace::manifest;

use super::post_fetch::{self, Sample, Settings};
use super::{Download, Event, Fallbacks, Gpu, Never, Result, Wanted};
use crate::device_id::DeviceId;
use crate::placement::Placement;
use crate::recorder::Routing;
use crate::weights::Matrix;

/// Has no values.
pub struct Device {
    pub(super) never: Never,
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
    pub(crate) fn begin_pass(&mut self, _: usize, _: bool) -> Result<()> {
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

    pub(crate) fn copy_recorded(&mut self) -> Result<()> {
        match self.never {}
    }

    pub(crate) fn runs_untimed(&mut self) {
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
