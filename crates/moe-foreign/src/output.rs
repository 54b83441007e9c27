//! Where an importer's rows go, checked on the way.

use std::collections::BTreeSet;
use std::error::Error as StdError;
use std::path::{Path, PathBuf};

use moe_gguf::text::counted;
use moe_trace::{
    CountRow, ExpertId, Facts, LayerId, LayerRow, MAX_ID, RoutingRow, Sink, SinkError,
};

use crate::ImportOptions;
use crate::error::{At, ForeignError, Missing, check_model};
use crate::importers::responses::ResponseError;
use crate::layers::LayerError;
use crate::source::Source;

/// What was read.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Name of the format.
    pub format: &'static str,
    /// What the trace says about its model, filled up with what the user's model says.
    pub facts: Facts,
    /// Rows of routing.
    pub rows: u64,
    /// Counts.
    pub counts: u64,
    /// What the format has lost, and what was left out.
    pub notes: Vec<String>,
    /// What was assumed because the trace does not record it.
    pub missing: BTreeSet<Missing>,
}

impl Summary {
    /// Whether the trace has an order: rows of routing, not counts alone.
    pub fn is_ordered(&self) -> bool {
        self.rows > 0
    }
}

/// Notes of one import, at most.
const MAX_NOTES: usize = 64;

/// What an importer hands its rows to.
pub struct Output<'a> {
    format: &'static str,
    path: PathBuf,
    /// File that is being read, in a directory.
    file: PathBuf,
    options: &'a ImportOptions,
    sink: &'a mut dyn Sink,
    facts: Facts,
    /// Experts that a token is routed to, as the trace says.
    top_k: Option<u32>,
    /// The highest slot of any row, plus one.
    n_slot: u32,
    /// The first layer in which a token has more experts than the model selects there.
    above_model: Option<LayerId>,
    rows: u64,
    counts: u64,
    notes: Vec<String>,
    missing: BTreeSet<Missing>,
    repeated: Repeated,
}

/// Experts that a token names again.
#[derive(Default)]
struct Repeated {
    /// By expert: number of the last token that named it, from 1.
    named: Vec<u64>,
    tokens: u64,
    /// How many there were, and the place of the first.
    n: u64,
    first: Option<String>,
}

impl Repeated {
    /// Whether the running token named the expert before.
    fn is_again(&mut self, expert: ExpertId) -> bool {
        let expert = expert.index();
        if self.named.len() <= expert {
            self.named.resize(expert + 1, 0);
        }
        std::mem::replace(&mut self.named[expert], self.tokens) == self.tokens
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
            facts: Facts::default(),
            top_k: None,
            n_slot: 0,
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
        if named != Facts::default() {
            output.facts(&named)?;
            output.top_k = None; // the user's number, not the trace's
        }
        if source.left_out() > 0 {
            output.note(format!(
                "left out: {} in {} that {} no part of the trace",
                counted(source.left_out(), "file"),
                source.path().display(),
                if source.left_out() == 1 { "is" } else { "are" }
            ));
        }
        Ok(output)
    }

    /// Names the file that the rows to come are in.
    pub fn begin_file(&mut self, file: &Path) {
        self.file = file.to_owned();
    }

    /// What the trace says about its model, as soon as it is known. May be called again with more.
    ///
    /// # Errors
    /// [`ForeignError::OtherModel`] if it contradicts the model that the user named, [`ForeignError::File`] if no model has
    /// as many layers or experts: nobody downstream has to doubt the numbers.
    pub fn facts(&mut self, facts: &Facts) -> Result<(), ForeignError> {
        if let Some(fault) = facts.impossible() {
            return Err(ForeignError::file(&self.file, fault));
        }
        if let Some(model) = &self.options.model {
            check_model(model, facts, &self.path)?;
        }
        // What the trace says of itself goes before what the user says: the top-k of the model may have been overridden.
        self.top_k = facts.n_expert_used.or(self.top_k);
        let mut facts = facts.clone();
        if let (Some(model), Some(n_layer)) = (&self.options.model, facts.n_layer) {
            // A trace may count the blocks of the MTP head or not.
            facts.n_layer = model.blocks_for(n_layer).or(facts.n_layer);
        }
        facts.fill_from(&self.facts);
        self.facts = facts;
        let taken = self.sink.facts(&self.facts);
        self.check(taken, || At::Byte(0))
    }

    /// What is known about the model so far.
    pub fn known(&self) -> &Facts {
        &self.facts
    }

    /// Hands over a row of routing that was read at `at`.
    pub fn routing(&mut self, at: impl Fn() -> At, row: &RoutingRow) -> Result<(), ForeignError> {
        self.check_ids(&at, row.layer_id, row.expert_id)?;
        self.check_has_experts(&at, row.layer_id)?;
        self.rows += 1;
        let n_slot = u32::from(row.slot) + 1;
        self.n_slot = self.n_slot.max(n_slot);
        if self.above_model.is_none()
            && self
                .options
                .n_expert_used_in(row.layer_id)
                .is_some_and(|used| n_slot > used)
        {
            self.above_model = Some(row.layer_id);
        }
        let taken = self.sink.routing(row);
        self.check(taken, at)
    }

    /// Hands over a token's experts, best first: `row` with one slot after the other. Negative ids mark empty slots. An expert
    /// that the token names again is left out and noted.
    pub fn token(
        &mut self,
        at: impl Fn() -> At,
        row: &RoutingRow,
        experts: impl IntoIterator<Item = (i64, Option<f32>)>,
    ) -> Result<(), ForeignError> {
        self.repeated.tokens += 1;
        for (slot, (expert, weight)) in experts.into_iter().enumerate() {
            if expert < 0 {
                continue;
            }
            let expert = self.expert_id(&at, expert as u64)?;
            if self.repeated.is_again(expert) {
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

    /// Refuses an array that has more experts for a token than the model: it is of another model, or no routing at all. If the
    /// user names the number, the trace's own is taken with a warning.
    pub(crate) fn check_slots(
        &self,
        n_slots: usize,
        at: impl Fn() -> At,
    ) -> Result<(), ForeignError> {
        let most = self.options.max_expert_used().map(|most| most as usize);
        match most {
            Some(most) if n_slots > most && self.options.top_k.is_none() => {
                let source = LayerError::Slots { n_slots, most };
                Err(self.layers(at(), source))
            }
            _ => Ok(()),
        }
    }

    /// Hands over a count that was read at `at`. Zeros are left out.
    pub fn count(&mut self, at: impl Fn() -> At, row: &CountRow) -> Result<(), ForeignError> {
        self.check_ids(&at, row.layer_id, row.expert_id)?;
        if row.count == 0 {
            return Ok(());
        }
        self.check_has_experts(&at, row.layer_id)?;
        self.counts += 1;
        let taken = self.sink.count(row);
        self.check(taken, at)
    }

    /// Hands over totals of a layer, after its counts.
    pub fn layer(&mut self, at: impl Fn() -> At, row: &LayerRow) -> Result<(), ForeignError> {
        self.check_ids(&at, row.layer_id, ExpertId(0))?;
        let taken = self.sink.layer(row);
        self.check(taken, at)
    }

    /// Notes for the user what the format has lost, or what was left out. The same note is kept once.
    pub fn note(&mut self, note: impl Into<String>) {
        let note = note.into();
        if self.notes.len() < MAX_NOTES && !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Notes that something was assumed because the trace does not record it.
    pub fn missing(&mut self, missing: Missing) {
        self.missing.insert(missing);
    }

    /// An error about the layers of an array in the file that is being read.
    pub fn layers(&self, at: At, source: LayerError) -> ForeignError {
        ForeignError::Layers {
            path: self.file.clone(),
            at,
            source,
        }
    }

    /// An error about the routing of a response in the file that is being read.
    pub(crate) fn response(&self, at: At, source: ResponseError) -> ForeignError {
        ForeignError::Response {
            path: self.file.clone(),
            at,
            source,
        }
    }

    /// An error about something that is not recorded, without which the file cannot be read.
    pub fn lacks(&self, at: At, missing: Missing) -> ForeignError {
        ForeignError::Missing {
            path: self.file.clone(),
            at,
            missing,
        }
    }

    /// The layer of a number that was read at `at`.
    ///
    /// # Errors
    /// [`ForeignError::Invalid`] for a number of [`MAX_ID`] or more.
    pub fn layer_id(&self, at: impl Fn() -> At, id: u64) -> Result<LayerId, ForeignError> {
        self.number(at, "layer", id).map(LayerId)
    }

    /// The expert of a number that was read at `at`.
    ///
    /// # Errors
    /// [`ForeignError::Invalid`] for a number of [`MAX_ID`] or more.
    pub fn expert_id(&self, at: impl Fn() -> At, id: u64) -> Result<ExpertId, ForeignError> {
        self.number(at, "expert", id).map(|id| ExpertId(id.into()))
    }

    /// A layer, expert or slot number of any width, as the 16 bits that hold all real ones.
    fn number(&self, at: impl Fn() -> At, what: &str, id: u64) -> Result<u16, ForeignError> {
        match u16::try_from(id) {
            Ok(id) if u32::from(id) < MAX_ID => Ok(id),
            _ => Err(ForeignError::id(&self.file, at(), what, id, MAX_ID)),
        }
    }

    /// An error at a place in the file that is being read.
    pub fn invalid(
        &self,
        at: At,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> ForeignError {
        ForeignError::invalid(&self.file, at, source)
    }

    pub(crate) fn finish(mut self) -> Result<Summary, ForeignError> {
        if let Some(first) = self.repeated.first.take() {
            self.note(format!(
                "left out: {} that a token names again, which no router does (the first at {first}); the trace is damaged, or not what it seems",
                counted(self.repeated.n, "expert")
            ));
        }
        self.check_top_k();
        if self.rows == 0 && self.counts == 0 {
            return Err(ForeignError::Nothing {
                path: self.path,
                format: self.format,
                notes: self.notes,
            });
        }
        Ok(Summary {
            format: self.format,
            facts: self.facts,
            rows: self.rows,
            counts: self.counts,
            notes: self.notes,
            missing: self.missing,
        })
    }

    /// Takes the trace's own number of experts for a token, and says so, where the user names another, or where the model has
    /// fewer: a run may route a token to fewer than the model does.
    fn check_top_k(&mut self) {
        let Some(named) = self.options.max_expert_used() else {
            return;
        };
        let is_named = self.options.top_k.is_some();
        let own = self.top_k.or(Some(self.n_slot).filter(|&n| n > named));
        let Some(own) = own.filter(|&own| own > named || is_named && own < named) else {
            if let Some(layer) = self.above_model {
                let used = self.options.n_expert_used_in(layer).unwrap_or(0);
                self.note(format!(
                    "warning: in layer {layer} the trace has more experts for a token than the {used} that the model selects there: \
                     the trace is of another model, or its top-k was changed"
                ));
            }
            return;
        };
        self.facts.n_expert_used = Some(own);
        self.facts.n_expert_used_by_block.clear();
        let experts = counted(own, "expert");
        self.note(if is_named {
            format!("warning: the trace itself has {experts} for a token; the top-k of {named} is passed over")
        } else {
            format!(
                "warning: the trace has {experts} for a token, the model selects {named}: the trace is of another model, or its \
                 top-k was changed"
            )
        });
    }

    fn check_ids(
        &self,
        at: &impl Fn() -> At,
        layer: LayerId,
        expert: ExpertId,
    ) -> Result<(), ForeignError> {
        let n_layer = self.facts.n_layer.unwrap_or(MAX_ID).min(MAX_ID);
        let n_expert = self.facts.n_expert.unwrap_or(MAX_ID).min(MAX_ID);
        for (what, id, limit) in [
            ("layer", layer.0.into(), n_layer),
            ("expert", expert.0, n_expert),
        ] {
            if id >= limit {
                return Err(ForeignError::id(&self.file, at(), what, id.into(), limit));
            }
        }
        Ok(())
    }

    /// Refuses a layer that is dense in the model that the user named.
    fn check_has_experts(&self, at: &impl Fn() -> At, layer: LayerId) -> Result<(), ForeignError> {
        let moe_layers = self.options.model.as_ref().map(|model| &model.moe_layers);
        if moe_layers.is_some_and(|layers| !layers.is_empty() && !layers.contains(&layer)) {
            let layer = layer.index();
            return Err(self.layers(at(), LayerError::Dense { layer }));
        }
        Ok(())
    }

    fn check(&self, taken: Result<(), SinkError>, at: impl Fn() -> At) -> Result<(), ForeignError> {
        taken.map_err(|error| match error {
            SinkError::Refused(source) => self.invalid(at(), source),
            SinkError::NeedsOrder => ForeignError::NoOrder {
                path: self.path.clone(),
                format: self.format,
            },
            SinkError::Failed(error) => ForeignError::Sink(error),
        })
    }
}
