//! Plans that process rows independently, executed on parts of a table in steps.

use std::sync::Arc;

use polars::prelude::*;

use super::plan::{are_elementwise, has_column, input_list_mut, inputs_mut, schema_of, with_input};
use super::scan::Scan;

/// Results of a plan, computed on demand.
pub(super) type Frames = Box<dyn Iterator<Item = PolarsResult<DataFrame>> + Send>;

/// A plan whose result for a table is the concatenation of its results for the parts of the table.
pub(super) struct Stepped {
    plan: DslPlan,
    /// The scan in `plan` that is executed in steps.
    scan: Arc<Scan>,
    step_rows: u64,
}

impl Stepped {
    /// The stepped plan. `None` for a plan that needs all rows at the same time, or that reads no table with more than
    /// `step_rows` rows.
    pub(super) fn of(plan: &DslPlan, step_rows: u64) -> PolarsResult<Option<Self>> {
        let Some((plan, scan)) = row_by_row(plan)? else {
            return Ok(None);
        };
        Ok((scan.n_rows() > step_rows).then_some(Self {
            plan,
            scan,
            step_rows,
        }))
    }

    /// The plan for each step.
    pub(super) fn plans(self) -> impl Iterator<Item = PolarsResult<LazyFrame>> {
        let steps = self.scan.steps(self.step_rows).into_iter();
        steps.map(move |parts| {
            let step = self.scan.step(parts).plan()?;
            Ok(LazyFrame::from(with_scan(&self.plan, &self.scan, &step)))
        })
    }
}

/// Results of a plan: step by step if it processes rows independently, otherwise in one frame.
pub(super) fn frames(plan: DslPlan, step_rows: u64) -> PolarsResult<Frames> {
    if let Some(stepped) = Stepped::of(&plan, step_rows)? {
        return Ok(Box::new(stepped.plans().map(|plan| plan?.collect())));
    }
    if let DslPlan::Slice { input, offset, len } = &plan
        && let Ok(offset) = usize::try_from(*offset)
        && let Some(stepped) = Stepped::of(input, step_rows)?
    {
        return Ok(Box::new(sliced(stepped, offset, *len as usize)));
    }
    let frame = LazyFrame::from(plan).collect()?;
    Ok(Box::new(std::iter::once(Ok(frame))))
}

/// At most `len` rows from `offset` on. Steps after them are not executed.
fn sliced(
    stepped: Stepped,
    mut offset: usize,
    mut len: usize,
) -> impl Iterator<Item = PolarsResult<DataFrame>> {
    let mut plans = stepped.plans();
    std::iter::from_fn(move || {
        if len == 0 {
            return None;
        }
        let frame = plans.next()?.and_then(LazyFrame::collect);
        Some(frame.map(|frame| {
            let start = offset.min(frame.height());
            let rows = frame.slice(start as i64, len);
            offset -= start;
            len -= rows.height();
            rows
        }))
    })
}

/// The plan and its scan that can be executed in steps, if each result row depends on one row of that scan only.
fn row_by_row(plan: &DslPlan) -> PolarsResult<Option<(DslPlan, Arc<Scan>)>> {
    if let Some(scan) = Scan::of(plan) {
        // Makes a new scan, because the plan may read the table elsewhere too.
        let scan = Arc::new((*scan).clone());
        return Ok(Some((scan.plan()?, scan)));
    }
    let (input, exprs) = match plan {
        DslPlan::Filter { input, predicate } => (input, std::slice::from_ref(predicate)),
        DslPlan::HStack { input, exprs, .. } => (input, &exprs[..]),
        // A selection of literals only has one row, independent of the number of input rows.
        DslPlan::Select { input, expr, .. } if expr.iter().any(has_column) => (input, &expr[..]),
        DslPlan::Join {
            input_left,
            input_right,
            predicates,
            options,
            ..
        } if predicates.is_empty() => {
            return join(plan, [input_left, input_right], &options.args.how);
        }
        _ => return Ok(None),
    };
    if !are_elementwise(exprs, schema_of(input)?.as_ref()) {
        return Ok(None);
    }
    let below = row_by_row(input)?;
    Ok(below.map(|(input, scan)| (with_input(plan, input), scan)))
}

/// A join with one side in steps. Each step computes the other side from rows that are read once.
fn join(
    plan: &DslPlan,
    inputs: [&DslPlan; 2],
    how: &JoinType,
) -> PolarsResult<Option<(DslPlan, Arc<Scan>)>> {
    let left = match how {
        JoinType::Inner | JoinType::Left | JoinType::Semi | JoinType::Anti => {
            row_by_row(inputs[0])?
        }
        _ => None,
    };
    let right = match how {
        JoinType::Inner | JoinType::Right => row_by_row(inputs[1])?,
        _ => None,
    };
    let n_rows = |side: &Option<(DslPlan, Arc<Scan>)>| side.as_ref().map(|(_, scan)| scan.n_rows());
    let (side, stepped) = if n_rows(&right) > n_rows(&left) {
        (1, right)
    } else {
        (0, left)
    };
    let Some((input, scan)) = stepped else {
        return Ok(None);
    };
    let mut plan = plan.clone();
    let mut sides = inputs_mut(&mut plan);
    *sides[side] = Arc::new(input);
    *sides[1 - side] = Arc::new(memoized(inputs[1 - side])?);
    Ok(Some((plan, scan)))
}

/// The plan with scans that keep their rows in memory.
fn memoized(plan: &DslPlan) -> PolarsResult<DslPlan> {
    if let Some(scan) = Scan::of(plan) {
        return scan.memoized().plan();
    }
    let mut plan = plan.clone();
    for input in inputs_mut(&mut plan) {
        *input = Arc::new(memoized(input)?);
    }
    for input in input_list_mut(&mut plan) {
        *input = memoized(input)?;
    }
    Ok(plan)
}

/// The plan with another node in place of a scan.
fn with_scan(plan: &DslPlan, scan: &Arc<Scan>, replacement: &DslPlan) -> DslPlan {
    if Scan::of(plan).is_some_and(|found| Arc::ptr_eq(&found, scan)) {
        return replacement.clone();
    }
    let mut plan = plan.clone();
    for input in inputs_mut(&mut plan) {
        *input = Arc::new(with_scan(input, scan, replacement));
    }
    plan
}
