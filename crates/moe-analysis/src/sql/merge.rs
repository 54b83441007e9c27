//! Aggregation in steps: aggregates each step of a table, then the results of the steps.

use std::sync::Arc;

use polars::prelude::*;

use super::plan::{are_elementwise, has_column, input_list_mut, inputs_mut, schema_of, with_input};
use super::steps::Stepped;

/// Number of result rows after which results are merged.
const MERGE_ROWS: usize = 1 << 20;

/// The plan with computed results in place of aggregates that can be computed in steps.
pub(super) fn reduced(plan: DslPlan, step_rows: u64) -> PolarsResult<DslPlan> {
    if let Some(plan) = result_of(&plan, step_rows)? {
        return Ok(plan);
    }
    let mut plan = plan;
    for input in inputs_mut(&mut plan) {
        *input = Arc::new(reduced((**input).clone(), step_rows)?);
    }
    for input in input_list_mut(&mut plan) {
        *input = reduced(std::mem::take(input), step_rows)?;
    }
    Ok(plan)
}

/// A plan that computes an aggregate from the results of steps; `None` for other nodes.
fn result_of(plan: &DslPlan, step_rows: u64) -> PolarsResult<Option<DslPlan>> {
    match plan {
        DslPlan::GroupBy {
            input,
            keys,
            predicates,
            aggs,
            options,
            apply: None,
            ..
        } if **options == GroupbyOptions::default() => {
            aggregate(input, Some(keys), predicates, aggs, step_rows)
        }
        DslPlan::Select { input, expr, .. } => aggregate(input, None, &[], expr, step_rows),
        DslPlan::Distinct { input, .. } => {
            repeated(input, step_rows, |input| with_input(plan, input))
        }
        DslPlan::Slice { input, offset, len } if *offset >= 0 => {
            // Only the first sorted rows of each step are needed.
            let Some((sort, rows)) = sorted(input)? else {
                return Ok(None);
            };
            let n_rows = IdxSize::try_from(*offset)
                .unwrap_or(IdxSize::MAX)
                .saturating_add(*len);
            let first = repeated(rows, step_rows, |rows| DslPlan::Slice {
                input: Arc::new(with_input(sort, rows)),
                offset: 0,
                len: n_rows,
            })?;
            Ok(first.map(|first| with_sorted(plan, &first)))
        }
        _ => Ok(None),
    }
}

/// The sort below projections, and its input.
fn sorted(plan: &DslPlan) -> PolarsResult<Option<(&DslPlan, &DslPlan)>> {
    match plan {
        DslPlan::Sort { input, .. } => Ok(Some((plan, &**input))),
        DslPlan::Select { input, expr, .. }
            if expr.iter().any(has_column) && are_elementwise(expr, schema_of(input)?.as_ref()) =>
        {
            sorted(input)
        }
        _ => Ok(None),
    }
}

/// The plan with another input of the sort that [`sorted`] finds.
fn with_sorted(plan: &DslPlan, rows: &DslPlan) -> DslPlan {
    match plan {
        DslPlan::Slice { input, .. } | DslPlan::Select { input, .. } => {
            with_input(plan, with_sorted(input, rows))
        }
        _ => with_input(plan, rows.clone()),
    }
}

/// Computes a node that can be applied to its own results.
fn repeated(
    input: &DslPlan,
    step_rows: u64,
    node: impl Fn(DslPlan) -> DslPlan,
) -> PolarsResult<Option<DslPlan>> {
    let Some(stepped) = Stepped::of(input, step_rows)? else {
        return Ok(None);
    };
    let apply = |frame: LazyFrame| LazyFrame::from(node(frame.logical_plan));
    Ok(Some(merged(stepped, apply, apply)?.lazy().logical_plan))
}

/// Aggregates by `keys`, or over all rows.
fn aggregate(
    input: &DslPlan,
    keys: Option<&[Expr]>,
    predicates: &[Expr],
    aggs: &[Expr],
    step_rows: u64,
) -> PolarsResult<Option<DslPlan>> {
    let schema = schema_of(input)?;
    let mut parts = Parts {
        schema: &schema,
        exprs: Vec::new(),
    };
    let split = |expr: &Expr, parts: &mut Parts<'_>| -> Option<Expr> {
        let name = expr.to_field(&schema).ok()?.name;
        Some(parts.split(expr)?.alias(name))
    };
    let exprs: Option<Vec<Expr>> = aggs.iter().map(|expr| split(expr, &mut parts)).collect();
    let filters: Option<Vec<Expr>> = predicates.iter().map(|expr| parts.split(expr)).collect();
    let (Some(exprs), Some(filters)) = (exprs, filters) else {
        return Ok(None);
    };
    if parts.exprs.is_empty() || keys.is_some_and(|keys| !are_elementwise(keys, &schema)) {
        return Ok(None);
    }
    let Some(stepped) = Stepped::of(input, step_rows)? else {
        return Ok(None);
    };
    let names = keys.unwrap_or_default().iter();
    let names = names.map(|key| Ok(col(key.to_field(&schema)?.name)));
    let names: Vec<Expr> = names.collect::<PolarsResult<_>>()?;
    let group = |frame: LazyFrame, keys: &[Expr], exprs: Vec<Expr>| match keys {
        [] => frame.select(exprs),
        keys => frame.group_by(keys).agg(exprs),
    };
    let of_step: Vec<Expr> = parts.exprs.iter().map(Part::of_step).collect();
    let of_steps: Vec<Expr> = parts.exprs.iter().map(Part::of_steps).collect();
    let step = |frame: LazyFrame| group(frame, keys.unwrap_or_default(), of_step.clone());
    let merge = |frame: LazyFrame| group(frame, &names, of_steps.clone());
    // Each group has one row, from which the expressions are computed.
    let columns = step(LazyFrame::from(input.clone())).collect_schema()?;
    if !are_elementwise(&exprs, &columns) || !are_elementwise(&filters, &columns) {
        return Ok(None);
    }
    let mut result = merged(stepped, step, merge)?.lazy();
    for filter in filters {
        result = result.filter(filter);
    }
    Ok(Some(result.select([names, exprs].concat()).logical_plan))
}

/// Applies `step` to each step, and `merge` to the results until one result remains.
fn merged(
    stepped: Stepped,
    step: impl Fn(LazyFrame) -> LazyFrame,
    merge: impl Fn(LazyFrame) -> LazyFrame,
) -> PolarsResult<DataFrame> {
    let mut result: Option<DataFrame> = None;
    let mut limit = MERGE_ROWS;
    for plan in stepped.plans() {
        let mut frame = step(plan?).collect()?;
        match &mut result {
            None => result = Some(frame),
            Some(result) => {
                result.vstack_mut(&frame)?;
                if result.height() > limit {
                    frame = merge(std::mem::take(result).lazy()).collect()?;
                    limit = MERGE_ROWS.max(2 * frame.height());
                    *result = frame;
                }
            }
        }
    }
    merge(result.unwrap_or_default().lazy()).collect()
}

/// Function that merges the aggregates of steps.
#[derive(Clone, Copy)]
enum Merge {
    Sum,
    Min { propagate_nans: bool },
    Max { propagate_nans: bool },
}

/// An aggregate that can be merged.
struct Part {
    name: PlSmallStr,
    expr: Expr,
    merge: Merge,
}

impl Part {
    fn of_step(&self) -> Expr {
        self.expr.clone().alias(self.name.clone())
    }

    fn of_steps(&self) -> Expr {
        let input = Arc::new(col(self.name.clone()));
        Expr::Agg(match self.merge {
            Merge::Sum => AggExpr::Sum(input),
            Merge::Min { propagate_nans } => AggExpr::Min {
                input,
                propagate_nans,
            },
            Merge::Max { propagate_nans } => AggExpr::Max {
                input,
                propagate_nans,
            },
        })
    }
}

/// Aggregates from which expressions are computed.
struct Parts<'a> {
    /// Columns to aggregate.
    schema: &'a Schema,
    exprs: Vec<Part>,
}

impl Parts<'_> {
    /// The expression with a column in place of each aggregate. `None` if an aggregate cannot be merged, or if a column
    /// occurs outside of aggregates.
    fn split(&mut self, expr: &Expr) -> Option<Expr> {
        let is_elementwise =
            |input: &Expr| are_elementwise(std::slice::from_ref(input), self.schema);
        Some(match expr {
            Expr::Len => self.part(expr.clone(), Merge::Sum),
            Expr::Agg(AggExpr::Count { input, .. }) if is_elementwise(input) => {
                self.part(expr.clone(), Merge::Sum)
            }
            Expr::Function {
                input,
                function: FunctionExpr::NullCount,
            } if input.iter().all(is_elementwise) => self.part(expr.clone(), Merge::Sum),
            Expr::Agg(AggExpr::Sum(input)) if is_elementwise(input) => {
                self.part(expr.clone(), Merge::Sum)
            }
            &Expr::Agg(AggExpr::Min {
                ref input,
                propagate_nans,
            }) if is_elementwise(input) => self.part(expr.clone(), Merge::Min { propagate_nans }),
            &Expr::Agg(AggExpr::Max {
                ref input,
                propagate_nans,
            }) if is_elementwise(input) => self.part(expr.clone(), Merge::Max { propagate_nans }),
            Expr::Agg(AggExpr::Mean(input)) if is_elementwise(input) => {
                let values = (**input).clone();
                let sum = self.part(values.clone().cast(DataType::Float64).sum(), Merge::Sum);
                let n = self.part(values.count(), Merge::Sum);
                when(n.clone().gt(lit(0)))
                    .then(sum / n)
                    .otherwise(lit(NULL))
            }
            Expr::Literal(_) => expr.clone(),
            Expr::Alias(input, name) => self.split(input)?.alias(name.clone()),
            Expr::Cast {
                expr,
                dtype,
                options,
            } => Expr::Cast {
                expr: Arc::new(self.split(expr)?),
                dtype: dtype.clone(),
                options: *options,
            },
            Expr::BinaryExpr { left, op, right } => Expr::BinaryExpr {
                left: Arc::new(self.split(left)?),
                op: *op,
                right: Arc::new(self.split(right)?),
            },
            Expr::Ternary {
                predicate,
                truthy,
                falsy,
            } => Expr::Ternary {
                predicate: Arc::new(self.split(predicate)?),
                truthy: Arc::new(self.split(truthy)?),
                falsy: Arc::new(self.split(falsy)?),
            },
            Expr::Function { input, function } => Expr::Function {
                input: input
                    .iter()
                    .map(|expr| self.split(expr))
                    .collect::<Option<_>>()?,
                function: function.clone(),
            },
            _ => return None,
        })
    }

    /// Column of an aggregate.
    fn part(&mut self, expr: Expr, merge: Merge) -> Expr {
        let name = format!("aggregate {}", self.exprs.len());
        // Counts of a step, and sums of Booleans, have 32 bits.
        let is_small = expr
            .to_field(self.schema)
            .is_ok_and(|field| *field.dtype() == DataType::UInt32);
        self.exprs.push(Part {
            name: name.as_str().into(),
            expr: if is_small {
                expr.cast(DataType::Int64)
            } else {
                expr
            },
            merge,
        });
        col(name)
    }
}
