//! The recurrent states of several sequences.
//!
//! A layer has two states of a sequence: the last inputs of a convolution, and the state that each token updates. Both are F32 and
//! have a constant size. The operations of a layer read and update them in place, in the order of the tokens, on the device of the layer.

use std::collections::TryReserveError;

use crate::cuda;
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

    /// The convolution state of a sequence in CPU memory `(n_past, channels)`, mutable. It must be there.
    pub fn convolution_of(&mut self, sequence: usize) -> &mut [f32] {
        let n = self.shape.convolution();
        &mut self.convolution.host_mut()[sequence * n..][..n]
    }

    /// The state of a sequence in CPU memory, mutable. It must be there.
    pub fn state_of(&mut self, sequence: usize) -> &mut [f32] {
        let n = self.shape.state;
        &mut self.state.host_mut()[sequence * n..][..n]
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
    ///
    /// # Errors
    /// Like [`Mirrored::clear`].
    pub(super) fn clear(&mut self, sequence: usize) -> cuda::Result<()> {
        let sizes = [self.shape.convolution(), self.shape.state];
        let states = [&mut self.convolution, &mut self.state];
        for (values, n) in states.into_iter().zip(sizes).filter(|(_, n)| *n > 0) {
            values.clear(sequence * n..(sequence + 1) * n)?;
        }
        Ok(())
    }
}
