//! The output of a plan.

use std::collections::BTreeMap;
use std::io::{self, Write};

use moe_files::text::counted;
use moe_placement::plan::{ExpertRank, Explanation, PlanVerdict, Selected};
use moe_placement::{ExpertId, LayerId};
use serde_json::{Value, json};

use super::Planned;
use super::command_line::{
    HotCache, Stock, caveats, fraction, hits_by_layer, hot_cache, own_hot_cache,
};
use super::memory_report;
use crate::output::{self, Format, Table, fixed, human_bytes};

/// Maximum number of experts per layer in the summary.
const N_NAMED: usize = 12;

/// Prints a plan: a summary, rows of its experts, one JSON object, or the explanations of `--explain`.
pub fn print(planned: &Planned) -> anyhow::Result<()> {
    output::to_stdout(planned.args.output, |out| match planned.args.output {
        Some(Format::Json) => {
            serde_json::to_writer_pretty(&mut *out, &to_json(planned))?;
            writeln!(out)
        }
        Some(format) if planned.explanations.is_empty() => write_selected(out, format, planned),
        None if planned.explanations.is_empty() => write_summary(out, planned),
        Some(format) => write_explanations(out, format, &planned.explanations),
        None => {
            for explanation in &planned.explanations {
                writeln!(out, "{explanation}")?;
            }
            Ok(())
        }
    })
}

/// Returns the fraction of activations of experts in the cache, 0 to 1.
fn hit_rate(planned: &Planned) -> f64 {
    let cached = planned
        .plan
        .selected()
        .map(|(_, selected)| selected.entry.hits);
    let total = planned.ranking.iter().map(|entry| entry.hits);
    fraction(
        cached.fold(0, u64::saturating_add),
        total.fold(0, u64::saturating_add),
    )
}

fn write_selected(out: &mut dyn Write, format: Format, planned: &Planned) -> io::Result<()> {
    let selected = planned.plan.selected();
    let selected = selected.map(|(lane, selected)| (lane, selected.bytes, &selected.entry));
    Table::of(selected)
        .column("layer", "layer", |(.., entry)| entry.layer)
        .column("expert", "expert", |(.., entry)| entry.expert)
        .column("bytes", "size (bytes)", |&(_, bytes, _)| bytes)
        .column("score", "score", |(.., entry)| entry.score)
        .column("lane", "lane", |&(lane, ..)| lane)
        .column("hits", "activations", |(.., entry)| entry.hits)
        .write(out, format)
}

fn write_explanations(
    out: &mut dyn Write,
    format: Format,
    explanations: &[Explanation],
) -> io::Result<()> {
    let ranked = |explanation: &&Explanation| explanation.rank;
    Table::of(explanations)
        .column("layer", "layer", |explanation| explanation.layer)
        .column("expert", "expert", |explanation| explanation.expert)
        .column("cached", "cached", |explanation| {
            if explanation.is_in() { "yes" } else { "no" }
        })
        .column("hits", "activations", move |explanation| {
            Some(ranked(explanation)?.hits)
        })
        .column("score", "score", move |explanation| {
            Some(ranked(explanation)?.score)
        })
        .column("place", "rank", move |explanation| {
            Some(ranked(explanation)?.rank)
        })
        .column("why", "reason", |explanation| explanation.to_string())
        .write(out, format)
}

/// Experts of a layer in a lane.
#[derive(Default)]
struct LayerRow {
    experts: Vec<ExpertId>,
    hits: u64,
    bytes: u64,
}

fn write_summary(out: &mut dyn Write, planned: &Planned) -> io::Result<()> {
    let hits = hits_by_layer(&planned.ranking);
    let mut layers: BTreeMap<(LayerId, usize), LayerRow> = BTreeMap::new();
    for (lane, selected) in planned.plan.selected() {
        let row = layers.entry((selected.entry.layer, lane)).or_default();
        if row.experts.is_empty() {
            row.bytes = selected.bytes; // the empty expert
        }
        row.experts.push(selected.entry.expert);
        row.hits = row.hits.saturating_add(selected.entry.hits);
        row.bytes = row.bytes.saturating_add(selected.bytes);
    }
    Table::of(&layers)
        .shown("layer", |&(&(layer, _), _)| layer)
        .shown("lane", |&(&(_, lane), _)| lane)
        .shown("cached experts", |(_, row)| row.experts.len())
        .shown("size (bytes)", |(_, row)| row.bytes)
        .shown("expected hit rate (%)", |((layer, _), row)| {
            let total = hits.get(layer).copied().unwrap_or(0);
            fixed(100.0 * fraction(row.hits, total), 1)
        })
        .shown("experts, hottest first", |(_, row)| {
            let named: Vec<String> = row
                .experts
                .iter()
                .take(N_NAMED)
                .map(ExpertId::to_string)
                .collect();
            let more = if row.experts.len() > N_NAMED {
                " …"
            } else {
                ""
            };
            format!("{}{more}", named.join(" "))
        })
        .write(out, Format::Table)?;
    writeln!(out)?;
    for (number, lane) in planned.plan.lanes.iter().enumerate() {
        writeln!(
            out,
            "lane {number}: {}, and an empty expert in each of {}; {} of {}",
            counted(lane.selected.len() as u64, "expert"),
            counted(lane.n_layers() as u64, "layer"),
            human_bytes(lane.used_bytes),
            human_bytes(lane.budget_bytes)
        )?;
    }
    writeln!(
        out,
        "expected hit rate: {:.1} % (estimate: in-sample hit rate of the learn file)",
        100.0 * hit_rate(planned)
    )?;
    writeln!(out)?;
    if let Some(memory) = &planned.memory {
        memory_report::write(out, memory, &planned.plan)?;
    }
    writeln!(out, "hot cache (moe-analyze): {}", own_hot_cache(planned))?;
    writeln!(out, "hot cache (llama.cpp fork): {}", hot_cache(planned))?;
    for caveat in caveats(planned) {
        writeln!(out, "  note: {caveat}")?;
    }
    let stock = Stock::new(planned);
    let command = stock.command.as_deref().unwrap_or_else(|why| *why);
    writeln!(out, "upstream llama.cpp: {command}")?;
    writeln!(
        out,
        "  experts of {} of {} on the GPU, {}; expected hit rate {:.1} % (estimate)",
        stock.layers.len(),
        counted(planned.experts.layer_bytes.len() as u64, "layer"),
        human_bytes(stock.bytes),
        100.0 * stock.hit_rate
    )
}

fn to_json(planned: &Planned) -> Value {
    let Planned {
        args,
        weighing,
        plan,
        ..
    } = planned;
    let lanes = plan.lanes.iter().map(|lane| {
        json!({
            "budget_bytes": lane.budget_bytes,
            "used_bytes": lane.used_bytes,
            "experts": lane.selected.len(),
            "layers": lane.n_layers(),
        })
    });
    let selected = plan.selected().map(|(lane, selected)| {
        let Selected { entry, bytes } = selected;
        json!({
            "layer": entry.layer,
            "expert": entry.expert,
            "bytes": bytes,
            "score": entry.score,
            "lane": lane,
            "hits": entry.hits,
        })
    });
    let stock = Stock::new(planned);
    let hot_cache = hot_cache(planned);
    let mut caveats = caveats(planned);
    if let HotCache::Unavailable(why) = hot_cache {
        caveats.insert(0, why);
    }
    let own = own_hot_cache(planned);
    let own_caveats = match own {
        HotCache::Unavailable(why) => vec![why],
        HotCache::Command(_) | HotCache::Empty => Vec::new(),
    };
    json!({
        "weighting": weighing.weighting.name(),
        "layer_curve": weighing.curve.get(),
        "strategy": args.strategy.name(),
        "lanes": lanes.collect::<Vec<_>>(),
        "estimated_hit_share": hit_rate(planned),
        "memory": planned.memory.as_ref().map(|memory| memory_report::to_json(memory, plan)),
        "moe_analyze": {"command": own.command(), "caveats": own_caveats},
        "hot_cache": {"command": hot_cache.command(), "caveats": caveats},
        "llama_cpp": {
            "command": stock.command.ok(),
            "layers_on_gpu": stock.layers,
            "expert_bytes_on_gpu": stock.bytes,
            "estimated_hit_share": stock.hit_rate,
        },
        "explanations": planned.explanations.iter().map(explanation).collect::<Vec<_>>(),
        "selected": selected.collect::<Vec<_>>(),
    })
}

fn explanation(explanation: &Explanation) -> Value {
    let mut object = json!({
        "layer": explanation.layer,
        "expert": explanation.expert,
        "cached": explanation.is_in(),
        "why": explanation.to_string(),
    });
    if let Some(ExpertRank {
        hits,
        score,
        rank,
        n_ranked,
    }) = explanation.rank
    {
        object["hits"] = json!(hits);
        object["score"] = json!(score);
        object["place"] = json!(rank);
        object["of"] = json!(n_ranked);
    }
    match explanation.verdict {
        Some(PlanVerdict::Taken { lane, bytes, cost }) => {
            object["lane"] = json!(lane);
            object["bytes"] = json!(bytes);
            object["cost"] = json!(cost);
        }
        Some(PlanVerdict::NoRoom { lane, cost, free }) => {
            object["lane"] = json!(lane);
            object["cost"] = json!(cost);
            object["free"] = json!(free);
        }
        _ => {}
    }
    object
}
