//! The records of a dump, each a forward pass of one rank, and what several ranks recorded.
//!
//! SGLang writes a file for each rank; several ranks in one file were joined. Ranks of tensor parallelism record the same tokens
//! with the same experts, ranks of data parallelism tokens of their own.

use std::collections::{BTreeSet, HashMap};

use crate::binary::array::Array;
use crate::binary::pickle::Value;
use crate::binary::torch::TorchFile;
use crate::{At, ForeignError, Output};

use super::tensor;

/// A forward pass.
pub(super) struct Record<'d> {
    /// Its place in the list.
    pub(super) number: usize,
    pub(super) value: Value,
    pub(super) rank: Option<i64>,
    pass_id: Option<i64>,
    gatherer: Option<&'d str>,
    /// Of the tokens in their sequences.
    pub(super) positions: &'d [Value],
    /// The tokens themselves.
    input_ids: &'d [Value],
    pub(super) content: Content<'d>,
}

/// What a record holds.
pub(super) enum Content<'d> {
    /// Experts `[layers, tokens, slots]`.
    Experts(Array<'d>),
    /// Counts `[layers, physical experts]`.
    Counts(Array<'d>),
}

/// How the records of several ranks belong together.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ranks {
    /// There is one rank.
    One,
    /// So many ranks with tokens of their own.
    Separate(usize),
    /// So many ranks that recorded the same.
    Same(usize),
}

/// Why records of several ranks or gatherers are not read.
#[derive(Debug, thiserror::Error)]
pub(super) enum RecordFault {
    #[error(
        "ranks {first:?} and {second:?} recorded different experts of the same tokens, each a part of them; give a dump with all \
         experts of a token in one record"
    )]
    Parts {
        first: Option<i64>,
        second: Option<i64>,
    },
    #[error(
        "records of the gatherers {names}: with two-batch overlap the dump does not show which tokens a record is of; record without it"
    )]
    Gatherers { names: String },
}

impl<'d> Record<'d> {
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
                    let reason = "no topk_ids_of_layer and no global_physical_count; the dump is not of SGLang's recorder";
                    return Err(output.invalid(At::Element(format!("records[{number}]")), reason));
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

    /// Compares with the record of another rank.
    fn compare(&self, other: &Record<'_>) -> Comparison {
        let has_experts = [self, other].map(|r| matches!(r.content, Content::Experts(_)));
        if has_experts[0] != has_experts[1]
            || self.array().shape() != other.array().shape()
            || (self.positions, self.input_ids) != (other.positions, other.input_ids)
        {
            return Comparison::Different;
        }
        let mut comparison = Comparison::Nothing;
        for index in indices(self.array().shape()) {
            let [a, b] = [self, other].map(|record| record.array().integer(&index));
            // An empty slot, or no token of an expert.
            let empty =
                |value: Option<i64>| value.is_some_and(|value| value < i64::from(!has_experts[0]));
            comparison = match (empty(a), empty(b)) {
                (true, true) => comparison,
                (false, false) if a != b => return Comparison::Different,
                (false, false) => comparison.max(Comparison::Equal),
                _ if has_experts[0] => Comparison::Parts,
                _ => return Comparison::Different,
            };
        }
        comparison
    }
}

/// What two ranks recorded in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Comparison {
    /// No experts.
    Nothing,
    /// The same.
    Equal,
    /// The same tokens, each with other slots in use.
    Parts,
    /// Different tokens or counts.
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

/// How the records of a dump belong together.
///
/// Ranks are the same if all of them recorded each pass, and recorded it equally.
///
/// # Errors
/// The number of a record, and what is wrong with it.
pub(super) fn ranks(records: &[Record<'_>]) -> Result<Ranks, (usize, RecordFault)> {
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
    let mut parts = None;
    let mut is_same = false;
    for ((pass_id, _), records) in &passes {
        let of_pass: BTreeSet<Option<i64>> = records.iter().map(|record| record.rank).collect();
        if pass_id.is_none() || records.len() != n_ranks || of_pass != ranks {
            return Ok(Ranks::Separate(n_ranks));
        }
        for record in &records[1..] {
            match records[0].compare(record) {
                Comparison::Nothing => {}
                Comparison::Equal => is_same = true,
                Comparison::Parts => parts = Some((records[0].rank, record)),
                Comparison::Different => return Ok(Ranks::Separate(n_ranks)),
            }
        }
    }
    match parts {
        Some((first, record)) => {
            let second = record.rank;
            Err((record.number, RecordFault::Parts { first, second }))
        }
        None if is_same => Ok(Ranks::Same(n_ranks)),
        None => Ok(Ranks::Separate(n_ranks)),
    }
}

/// Refuses experts of several gatherers: each takes a part of the batch, and all have the positions of the complete one. Their
/// counts may be added.
fn check_gatherers(records: &[Record<'_>]) -> Result<(), (usize, RecordFault)> {
    let of_experts = records
        .iter()
        .filter(|record| matches!(record.content, Content::Experts(_)));
    let mut names = BTreeSet::new();
    for record in of_experts {
        names.insert(record.gatherer.unwrap_or("(unnamed)"));
        if names.len() > 1 {
            let names = names.into_iter().collect::<Vec<_>>().join(", ");
            return Err((record.number, RecordFault::Gatherers { names }));
        }
    }
    Ok(())
}
