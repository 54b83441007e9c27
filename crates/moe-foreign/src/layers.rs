//! Layer numbering: maps the rows of a server's array to the blocks of the model.
//!
//! vLLM and SGLang number the hidden layers of a model. GGUF also counts the blocks of the multi-token prediction (MTP) head, which
//! follow the hidden layers: `block_count` includes `nextn_predict_layers`. A server writes one of two layouts: one row per
//! hidden layer, where the rows of dense layers are empty, or one row per MoE layer. Neither has rows for blocks of the MTP head.

use moe_files::text::counted;
use moe_trace::{LayerId, MAX_ID, ModelInfo};

/// Why the layers of a trace cannot be mapped to the blocks of the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The number of rows is neither that of the hidden layers nor that of the MoE layers.
    #[error(
        "the array has {n_rows} layers, but the model has {n_hidden} hidden layers, {n_moe} of them with experts{}; the trace is of \
         another model",
        and_mtp(*n_nextn)
    )]
    Rows {
        /// Rows of the array.
        n_rows: usize,
        /// Hidden layers of the model.
        n_hidden: u32,
        /// Hidden layers with experts.
        n_moe: usize,
        /// Blocks of the MTP head.
        n_nextn: u32,
    },
    /// A layer that is dense in the model selects experts.
    #[error(
        "layer {layer} selects experts, but block {layer} of the model is dense; the trace is of another model, or numbers its layers differently"
    )]
    Dense {
        /// Row of the array and block of the model.
        layer: usize,
    },
    /// A token has more experts than the model selects per token.
    #[error(
        "a token has {n_slots} experts, but the model selects {max}; the array is of another model, or contains counts"
    )]
    Slots {
        /// Slots of a token that are in use.
        n_slots: usize,
        /// Most experts that the model selects in any layer.
        max: usize,
    },
    /// The trace has fewer layers than the model.
    #[error(
        "the trace has {n_layers} layers, but the model has {n_moe} with experts; with pipeline parallelism each stage numbers its \
         layers from 0, and the trace does not record the stage; record without pipeline parallelism"
    )]
    Stages {
        /// Layers of the trace.
        n_layers: usize,
        /// Hidden layers of the model with experts.
        n_moe: usize,
    },
    /// The array has more layers than [`MAX_ID`].
    #[error(
        "the array has {n_rows} layers, above the limit of {MAX_ID}; it does not contain routing or counts"
    )]
    TooMany {
        /// Rows of the array.
        n_rows: usize,
    },
}

fn and_mtp(n_nextn: u32) -> String {
    if n_nextn > 0 {
        format!(", and {} in the MTP head", counted(n_nextn, "layer"))
    } else {
        String::new()
    }
}

/// What a row of a server's array contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowUse {
    /// Selected experts, or counts above 0.
    Used,
    /// Only padding.
    Empty,
    /// Expert 0 in the only slot of every token, which may be a selected expert or padding.
    Zero,
}

impl RowUse {
    /// The use of a row, from the expert ids of each token. A negative id is an empty slot. Several slots with 0 are padding,
    /// because a router selects an expert at most once per token.
    pub(crate) fn of_tokens<T: IntoIterator<Item = Option<i64>>>(
        tokens: impl IntoIterator<Item = T>,
    ) -> Self {
        let mut row = Self::Empty;
        for experts in tokens {
            let mut n_zero = 0;
            for expert in experts {
                match expert {
                    Some(..0) => {}
                    Some(0) => n_zero += 1,
                    Some(1..) | None => return Self::Used,
                }
            }
            if n_zero == 1 {
                row = Self::Zero;
            }
        }
        row
    }

    /// The use of a row of counts.
    pub(crate) fn of_counts(counts: &[u64]) -> Self {
        if counts.iter().all(|&count| count == 0) {
            Self::Empty
        } else {
            Self::Used
        }
    }
}

/// The layouts in which a server may write the layers of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layouts {
    /// Number of hidden layers: the rows of the first layout.
    n_hidden: u32,
    /// Hidden layers with experts, ascending: the rows of the second layout. Empty if unknown.
    moe: Vec<LayerId>,
    n_nextn: u32,
}

impl Layouts {
    /// The layouts of `model`; `None` if its layers are unknown.
    pub(crate) fn of(model: Option<&ModelInfo>) -> Option<Self> {
        let model = model?;
        let n_hidden = model.n_hidden_layer();
        let is_hidden = |layer: &LayerId| n_hidden.is_none_or(|n| u32::from(layer.0) < n);
        // ModelInfo from a trace identify MoE layers only by their expert sizes.
        let with_experts: Vec<LayerId> = if model.moe_layers.is_empty() {
            model.expert_bytes.keys().copied().collect()
        } else {
            model.moe_layers.iter().copied().collect()
        };
        let moe: Vec<LayerId> = with_experts.into_iter().filter(is_hidden).collect();
        if n_hidden.is_none() && moe.is_empty() {
            return None;
        }
        Some(Self {
            n_hidden: n_hidden.unwrap_or(0),
            moe,
            n_nextn: model.n_nextn_layer,
        })
    }

    /// The numbers of rows that an array may have: all hidden layers, and the MoE layers if they are fewer.
    pub(crate) fn n_rows(&self) -> impl Iterator<Item = usize> {
        let (all, moe) = (self.n_hidden as usize, self.moe.len());
        [all, moe]
            .into_iter()
            .take(if all == moe { 1 } else { 2 })
            .filter(|&n| n > 0)
    }

    /// Whether every row of a dense layer is empty in an array with one row per hidden layer.
    pub(crate) fn dense_rows_are_empty(&self, row_use: impl Fn(usize) -> RowUse) -> bool {
        self.first_dense_in_use(row_use).is_none()
    }

    /// Number of hidden layers with experts; 0 if unknown.
    pub(crate) fn n_moe(&self) -> usize {
        self.moe.len()
    }

    fn is_dense(&self, row: usize) -> bool {
        !self.moe.is_empty() && self.moe.iter().all(|layer| layer.index() != row)
    }

    fn first_dense_in_use(&self, row_use: impl Fn(usize) -> RowUse) -> Option<usize> {
        let mut rows = 0..self.n_hidden as usize;
        rows.find(|&row| self.is_dense(row) && row_use(row) == RowUse::Used)
    }

    /// The error for an array of `n_rows` rows, which matches neither layout.
    pub(crate) fn mismatch(&self, n_rows: usize) -> LayerError {
        LayerError::Rows {
            n_rows,
            n_hidden: self.n_hidden,
            n_moe: self.moe.len(),
            n_nextn: self.n_nextn,
        }
    }
}

/// The blocks that the rows of an array belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RowBlocks {
    /// Block of each row; `None` for an empty row of a dense layer.
    pub(crate) blocks: Vec<Option<LayerId>>,
    /// Whether the numbering is an assumption. Without the model the two layouts look the same unless a row is empty.
    pub(crate) is_assumed: bool,
}

/// Maps the `n_rows` rows of a server's array to blocks of `model`.
///
/// # Errors
/// [`LayerError`] if the rows match neither layout of the model.
pub(crate) fn blocks_of_rows(
    model: Option<&ModelInfo>,
    n_rows: usize,
    row_use: impl Fn(usize) -> RowUse,
) -> Result<RowBlocks, LayerError> {
    if n_rows > MAX_ID as usize {
        return Err(LayerError::TooMany { n_rows });
    }
    let rows = || (0..n_rows).zip((0..).map(LayerId));
    let Some(layouts) = Layouts::of(model) else {
        let blocks: Vec<_> = rows()
            .map(|(row, block)| Some(block).filter(|_| row_use(row) != RowUse::Empty))
            .collect();
        return Ok(RowBlocks {
            is_assumed: blocks.iter().all(Option::is_some),
            blocks,
        });
    };
    let blocks = if n_rows == layouts.n_hidden as usize {
        if let Some(layer) = layouts.first_dense_in_use(row_use) {
            return Err(LayerError::Dense { layer });
        }
        rows()
            .map(|(row, block)| Some(block).filter(|_| !layouts.is_dense(row)))
            .collect()
    } else if n_rows == layouts.moe.len() {
        layouts.moe.iter().copied().map(Some).collect()
    } else {
        return Err(layouts.mismatch(n_rows));
    };
    Ok(RowBlocks {
        blocks,
        is_assumed: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks 0 and 3 are dense; 1, 2 and 4 have experts; 5 is the MTP head and has experts.
    fn model() -> ModelInfo {
        ModelInfo {
            n_layer: Some(6),
            n_nextn_layer: 1,
            moe_layers: [1, 2, 4, 5].map(LayerId).into(),
            ..ModelInfo::default()
        }
    }

    fn used(is_used: bool) -> RowUse {
        if is_used { RowUse::Used } else { RowUse::Empty }
    }

    fn blocks(n_rows: usize, empty: &[usize]) -> Result<Vec<Option<LayerId>>, LayerError> {
        let rows = blocks_of_rows(Some(&model()), n_rows, |row| used(!empty.contains(&row)))?;
        assert!(!rows.is_assumed);
        Ok(rows.blocks)
    }

    #[test]
    fn maps_one_row_per_hidden_layer_to_the_same_block_number() {
        let expected = [None, Some(1), Some(2), None, Some(4)].map(|block| block.map(LayerId));
        assert_eq!(blocks(5, &[0, 3]).unwrap(), expected);
        // A MoE layer may be empty too.
        assert_eq!(blocks(5, &[0, 1, 3]).unwrap(), expected);
        let error = blocks(5, &[0]).unwrap_err();
        assert_eq!(error, LayerError::Dense { layer: 3 });
    }

    #[test]
    fn maps_one_row_per_moe_layer_around_dense_blocks_and_the_mtp_head() {
        assert_eq!(
            blocks(3, &[]).unwrap(),
            [1, 2, 4].map(|block| Some(LayerId(block)))
        );
    }

    #[test]
    fn several_zeros_of_a_token_are_padding_and_a_single_zero_is_ambiguous() {
        let row = |tokens: &[&[i64]]| {
            let tokens = tokens
                .iter()
                .map(|experts| experts.iter().map(|&expert| Some(expert)));
            RowUse::of_tokens(tokens)
        };
        assert_eq!(row(&[]), RowUse::Empty);
        assert_eq!(row(&[&[0, 0], &[-1, -1], &[0, 0, -1]]), RowUse::Empty);
        assert_eq!(row(&[&[0, 0], &[0, 3]]), RowUse::Used);
        assert_eq!(row(&[&[0], &[0]]), RowUse::Zero);
        assert_eq!(row(&[&[0, -1], &[0, 0]]), RowUse::Zero);
        assert_eq!(RowUse::of_tokens([[None]]), RowUse::Used);
        // In a dense layer a single zero is padding.
        let model = model();
        let zero = |row: usize| {
            if row == 0 || row == 3 {
                RowUse::Zero
            } else {
                RowUse::Used
            }
        };
        let rows = blocks_of_rows(Some(&model), 5, zero).unwrap();
        assert_eq!(
            rows.blocks,
            [
                None,
                Some(LayerId(1)),
                Some(LayerId(2)),
                None,
                Some(LayerId(4))
            ]
        );
        let rows = blocks_of_rows(None, 2, |_| RowUse::Zero).unwrap();
        assert_eq!(rows.blocks, [Some(LayerId(0)), Some(LayerId(1))]);
    }

    #[test]
    fn rejects_a_row_count_that_matches_neither_layout() {
        for n_rows in [0, 1, 2, 4, 6, 7] {
            let error = blocks(n_rows, &[0, 3]).unwrap_err();
            let expected = LayerError::Rows {
                n_rows,
                n_hidden: 5,
                n_moe: 3,
                n_nextn: 1,
            };
            assert_eq!(error, expected);
        }
        let error = blocks_of_rows(None, 5000, |_| RowUse::Used).unwrap_err();
        assert_eq!(error, LayerError::TooMany { n_rows: 5000 });
    }

    #[test]
    fn numbers_rows_from_0_without_a_model() {
        for model in [None, Some(ModelInfo::default())] {
            let rows = blocks_of_rows(model.as_ref(), 3, |_| RowUse::Used).unwrap();
            assert_eq!(
                rows.blocks,
                [Some(LayerId(0)), Some(LayerId(1)), Some(LayerId(2))]
            );
            assert!(rows.is_assumed);
            // An empty row belongs to a dense layer, so the layout has one row per hidden layer.
            let rows = blocks_of_rows(model.as_ref(), 3, |row| used(row != 0)).unwrap();
            assert_eq!(rows.blocks, [None, Some(LayerId(1)), Some(LayerId(2))]);
            assert!(!rows.is_assumed);
        }
    }

    #[test]
    fn accepts_a_model_with_only_the_number_of_layers_known() {
        let model = ModelInfo {
            n_layer: Some(3),
            ..ModelInfo::default()
        };
        let rows = blocks_of_rows(Some(&model), 3, |_| RowUse::Used).unwrap();
        assert_eq!(
            rows.blocks,
            [Some(LayerId(0)), Some(LayerId(1)), Some(LayerId(2))]
        );
        assert!(blocks_of_rows(Some(&model), 2, |_| RowUse::Used).is_err());
    }

    #[test]
    fn distinguishes_the_two_layouts_by_the_rows_of_dense_layers() {
        let layouts = Layouts::of(Some(&model())).unwrap();
        assert_eq!(layouts.n_rows().collect::<Vec<_>>(), [5, 3]);
        assert!(layouts.dense_rows_are_empty(|row| used(![0, 3].contains(&row))));
        assert!(!layouts.dense_rows_are_empty(|row| used(row != 0)));
        let all = ModelInfo {
            n_layer: Some(2),
            moe_layers: [0, 1].map(LayerId).into(),
            ..ModelInfo::default()
        };
        let layouts = Layouts::of(Some(&all)).unwrap();
        assert_eq!(layouts.n_rows().collect::<Vec<_>>(), [2]);
    }
}
