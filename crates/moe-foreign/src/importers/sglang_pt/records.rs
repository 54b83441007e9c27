//! The records of a dump (one per forward pass and rank), and the comparison of several ranks.
//!
//! SGLang writes one file per rank; a file with several ranks was merged later. With tensor parallelism, ranks record the same
//! tokens and experts. With data parallelism, each rank records different tokens.

use std::collections::{BTreeSet, HashMap};

use crate::binary::array::Array;
use crate::binary::pickle::Value;
use crate::binary::torch::TorchFile;
use crate::{ForeignError, Location, Output};

use super::tensor;

/// A forward pass.
pub(super) struct Record<'d> {
    /// Index in the list `records`.
    pub(super) number: usize,
    pub(super) value: Value,
    pub(super) rank: Option<i64>,
    pass_id: Option<i64>,
    gatherer: Option<&'d str>,
    /// Positions of the tokens in their sequences.
    pub(super) positions: &'d [Value],
    /// Vocabulary ids of the tokens.
    input_ids: &'d [Value],
    pub(super) content: Content<'d>,
}

/// Content of a record.
pub(super) enum Content<'d> {
    /// Experts `[layers, tokens, slots]`.
    Experts(Array<'d>),
    /// Counts `[layers, physical experts]`.
    Counts(Array<'d>),
}

/// Relation between the records of several ranks.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ranks {
    /// There is one rank.
    One,
    /// This number of ranks recorded different tokens.
    Different(usize),
    /// This number of ranks recorded the same tokens and experts.
    Equal(usize),
}

/// Why records of several ranks or gatherers cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum RecordError {
    #[error(
        "ranks {} and {} each recorded some of the experts of the same tokens; use a dump with all experts of a token in one record",
        name(*first),
        name(*second)
    )]
    PartialExperts {
        first: Option<i64>,
        second: Option<i64>,
    },
    #[error(
        "the records have several gatherers ({names}): with two-batch overlap the dump does not record which tokens belong to a record; \
         record without two-batch overlap"
    )]
    Gatherers { names: String },
}

fn name(rank: Option<i64>) -> String {
    rank.map_or_else(|| "(unnamed)".into(), |rank| rank.to_string())
}

impl<'d> Record<'d> {
    /// Reads element `number` of the list `records`.
    pub(super) fn read(
        dump: &'d TorchFile<'d>,
        number: usize,
        value: Value,
        output: &Output<'_>,
    ) -> Result<Self, ForeignError> {
        let get = |key| dump.pickle().get(value, key);
        let list = |key| get(key).and_then(|list| dump.pickle().list(list));
        let int = |key| match get(key) {
            Some(Value::Int(number)) => Some(number),
            _ => None,
        };
        let content = match tensor(dump, get("topk_ids_of_layer"), output)? {
            Some(experts) => Content::Experts(experts),
            None => match tensor(dump, get("global_physical_count"), output)? {
                Some(counts) => Content::Counts(counts),
                None => {
                    let reason = "the record has neither topk_ids_of_layer nor global_physical_count; use a dump of SGLang's recorder";
                    return Err(
                        output.invalid(Location::Element(format!("records[{number}]")), reason)
                    );
                }
            },
        };
        Ok(Self {
            number,
            value,
            rank: int("rank"),
            pass_id: int("forward_pass_id"),
            gatherer: get("gatherer_key").and_then(|key| dump.pickle().text(key)),
            positions: list("positions").unwrap_or_default(),
            input_ids: list("input_ids").unwrap_or_default(),
            content,
        })
    }

    fn array(&self) -> &Array<'d> {
        match &self.content {
            Content::Experts(array) | Content::Counts(array) => array,
        }
    }

    /// Compares the record with that of another rank.
    fn compare(&self, other: &Record<'_>) -> Comparison {
        let has_experts = [self, other].map(|r| matches!(r.content, Content::Experts(_)));
        if has_experts[0] != has_experts[1]
            || self.array().shape() != other.array().shape()
            || (self.positions, self.input_ids) != (other.positions, other.input_ids)
        {
            return Comparison::Different;
        }
        let mut comparison = Comparison::Empty;
        for index in indices(self.array().shape()) {
            let [a, b] = [self, other].map(|record| record.array().integer(&index));
            // An empty slot, or a count of 0.
            let empty =
                |value: Option<i64>| value.is_some_and(|value| value < i64::from(!has_experts[0]));
            comparison = match (empty(a), empty(b)) {
                (true, true) => comparison,
                (false, false) if a != b => return Comparison::Different,
                (false, false) => comparison.max(Comparison::Equal),
                _ if has_experts[0] => Comparison::Partial,
                _ => return Comparison::Different,
            };
        }
        comparison
    }
}

/// Result of comparing the records of two ranks for the same pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Comparison {
    /// Neither contains experts.
    Empty,
    /// Both contain the same experts or counts.
    Equal,
    /// Same tokens, but different slots are in use.
    Partial,
    /// Different tokens, experts or counts.
    Different,
}

/// The indices of all elements of an array.
fn indices(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> {
    let n: usize = shape.iter().product();
    (0..n).map(move |element| {
        let mut rest = element;
        let mut index = vec![0; shape.len()];
        for (place, &size) in index.iter_mut().zip(shape).rev() {
            *place = rest % size;
            rest /= size;
        }
        index
    })
}

/// The relation between the ranks of a dump. Ranks are equal if all of them recorded every pass with the same content.
///
/// # Errors
/// The index of a record, and the error.
pub(super) fn ranks(records: &[Record<'_>]) -> Result<Ranks, (usize, RecordError)> {
    check_gatherers(records)?;
    let ranks: BTreeSet<Option<i64>> = records.iter().map(|record| record.rank).collect();
    let n_ranks = ranks.len();
    if n_ranks < 2 {
        return Ok(Ranks::One);
    }
    let mut passes: HashMap<(Option<i64>, Option<&str>), Vec<&Record<'_>>> = HashMap::new();
    for record in records {
        let pass = (record.pass_id, record.gatherer);
        passes.entry(pass).or_default().push(record);
    }
    let mut partial = None;
    let mut is_equal = false;
    for ((pass_id, _), records) in &passes {
        let of_pass: BTreeSet<Option<i64>> = records.iter().map(|record| record.rank).collect();
        if pass_id.is_none() || records.len() != n_ranks || of_pass != ranks {
            return Ok(Ranks::Different(n_ranks));
        }
        for record in &records[1..] {
            match records[0].compare(record) {
                Comparison::Empty => {}
                Comparison::Equal => is_equal = true,
                Comparison::Partial => partial = Some((records[0].rank, record)),
                Comparison::Different => return Ok(Ranks::Different(n_ranks)),
            }
        }
    }
    match partial {
        Some((first, record)) => {
            let second = record.rank;
            Err((record.number, RecordError::PartialExperts { first, second }))
        }
        None if is_equal => Ok(Ranks::Equal(n_ranks)),
        None => Ok(Ranks::Different(n_ranks)),
    }
}

/// Rejects experts of several gatherers: each records a part of the batch, but the positions of the complete batch. Counts of
/// several gatherers are valid and are summed.
fn check_gatherers(records: &[Record<'_>]) -> Result<(), (usize, RecordError)> {
    let of_experts = records
        .iter()
        .filter(|record| matches!(record.content, Content::Experts(_)));
    let mut names = BTreeSet::new();
    for record in of_experts {
        names.insert(record.gatherer.unwrap_or("(unnamed)"));
        if names.len() > 1 {
            let names = names.into_iter().collect::<Vec<_>>().join(", ");
            return Err((record.number, RecordError::Gatherers { names }));
        }
    }
    Ok(())
}
