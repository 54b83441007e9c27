//! Comparison of the operations of two runs and their sources.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;

use moe_trace::{LayerId, Operation, Run, SourceLog};

use super::passes::Step;

/// Maximum number of kinds of differences that are listed. Damaged traces may contain any number of names.
const MAX_KINDS: usize = 4096;

/// Operations of two runs. They are matched pass by pass by operation and result name. If one engine has not named the
/// result, they are matched by operation, layer and order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OperationsDiff {
    /// Number of operations, `[A, B]`.
    pub n: [u64; 2],
    /// Operations without a match, `[A, B]`.
    pub only: [OperationKinds; 2],
    /// Number of matched operations with different sources or numbers of tokens.
    pub n_different_sources: u64,
    /// Number of differences of each kind.
    pub sources: BTreeMap<SourceDifference, u64>,
    /// Number of passes whose matched operations are in different order. Only passes that have the same batch in both runs are
    /// compared.
    pub different_order: u64,
}

/// Numbers of operations by kind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OperationKinds {
    /// Number of operations.
    pub n: u64,
    /// By operation and result name without its layer. At most 4096 kinds.
    pub kinds: BTreeMap<(String, String), u64>,
}

/// A kind of difference between matched operations.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceDifference {
    /// Name of the operation.
    pub op: String,
    /// Name of the result, without its layer.
    pub dst_name: String,
    /// The compared aspect.
    pub aspect: SourceAspect,
    /// Value in A; `None` if A has no such source, or for sizes.
    pub a: Option<String>,
    /// Value in B.
    pub b: Option<String>,
}

/// A compared aspect of matched operations. The number is the index of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SourceAspect {
    /// Number of tokens.
    Tokens,
    /// Name of a source.
    Name(u8),
    /// Memory of a source: the model file, or a buffer.
    Memory(u8),
    /// Size of a buffer.
    Size(u8),
}

impl fmt::Display for SourceAspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceAspect::Tokens => write!(f, "n_tokens"),
            SourceAspect::Name(i) => write!(f, "source {i} name"),
            SourceAspect::Memory(i) => write!(f, "source {i} memory"),
            SourceAspect::Size(i) => write!(f, "source {i} size"),
        }
    }
}

impl OperationsDiff {
    /// Whether the operations of both runs are equal.
    pub fn is_equal(&self) -> bool {
        self.only.iter().all(|only| only.n == 0)
            && self.n_different_sources == 0
            && self.different_order == 0
    }

    /// Differences of matched operations, most frequent first.
    pub fn sorted_sources(&self) -> Vec<(&SourceDifference, u64)> {
        most_frequent(&self.sources)
    }
}

impl OperationKinds {
    /// Kinds, most frequent first.
    pub fn sorted(&self) -> Vec<(&(String, String), u64)> {
        most_frequent(&self.kinds)
    }
}

fn most_frequent<K>(kinds: &BTreeMap<K, u64>) -> Vec<(&K, u64)> {
    let mut kinds: Vec<(&K, u64)> = kinds.iter().map(|(kind, n)| (kind, *n)).collect();
    kinds.sort_by_key(|&(_, n)| std::cmp::Reverse(n));
    kinds
}

/// Identity of an operation in both runs. Operation numbers may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key<'r> {
    op: OpName<'r>,
    dst_name: &'r [u8],
}

/// Name of an operation, or its number if the run does not name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum OpName<'r> {
    Name(&'r str),
    Number(u8),
}

impl fmt::Display for OpName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpName::Name(name) => f.write_str(name),
            OpName::Number(number) => write!(f, "{number}"),
        }
    }
}

/// Compares step by step.
pub(super) struct OperationsComparer<'r> {
    runs: [&'r Run; 2],
    found: OperationsDiff,
}

impl<'r> OperationsComparer<'r> {
    pub fn new(runs: [&'r Run; 2]) -> Self {
        OperationsComparer {
            runs,
            found: OperationsDiff::default(),
        }
    }

    pub fn step(&mut self, step: &Step<'_>) {
        let operations = |side: usize| -> Vec<(Key<'r>, Operation<'r>)> {
            let run = self.runs[side];
            let passes = step.passes[side].iter();
            let operations = passes.flat_map(|pass| run.trace.operations_in(pass.records.clone()));
            operations
                .map(|operation| (key(run, &operation), operation))
                .collect()
        };
        let (a, b) = (operations(0), operations(1));
        self.found.n[0] += a.len() as u64;
        self.found.n[1] += b.len() as u64;

        let in_step = a.iter().zip(&b).take_while(|(a, b)| a.0 == b.0).count();
        for ((key, a), (_, b)) in a[..in_step].iter().zip(&b) {
            self.pair(key, a, b);
        }
        let in_order = self.by_name(&a[in_step..], &b[in_step..]);
        let [passes_a, passes_b] = step.passes.map(|passes| passes.len());
        self.found.different_order += u64::from(!in_order && passes_a == passes_b);
    }

    /// Matches operations after the first difference in order: the n-th of a name in A with the n-th in B, then operations
    /// that one side has not named. Returns whether the named ones are in the same order.
    fn by_name(&mut self, a: &[(Key<'r>, Operation<'r>)], b: &[(Key<'r>, Operation<'r>)]) -> bool {
        let mut waiting: HashMap<Key, VecDeque<usize>> = HashMap::new();
        for (i, (key, _)) in b.iter().enumerate() {
            waiting.entry(*key).or_default().push_back(i);
        }
        let mut matches: Vec<Option<usize>> = a
            .iter()
            .map(|(key, _)| waiting.get_mut(key).and_then(VecDeque::pop_front))
            .collect();
        let in_order = matches.iter().flatten().is_sorted();
        let mut is_matched = vec![false; b.len()];
        matches.iter().flatten().for_each(|&i| is_matched[i] = true);
        match_unnamed(a, b, &mut matches, &mut is_matched);

        for ((key, operation), found) in a.iter().zip(matches) {
            match found {
                Some(i) if is_unnamed(key.dst_name) => self.pair(&b[i].0, operation, &b[i].1),
                Some(i) => self.pair(key, operation, &b[i].1),
                None => self.found.only[0].add(key, operation),
            }
        }
        for ((key, operation), is_matched) in b.iter().zip(is_matched) {
            if !is_matched {
                self.found.only[1].add(key, operation);
            }
        }
        in_order
    }

    fn pair(&mut self, key: &Key, a: &Operation, b: &Operation) {
        let mut differences = Vec::new();
        let (head_a, head_b) = (a.head(), b.head());
        if head_a.has_extension() && head_b.has_extension() && head_a.n_tokens != head_b.n_tokens {
            let n_tokens = [head_a, head_b].map(|head| Some(head.n_tokens.get().to_string()));
            differences.push((SourceAspect::Tokens, n_tokens));
        }
        let n_sources = head_a.sources().len().max(head_b.sources().len());
        for i in 0..n_sources {
            let sources = [head_a, head_b].map(|head| head.sources().get(i));
            let sizes = [head_a.source_size(i), head_b.source_size(i)];
            differences.extend(source_difference(i as u8, sources, sizes));
        }
        self.found.n_different_sources += u64::from(!differences.is_empty());
        for (aspect, [a, b]) in differences {
            let (op, dst_name) = key.kind(head_a.layer());
            let kind = SourceDifference {
                op,
                dst_name,
                aspect,
                a,
                b,
            };
            count(&mut self.found.sources, kind);
        }
    }

    pub fn finish(self) -> OperationsDiff {
        self.found
    }
}

/// Matches remaining operations of which at least one has no name, in order, by operation and layer.
fn match_unnamed(
    a: &[(Key, Operation)],
    b: &[(Key, Operation)],
    matches: &mut [Option<usize>],
    is_matched: &mut [bool],
) {
    let kind = |(key, operation): &(Key, Operation)| (key.op.to_string(), operation.head().layer());
    let mut waiting: HashMap<_, VecDeque<usize>> = HashMap::new();
    for (i, of_b) in b.iter().enumerate().filter(|(i, _)| !is_matched[*i]) {
        waiting.entry(kind(of_b)).or_default().push_back(i);
    }
    for (of_a, found) in a.iter().zip(matches).filter(|(_, found)| found.is_none()) {
        let Some(candidates) = waiting.get_mut(&kind(of_a)) else {
            continue;
        };
        let fits = |i: &usize| is_unnamed(of_a.0.dst_name) || is_unnamed(b[*i].0.dst_name);
        if let Some(i) = candidates
            .iter()
            .position(fits)
            .and_then(|at| candidates.remove(at))
        {
            is_matched[i] = true;
            *found = Some(i);
        }
    }
}

/// Whether the engine has not named a node. ggml then names it by its index in the graph, for example `node_31`.
fn is_unnamed(name: &[u8]) -> bool {
    name.strip_prefix(b"node_").is_some_and(|rest| {
        let n_digits = rest.iter().take_while(|c| c.is_ascii_digit()).count();
        n_digits > 0 && matches!(rest.get(n_digits), None | Some(b' '))
    })
}

/// Difference between two sources with the same index. Byte ranges of model files are compared in [`super::bytes`].
fn source_difference(
    i: u8,
    sources: [Option<&SourceLog>; 2],
    sizes: [u64; 2],
) -> Option<(SourceAspect, [Option<String>; 2])> {
    let both = |of: fn(&SourceLog) -> String| sources.map(|source| source.map(of));
    let [Some(a), Some(b)] = sources else {
        return Some((SourceAspect::Name(i), both(source_name)));
    };
    let is_named = !is_unnamed(a.name_bytes()) && !is_unnamed(b.name_bytes());
    if is_named && a.name_bytes() != b.name_bytes() {
        Some((SourceAspect::Name(i), both(source_name)))
    } else if a.memory_source != b.memory_source {
        let memory = |source: &SourceLog| if source.is_disk() { "disk" } else { "buffer" }.into();
        Some((SourceAspect::Memory(i), both(memory)))
    } else if !a.is_disk() && sizes[0] != sizes[1] {
        // The values are omitted, because sizes change with every token.
        Some((SourceAspect::Size(i), [None, None]))
    } else {
        None
    }
}

fn source_name(source: &SourceLog) -> String {
    without_layer(&source.name(), source.layer())
}

fn key<'r>(run: &'r Run, operation: &Operation<'r>) -> Key<'r> {
    let head = operation.head();
    let number = head.operation_type;
    Key {
        op: run
            .ops()
            .name(number)
            .map_or(OpName::Number(number), OpName::Name),
        dst_name: head.dst_name_bytes(),
    }
}

impl Key<'_> {
    fn kind(&self, layer: Option<LayerId>) -> (String, String) {
        let name = String::from_utf8_lossy(self.dst_name);
        (self.op.to_string(), without_layer(&name, layer))
    }
}

impl OperationKinds {
    fn add(&mut self, key: &Key, operation: &Operation) {
        self.n += 1;
        count(&mut self.kinds, key.kind(operation.head().layer()));
    }
}

fn count<K: Ord>(kinds: &mut BTreeMap<K, u64>, kind: K) {
    if let Some(n) = kinds.get_mut(&kind) {
        *n += 1;
    } else if kinds.len() < MAX_KINDS {
        kinds.insert(kind, 1);
    }
}

/// The name with `N` in place of the layer number: `Qcur-3` becomes `Qcur-N` in layer 3. An unnamed node becomes `node_N`.
fn without_layer(name: &str, layer: Option<LayerId>) -> String {
    if is_unnamed(name.as_bytes()) {
        return "node_N".to_owned();
    }
    let Some(layer) = layer else {
        return name.to_owned();
    };
    let number = layer.to_string();
    let is_digit = |c: Option<char>| c.is_some_and(|c| c.is_ascii_digit());
    let found = name.match_indices(&number).find(|(at, _)| {
        let (before, after) = (&name[..*at], &name[at + number.len()..]);
        !is_digit(before.chars().next_back()) && !is_digit(after.chars().next())
    });
    match found {
        Some((at, _)) => format!("{}N{}", &name[..at], &name[at + number.len()..]),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removes_layer_numbers_from_names() {
        for (name, layer, expected) in [
            ("Qcur-3", Some(3), "Qcur-N"),
            ("cache_k_l12 (view)", Some(12), "cache_k_lN (view)"),
            ("blk.1.attn_q.weight", Some(1), "blk.N.attn_q.weight"),
            ("Qcur-13", Some(3), "Qcur-13"),
            ("Qcur-1 (view 1)", Some(1), "Qcur-N (view 1)"),
            ("result_norm", None, "result_norm"),
            ("", Some(0), ""),
            ("node_31", Some(1), "node_N"),
            ("node_1 (view)", None, "node_N"),
            ("node_x", None, "node_x"),
        ] {
            assert_eq!(without_layer(name, layer.map(LayerId)), expected);
        }
    }
}
