//! [`Output`]: checks the rows of an importer and passes them to a [`Sink`].

mod errors;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use moe_files::text::counted;
use moe_trace::{
    CountRow, ExpertId, LayerId, LayerRow, MAX_ID, ModelInfo, RoutingRow, Sink, SinkError,
    is_router_weight,
};

use crate::ImportOptions;
use crate::error::{ForeignError, Location, Missing, check_model};
use crate::layers::LayerError;
use crate::source::Source;

/// Result of an import.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Name of the format.
    pub format: &'static str,
    /// Parameters of the model from the trace, completed from [`ImportOptions::model`].
    pub model_info: ModelInfo,
    /// Number of routing rows: one per token, layer and slot.
    pub rows: u64,
    /// Number of counts above 0: one per layer, expert and phase.
    pub counts: u64,
    /// Notes for the user: data that the format does not contain, and data that the importer skipped.
    pub notes: Vec<String>,
    /// Values that the importer assumed because the trace does not record them.
    pub missing: BTreeSet<Missing>,
}

impl Summary {
    /// Whether the trace contains routing, and not only counts.
    pub fn is_ordered(&self) -> bool {
        self.rows > 0
    }
}

/// Maximum number of notes of one import.
const MAX_NOTES: usize = 64;

/// A weight that no router applies.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error(
    "the router weight {weight} is not a finite number of at least 0; the file is damaged, or its values are not router weights"
)]
pub struct WeightError {
    /// The weight.
    pub weight: f32,
}

/// Receives the rows of an importer, checks them and passes them to the sink.
pub struct Output<'a> {
    format: &'static str,
    path: PathBuf,
    /// The file that is being read; differs from `path` if that is a directory.
    file: PathBuf,
    options: &'a ImportOptions,
    sink: &'a mut dyn Sink,
    model_info: ModelInfo,
    /// Experts that a token selects, as recorded in the trace.
    top_k: Option<u32>,
    /// Highest slot of any row + 1.
    n_slot: u32,
    /// Number of rows with slot 0: the number of tokens in all layers.
    n_first: u64,
    /// Whether a token has an empty slot, so that the top-k can be higher than `n_slot`.
    has_empty_slots: bool,
    /// First layer in which a token has more experts than the model selects.
    above_model: Option<LayerId>,
    rows: u64,
    counts: u64,
    notes: Vec<String>,
    missing: BTreeSet<Missing>,
    repeated: Repeated,
}

/// Experts that occur more than once for the same token.
#[derive(Default)]
struct Repeated {
    /// By expert: number of the last token that selected it, from 1.
    last_token: Vec<u64>,
    n_tokens: u64,
    /// Number of repeated experts, and the location of the first.
    n: u64,
    first: Option<String>,
}

impl Repeated {
    /// Whether the current token has selected the expert before.
    fn is_repeated(&mut self, expert: ExpertId) -> bool {
        let expert = expert.index();
        if self.last_token.len() <= expert {
            self.last_token.resize(expert + 1, 0);
        }
        std::mem::replace(&mut self.last_token[expert], self.n_tokens) == self.n_tokens
    }
}

impl<'a> Output<'a> {
    pub(crate) fn new(
        format: &'static str,
        source: &Source,
        options: &'a ImportOptions,
        sink: &'a mut dyn Sink,
    ) -> Result<Self, ForeignError> {
        let mut output = Self {
            format,
            path: source.path().to_owned(),
            file: source.path().to_owned(),
            options,
            sink,
            model_info: ModelInfo::default(),
            top_k: None,
            n_slot: 0,
            n_first: 0,
            has_empty_slots: false,
            above_model: None,
            rows: 0,
            counts: 0,
            notes: Vec::new(),
            missing: BTreeSet::new(),
            repeated: Repeated::default(),
        };
        let mut named = options.model.clone().unwrap_or_default();
        if options.top_k.is_some() {
            named.n_expert_used = options.top_k;
            named.n_expert_used_by_block.clear();
        }
        if named != ModelInfo::default() {
            output.model_info(&named)?;
            output.top_k = None; // specified by the user, not recorded in the trace
        }
        if source.n_skipped() > 0 {
            output.note(format!(
                "skipped {} of other formats in {}",
                counted(source.n_skipped(), "file"),
                source.path().display()
            ));
        }
        Ok(output)
    }

    /// Sets the file that contains the following rows, for errors.
    pub fn begin_file(&mut self, file: &Path) {
        self.file = file.to_owned();
    }

    /// Adds parameters of the model that the trace records. Importers call it before the rows, and again for further parameters.
    ///
    /// # Errors
    /// [`ForeignError::OtherModel`] if the parameters contradict [`ImportOptions::model`]. [`ForeignError::File`] if no model has
    /// that many layers or experts, so that sinks need not check the numbers.
    pub fn model_info(&mut self, model_info: &ModelInfo) -> Result<(), ForeignError> {
        if let Some(error) = model_info.invalid() {
            return Err(ForeignError::file(&self.file, error));
        }
        if let Some(model) = &self.options.model {
            check_model(model, model_info, &self.path)?;
        }
        // The number in the trace has precedence: the run may have overridden the top-k of the model.
        self.top_k = model_info.n_expert_used.or(self.top_k);
        let mut model_info = model_info.clone();
        if let (Some(model), Some(n_layer)) = (&self.options.model, model_info.n_layer) {
            // A trace may or may not count the blocks of the MTP head.
            model_info.n_layer = model.blocks_for(n_layer).or(model_info.n_layer);
        }
        model_info.fill_from(&self.model_info);
        self.model_info = model_info;
        let result = self.sink.model_info(&self.model_info);
        self.check(result, || Location::Byte(0))
    }

    /// Parameters of the model that are known so far.
    pub fn known_model_info(&self) -> &ModelInfo {
        &self.model_info
    }

    /// Checks a routing row and passes it to the sink. `at` is its location in the file.
    ///
    /// # Errors
    /// [`ForeignError::OutOfRange`] for a layer, expert or slot that the model does not have, [`ForeignError::Layers`] for a dense
    /// layer, [`WeightError`] for a weight that no router applies, or the error of the sink.
    pub fn routing(
        &mut self,
        at: impl Fn() -> Location,
        row: &RoutingRow,
    ) -> Result<(), ForeignError> {
        self.check_ids(&at, row.layer_id, row.expert_id)?;
        self.check_has_experts(&at, row.layer_id)?;
        if let Some(weight) = row.weight
            && !is_router_weight(weight)
        {
            return Err(self.invalid(at(), WeightError { weight }));
        }
        self.rows += 1;
        let n_slot = u32::from(row.slot) + 1;
        self.n_slot = self.n_slot.max(n_slot);
        self.n_first += u64::from(row.slot == 0);
        if self.above_model.is_none()
            && self
                .options
                .n_expert_used_in(row.layer_id)
                .is_some_and(|used| n_slot > used)
        {
            self.above_model = Some(row.layer_id);
        }
        let result = self.sink.routing(row);
        self.check(result, at)
    }

    /// Passes the selected experts of a token in a layer, best first, to the sink as rows with the slots 0, 1, 2, …
    ///
    /// `row` contains the values that all these experts share. `experts` are pairs of expert id and router weight. A negative id is
    /// an empty slot. Repeated experts are skipped with a note.
    ///
    /// # Errors
    /// Those of [`Output::routing`].
    pub fn token(
        &mut self,
        at: impl Fn() -> Location,
        row: &RoutingRow,
        experts: impl IntoIterator<Item = (i64, Option<f32>)>,
    ) -> Result<(), ForeignError> {
        self.repeated.n_tokens += 1;
        for (slot, (expert, weight)) in experts.into_iter().enumerate() {
            if expert < 0 {
                self.has_empty_slots = true;
                continue;
            }
            let expert = self.expert_id(&at, expert as u64)?;
            if self.repeated.is_repeated(expert) {
                self.repeated.n += 1;
                self.repeated.first.get_or_insert_with(|| at().to_string());
                continue;
            }
            let row = RoutingRow {
                slot: self.number(&at, "slot", slot as u64)?,
                expert_id: expert,
                weight,
                ..*row
            };
            self.routing(&at, &row)?;
        }
        Ok(())
    }

    /// Rejects an array with more slots for a token than the model selects experts: it belongs to another model, or is not
    /// routing. If [`ImportOptions::top_k`] is set, the number in the trace is used with a warning instead.
    pub(crate) fn check_slots(
        &self,
        n_slots: usize,
        at: impl Fn() -> Location,
    ) -> Result<(), ForeignError> {
        let max = self.options.max_expert_used().map(|max| max as usize);
        match max {
            Some(max) if n_slots > max && self.options.top_k.is_none() => {
                let source = LayerError::Slots { n_slots, max };
                Err(self.layers(at(), source))
            }
            _ => Ok(()),
        }
    }

    /// Checks a count and passes it to the sink. `at` is its location in the file. Counts of 0 are skipped.
    ///
    /// # Errors
    /// [`ForeignError::OutOfRange`] for a layer or expert that the model does not have, [`ForeignError::Layers`] for a dense layer,
    /// or the error of the sink.
    pub fn count(&mut self, at: impl Fn() -> Location, row: &CountRow) -> Result<(), ForeignError> {
        self.check_ids(&at, row.layer_id, row.expert_id)?;
        if row.count == 0 {
            return Ok(());
        }
        self.check_has_experts(&at, row.layer_id)?;
        self.counts += 1;
        let result = self.sink.count(row);
        self.check(result, at)
    }

    /// Passes the totals of a layer to the sink, after the counts of the layer.
    ///
    /// # Errors
    /// The error of the sink.
    pub fn layer(&mut self, at: impl Fn() -> Location, row: &LayerRow) -> Result<(), ForeignError> {
        self.check_ids(&at, row.layer_id, ExpertId(0))?;
        let result = self.sink.layer(row);
        self.check(result, at)
    }

    /// Adds a note about data that the format does not contain or that the importer skipped. Duplicates are dropped.
    pub fn note(&mut self, note: impl Into<String>) {
        let note = note.into();
        if self.notes.len() < MAX_NOTES && !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Reports that the importer assumed a value because the trace does not record it.
    pub fn missing(&mut self, missing: Missing) {
        self.missing.insert(missing);
    }

    /// Converts a layer number that was read at `at`.
    ///
    /// # Errors
    /// [`ForeignError::OutOfRange`] if it is [`MAX_ID`] or more.
    pub fn layer_id(&self, at: impl Fn() -> Location, id: u64) -> Result<LayerId, ForeignError> {
        self.number(at, "layer", id).map(LayerId)
    }

    /// Converts an expert number that was read at `at`.
    ///
    /// # Errors
    /// [`ForeignError::OutOfRange`] if it is [`MAX_ID`] or more.
    pub fn expert_id(&self, at: impl Fn() -> Location, id: u64) -> Result<ExpertId, ForeignError> {
        self.number(at, "expert", id).map(|id| ExpertId(id.into()))
    }

    /// Converts a layer, expert or slot number below [`MAX_ID`] to 16 bits.
    fn number(
        &self,
        at: impl Fn() -> Location,
        name: &'static str,
        id: u64,
    ) -> Result<u16, ForeignError> {
        match u16::try_from(id) {
            Ok(id) if u32::from(id) < MAX_ID => Ok(id),
            _ => Err(self.out_of_range(at(), name, id, MAX_ID)),
        }
    }

    pub(crate) fn finish(mut self) -> Result<Summary, ForeignError> {
        if let Some(first) = self.repeated.first.take() {
            self.note(format!(
                "warning: skipped {} (the first at {first}): a router selects an expert at most once per token, so the trace is \
                 damaged or does not contain routing",
                counted(self.repeated.n, "repeated expert")
            ));
        }
        self.check_top_k();
        if self.rows == 0 && self.counts == 0 {
            return Err(ForeignError::NoRouting {
                path: self.path,
                format: self.format,
                notes: self.notes,
            });
        }
        Ok(Summary {
            format: self.format,
            model_info: self.model_info,
            rows: self.rows,
            counts: self.counts,
            notes: self.notes,
            missing: self.missing,
        })
    }

    /// Uses the top-k of the trace, with a warning, if it differs from the user's or exceeds that of the model. A top-k below
    /// that of the model is valid: a run may select fewer experts.
    fn check_top_k(&mut self) {
        let Some(expected) = self.options.max_expert_used() else {
            return;
        };
        let is_from_user = self.options.top_k.is_some();
        let is_proof = |&n: &u32| n > expected || self.has_uniform_slots();
        let recorded = self.top_k.or(Some(self.n_slot).filter(is_proof));
        let differs = |&recorded: &u32| recorded > expected || is_from_user && recorded < expected;
        let Some(recorded) = recorded.filter(differs) else {
            if let Some(layer) = self.above_model {
                let used = self.options.n_expert_used_in(layer).unwrap_or(0);
                self.note(format!(
                    "warning: layer {layer}: the trace has more experts per token than the {used} that the model selects; the \
                     trace is of another model, or its top-k was changed"
                ));
            }
            return;
        };
        self.model_info.n_expert_used = Some(recorded);
        self.model_info.n_expert_used_by_block.clear();
        let experts = counted(recorded, "expert");
        self.note(if is_from_user {
            format!("warning: the trace has {experts} per token; the specified top-k of {expected} is ignored")
        } else {
            format!(
                "warning: the trace has {experts} per token, but the model selects {expected}; the trace is of another model, or \
                 its top-k was changed"
            )
        });
    }

    /// Whether every token has the same number of experts in every layer, and no empty slot.
    fn has_uniform_slots(&self) -> bool {
        let n_rows = self.n_first.checked_mul(self.n_slot.into());
        let is_complete = !self.has_empty_slots && self.repeated.n == 0;
        is_complete && self.n_slot > 0 && n_rows == Some(self.rows)
    }

    fn check_ids(
        &self,
        at: &impl Fn() -> Location,
        layer: LayerId,
        expert: ExpertId,
    ) -> Result<(), ForeignError> {
        let n_layer = self.model_info.n_layer.unwrap_or(MAX_ID).min(MAX_ID);
        let n_expert = self.model_info.n_expert.unwrap_or(MAX_ID).min(MAX_ID);
        for (name, id, limit) in [
            ("layer", layer.0.into(), n_layer),
            ("expert", expert.0, n_expert),
        ] {
            if id >= limit {
                return Err(self.out_of_range(at(), name, id.into(), limit));
            }
        }
        Ok(())
    }

    /// Rejects a layer that is dense in [`ImportOptions::model`].
    fn check_has_experts(
        &self,
        at: &impl Fn() -> Location,
        layer: LayerId,
    ) -> Result<(), ForeignError> {
        let moe_layers = self.options.model.as_ref().map(|model| &model.moe_layers);
        if moe_layers.is_some_and(|layers| !layers.is_empty() && !layers.contains(&layer)) {
            let layer = layer.index();
            return Err(self.layers(at(), LayerError::Dense { layer }));
        }
        Ok(())
    }

    /// Adds the location to an error of the sink.
    fn check(
        &self,
        result: Result<(), SinkError>,
        at: impl Fn() -> Location,
    ) -> Result<(), ForeignError> {
        result.map_err(|error| match error {
            SinkError::Refused(source) => self.invalid(at(), source),
            SinkError::NeedsOrder => ForeignError::NoOrder {
                path: self.path.clone(),
                format: self.format,
            },
            SinkError::Failed(error) => ForeignError::Sink(error),
        })
    }
}
