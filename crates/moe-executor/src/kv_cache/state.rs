//! The recurrent states of several sequences.
//!
//! A layer has two states of a sequence: the last inputs of a convolution, and the state that each token updates. Both are F32 and
//! have a constant size. The operations of a layer read and update them in place, in the order of the tokens.

use std::collections::TryReserveError;

use crate::hparams::StateShape;
use crate::mirrored::Mirrored;

/// The recurrent states of one layer. Row `sequence` is that of a sequence.
pub(crate) struct LayerState {
    shape: StateShape,
    /// Last inputs of the convolution, oldest first `(sequence, n_past, channels)`.
    pub convolution: Mirrored<f32>,
    /// State `(sequence, state)`, whose layout the operation of the layer defines.
    pub state: Mirrored<f32>,
}

impl LayerState {
    /// A state without memory.
    pub fn new(shape: StateShape) -> LayerState {
        LayerState {
            shape,
            convolution: Mirrored::default(),
            state: Mirrored::default(),
        }
    }

    /// Sizes of the state of a sequence.
    pub fn shape(&self) -> StateShape {
        self.shape
    }

    /// The convolution state `(n_past, channels)` and the state of a sequence, mutable.
    pub fn of(&mut self, sequence: usize) -> (&mut [f32], &mut [f32]) {
        let (n_convolution, n_state) = (self.shape.convolution(), self.shape.state);
        (
            &mut self.convolution.host_mut()[sequence * n_convolution..][..n_convolution],
            &mut self.state.host_mut()[sequence * n_state..][..n_state],
        )
    }

    /// Reserves memory for the states of `n_seq` sequences, so that [`LayerState::allocate`] does not fail.
    ///
    /// # Errors
    /// The memory cannot be allocated.
    pub(super) fn try_reserve(&mut self, n_seq: usize) -> Result<(), TryReserveError> {
        let [convolution, state] = self.sizes(n_seq);
        self.convolution.try_reserve(convolution)?;
        self.state.try_reserve(state)
    }

    /// Allocates the states of `n_seq` sequences.
    pub(super) fn allocate(&mut self, n_seq: usize) {
        let [convolution, state] = self.sizes(n_seq);
        self.convolution.resize(convolution);
        self.state.resize(state);
    }

    fn sizes(&self, n_seq: usize) -> [usize; 2] {
        let sizes = [self.shape.convolution(), self.shape.state];
        sizes.map(|n| n.saturating_mul(n_seq))
    }

    /// Sets the states of a sequence to 0.
    pub(super) fn clear(&mut self, sequence: usize) {
        let (convolution, state) = self.of(sequence);
        convolution.fill(0.0);
        state.fill(0.0);
    }
}
