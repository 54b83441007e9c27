//! Experts of the hot cache and slots of the dynamic cache.

use moe_gguf::{ExpertId, LayerId};

use super::{Device, Ptr, Result};
use crate::hot_cache::Projections;
use crate::recorder::Routing;
use crate::weights::Matrix;

/// What a search for slots has found.
pub(crate) struct Found {
    pub missing: u32,
    pub ids: Vec<i32>,
}

impl Device {
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
}
