//! Layer numbering: the block of the model that a row of a server's array belongs to.
//!
//! vLLM and SGLang number the hidden layers of a model. GGUF counts the blocks of the multi-token prediction (MTP) head too,
//! after the hidden layers: `block_count` includes `nextn_predict_layers`. A server writes one of two layouts: a row for each
//! hidden layer, where the rows of dense layers are empty, or a row for each layer with experts. Blocks of the MTP head are in
//! neither.

use moe_trace::{Facts, LayerId, MAX_ID};

/// Why the layers of a trace cannot be mapped to the blocks of the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The number of rows fits neither layout.
    #[error(
        "{n_rows} layers are neither the {n_hidden} hidden layers of the model{} nor its {n_moe} with experts; the trace is of another model",
        without_mtp(*n_nextn)
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
    /// Tokens are routed in a block without experts.
    #[error(
        "layer {layer} selects experts, but block {layer} of the model is dense; the trace is of another model, or numbers its layers differently"
    )]
    Dense {
        /// Row of the array and block of the model.
        layer: usize,
    },
    /// A token has more experts than the model selects.
    #[error(
        "{n_slots} experts for a token, but the model selects {most}; the array is of another model, or holds counts"
    )]
    Slots {
        /// Slots of a token that are in use.
        n_slots: usize,
        /// Experts that the model selects in any layer.
        most: usize,
    },
    /// The layers of a trace are fewer than those of the model.
    #[error(
        "the trace has {n_layers} layers, the model {n_moe} with experts; with pipeline parallelism each stage numbers its layers from \
         0, and which layers of the model they are is not in the trace"
    )]
    Stages {
        /// Layers of the trace.
        n_layers: usize,
        /// Hidden layers of the model with experts.
        n_moe: usize,
    },
    /// No model has as many layers.
    #[error(
        "{n_rows} layers are more than any model has ({MAX_ID}); the array is of something else"
    )]
    TooMany {
        /// Rows of the array.
        n_rows: usize,
    },
}

fn without_mtp(n_nextn: u32) -> String {
    if n_nextn > 0 {
        format!(" (without {n_nextn} of the MTP head)")
    } else {
        String::new()
    }
}

/// What a row of a server's array holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowUse {
    /// Experts that tokens select.
    Used,
    /// No expert: nothing but filler.
    Empty,
    /// Expert 0 in the only slot of every token, which may be a selection or filler.
    Zero,
}

impl RowUse {
    /// The use of a row whose tokens have these `experts`. Negative ids mark empty slots. Several slots with 0 are filler, as no
    /// router selects an expert twice.
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
    /// Hidden layers: a row for each.
    n_hidden: u32,
    /// Hidden layers with experts, ascending: a row for each. Empty if they are not known.
    moe: Vec<LayerId>,
    n_nextn: u32,
}

impl Layouts {
    /// The layouts of `model`; `None` if nothing is known about its layers.
    pub(crate) fn of(model: Option<&Facts>) -> Option<Self> {
        let model = model?;
        let n_hidden = model.n_hidden_layer();
        let is_hidden = |layer: &LayerId| n_hidden.is_none_or(|n| u32::from(layer.0) < n);
        // A trace names the layers with experts by the bytes of an expert alone.
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

    /// The numbers of rows that an array may have: of the hidden layers, and of those with experts if they are fewer.
    pub(crate) fn n_rows(&self) -> impl Iterator<Item = usize> {
        let (all, moe) = (self.n_hidden as usize, self.moe.len());
        [all, moe]
            .into_iter()
            .take(if all == moe { 1 } else { 2 })
            .filter(|&n| n > 0)
    }

    /// Whether every row of a dense layer is empty, in an array with a row for each hidden layer.
    pub(crate) fn dense_rows_are_empty(&self, row_use: impl Fn(usize) -> RowUse) -> bool {
        self.first_dense_in_use(row_use).is_none()
    }

    /// Hidden layers with experts; 0 if they are not known.
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

    /// The error for an array of `n_rows` rows, which fits neither layout.
    pub(crate) fn unfit(&self, n_rows: usize) -> LayerError {
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
    /// Whether the numbering is an assumption: without the model, a row for each layer cannot be told from a row for each
    /// layer with experts unless a row is empty.
    pub(crate) is_assumed: bool,
}

/// Maps the `n_rows` rows of a server's array to blocks of `model`.
///
/// # Errors
/// [`LayerError`] if the rows fit none of the layouts of the model.
pub(crate) fn blocks_of_rows(
    model: Option<&Facts>,
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
        return Err(layouts.unfit(n_rows));
    };
    Ok(RowBlocks {
        blocks,
        is_assumed: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks 0 and 3 dense, 1, 2 and 4 with experts, 5 the MTP head with experts.
    fn model() -> Facts {
        Facts {
            n_layer: Some(6),
            n_nextn_layer: 1,
            moe_layers: [1, 2, 4, 5].map(LayerId).into(),
            ..Facts::default()
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
    fn rows_of_all_hidden_layers_are_blocks_of_the_same_number() {
        let expected = [None, Some(1), Some(2), None, Some(4)].map(|block| block.map(LayerId));
        assert_eq!(blocks(5, &[0, 3]).unwrap(), expected);
        // A layer with experts may be empty too.
        assert_eq!(blocks(5, &[0, 1, 3]).unwrap(), expected);
        let error = blocks(5, &[0]).unwrap_err();
        assert_eq!(error, LayerError::Dense { layer: 3 });
    }

    #[test]
    fn rows_of_layers_with_experts_skip_dense_blocks_and_the_mtp_head() {
        assert_eq!(
            blocks(3, &[]).unwrap(),
            [1, 2, 4].map(|block| Some(LayerId(block)))
        );
    }

    #[test]
    fn several_zeros_of_a_token_are_filler_and_a_single_one_may_be_an_expert() {
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
        // In a dense layer it is filler.
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
    fn other_numbers_of_rows_are_refused() {
        for n_rows in [0, 1, 2, 4, 6, 7] {
            let error = blocks(n_rows, &[0, 3]).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "{n_rows} layers are neither the 5 hidden layers of the model (without 1 of the MTP head) nor its 3 with experts; \
                     the trace is of another model"
                )
            );
        }
        let error = blocks_of_rows(None, 5000, |_| RowUse::Used).unwrap_err();
        assert_eq!(error, LayerError::TooMany { n_rows: 5000 });
    }

    #[test]
    fn without_a_model_rows_are_numbered_from_0() {
        for model in [None, Some(Facts::default())] {
            let rows = blocks_of_rows(model.as_ref(), 3, |_| RowUse::Used).unwrap();
            assert_eq!(
                rows.blocks,
                [Some(LayerId(0)), Some(LayerId(1)), Some(LayerId(2))]
            );
            assert!(rows.is_assumed);
            // An empty row is that of a dense layer: then all layers have rows.
            let rows = blocks_of_rows(model.as_ref(), 3, |row| used(row != 0)).unwrap();
            assert_eq!(rows.blocks, [None, Some(LayerId(1)), Some(LayerId(2))]);
            assert!(!rows.is_assumed);
        }
    }

    #[test]
    fn a_model_of_which_only_the_number_of_layers_is_known() {
        let model = Facts {
            n_layer: Some(3),
            ..Facts::default()
        };
        let rows = blocks_of_rows(Some(&model), 3, |_| RowUse::Used).unwrap();
        assert_eq!(
            rows.blocks,
            [Some(LayerId(0)), Some(LayerId(1)), Some(LayerId(2))]
        );
        assert!(blocks_of_rows(Some(&model), 2, |_| RowUse::Used).is_err());
    }

    #[test]
    fn distinguishes_the_two_layouts_by_their_rows() {
        let layouts = Layouts::of(Some(&model())).unwrap();
        assert_eq!(layouts.n_rows().collect::<Vec<_>>(), [5, 3]);
        assert!(layouts.dense_rows_are_empty(|row| used(![0, 3].contains(&row))));
        assert!(!layouts.dense_rows_are_empty(|row| used(row != 0)));
        let all = Facts {
            n_layer: Some(2),
            moe_layers: [0, 1].map(LayerId).into(),
            ..Facts::default()
        };
        let layouts = Layouts::of(Some(&all)).unwrap();
        assert_eq!(layouts.n_rows().collect::<Vec<_>>(), [2]);
    }
}
