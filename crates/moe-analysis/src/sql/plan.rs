//! polars plans: inputs of nodes, and properties of expressions.

use std::sync::Arc;

use polars::prelude::*;
use polars_plan::prelude::{Arena, ExprToIRContext, is_elementwise_rec, to_expr_ir};

/// The plan without cached intermediate representations and with signed counts: COUNT(a) - COUNT(b) may be negative.
pub(super) fn prepared(plan: &DslPlan) -> DslPlan {
    if let DslPlan::IR { dsl, .. } = plan {
        return prepared(dsl);
    }
    let mut plan = plan.clone();
    match &mut plan {
        DslPlan::Select { expr: exprs, .. }
        | DslPlan::HStack { exprs, .. }
        | DslPlan::Sort {
            by_column: exprs, ..
        } => exprs.iter_mut().for_each(make_counts_signed),
        DslPlan::GroupBy {
            aggs, predicates, ..
        } => aggs
            .iter_mut()
            .chain(predicates)
            .for_each(make_counts_signed),
        DslPlan::Filter { predicate, .. } => make_counts_signed(predicate),
        _ => {}
    }
    if let DslPlan::Sort {
        by_column,
        sort_options,
        ..
    } = &mut plan
    {
        repeat_single_key(by_column, sort_options);
    }
    for input in inputs_mut(&mut plan) {
        *input = Arc::new(prepared(input));
    }
    for input in input_list_mut(&mut plan) {
        *input = prepared(input);
    }
    plan
}

/// Repeats a single sort key. With a single key and a limit, polars 0.55 filters the rows of the scan by a predicate that changes
/// while it sorts, and panics when it converts this predicate for an anonymous scan.
fn repeat_single_key(keys: &mut Vec<Expr>, options: &mut SortMultipleOptions) {
    if keys.len() != 1 {
        return;
    }
    keys.extend_from_within(..);
    for flags in [&mut options.descending, &mut options.nulls_last] {
        if flags.len() == 1 {
            flags.extend_from_within(..);
        }
    }
}

fn make_counts_signed(expr: &mut Expr) {
    let old = std::mem::replace(expr, Expr::Len);
    *expr = old.map_expr(|expr| match expr {
        Expr::Len | Expr::Agg(AggExpr::Count { .. } | AggExpr::NUnique(_)) => {
            expr.cast(DataType::Int64)
        }
        expr => expr,
    });
}

/// Input plans of a node.
pub(super) fn inputs_mut(plan: &mut DslPlan) -> Vec<&mut Arc<DslPlan>> {
    match plan {
        DslPlan::Filter { input, .. }
        | DslPlan::Cache { input, .. }
        | DslPlan::Select { input, .. }
        | DslPlan::GroupBy { input, .. }
        | DslPlan::HStack { input, .. }
        | DslPlan::MatchToSchema { input, .. }
        | DslPlan::Distinct { input, .. }
        | DslPlan::Sort { input, .. }
        | DslPlan::Slice { input, .. }
        | DslPlan::MapFunction { input, .. }
        | DslPlan::ExtContext { input, .. } => vec![input],
        DslPlan::Join {
            input_left,
            input_right,
            ..
        } => vec![input_left, input_right],
        _ => Vec::new(),
    }
}

/// Input plans of a node with any number of inputs.
pub(super) fn input_list_mut(plan: &mut DslPlan) -> &mut [DslPlan] {
    match plan {
        DslPlan::Union { inputs, .. } | DslPlan::HConcat { inputs, .. } => inputs,
        DslPlan::ExtContext { contexts, .. } => contexts,
        _ => &mut [],
    }
}

/// A copy of the node with another first input.
pub(super) fn with_input(plan: &DslPlan, input: DslPlan) -> DslPlan {
    let mut plan = plan.clone();
    if let [old, ..] = &mut inputs_mut(&mut plan)[..] {
        **old = Arc::new(input);
    }
    plan
}

/// Columns of a plan.
pub(super) fn schema_of(plan: &DslPlan) -> PolarsResult<SchemaRef> {
    LazyFrame::from(plan.clone()).collect_schema()
}

/// Whether expressions compute each row from that row only.
pub(super) fn are_elementwise(exprs: &[Expr], schema: &Schema) -> bool {
    exprs.iter().all(|expr| {
        let mut arena = Arena::new();
        let mut context = ExprToIRContext::new(&mut arena, schema);
        to_expr_ir(expr.clone(), &mut context)
            .is_ok_and(|expr| is_elementwise_rec(expr.node(), &arena))
    })
}

/// Whether an expression refers to a column.
pub(super) fn has_column(expr: &Expr) -> bool {
    expr.into_iter().any(|expr| matches!(expr, Expr::Column(_)))
}
