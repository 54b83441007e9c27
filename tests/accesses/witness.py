"""Recomputes the access report from the Parquet tables of a run, with DuckDB and plain Python, and compares."""

import json
import sys
from collections import defaultdict
from pathlib import Path

import duckdb

tables, run, report = (Path(arg) for arg in sys.argv[1:])
db = duckdb.connect()
for table in ("ops", "accesses"):
    db.execute(f"create view {table} as select * from '{tables / table}.parquet'")
db.execute(f"create view map as select * from '{run / 'gguf-map.parquet'}'")

# A pass of this program's runs starts with the lookup of embeddings. The map contains layer and category of a tensor; a row of
# biases belongs to an expert, too.
db.execute("""
    create table passes as
    select *, sum((dst_name = 'embd')::int) over (order by op_index) as pass from ops
""")
db.execute("""
    create table read as
    with tensors as (
        select tensor, any_value(layer_id) as layer, any_value(category) as category from map group by tensor
    )
    select p.pass, p.phase, p.op_index, a.source, a.expert_id, a.file_offset, a.size_bytes, p.timestamp_ns,
           p.timestamp_ns + coalesce(p.duration_ns, 0) as end_ns, t.layer, a.tensor,
           row_number() over (order by p.op_index, a.source, a.expert_id nulls first) as place
    from accesses a join passes p using (op_index) join tensors t using (tensor)
    where a.memory_source = 'DISK' and p.op <> 'GET_ROWS'
    order by place
""")


def table(name):
    return json.loads((report / f"{name}.json").read_text())


def near(a, b):
    return abs(a - b) <= 1e-9 * max(1.0, abs(a), abs(b))


def rows(sql):
    cursor = db.execute(sql)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row)) for row in cursor.fetchall()]


figures = {(row["figure"], row["phase"]): row["value"] for row in table("figures")}
n_compared = 0


def check(figure, phase, value):
    global n_compared
    assert near(figures[figure, phase], value), (figure, phase, figures[figure, phase], value)
    n_compared += 1


for row in rows("""
    with tokens as (select pass, phase, max(n_tokens) as n from passes group by all),
         per_pass as (select pass, phase, sum(size_bytes) as bytes from read group by all)
    select t.phase, count(*) as passes, sum(n) as tokens, sum(bytes) as bytes, min(bytes) as low, max(bytes) as high
    from tokens t join per_pass using (pass) group by t.phase
"""):
    phase = row["phase"]
    check("passes", phase, row["passes"])
    check("tokens", phase, row["tokens"])
    check("bytes", phase, row["bytes"])
    check("bytes_per_token", phase, row["bytes"] / row["tokens"])
    check("min_bytes_of_a_pass", phase, row["low"])
    check("max_bytes_of_a_pass", phase, row["high"])
for row in rows("select phase, count(*) as n, sum(size_bytes) filter (expert_id is not null) as bytes from read group by phase"):
    check("accesses", row["phase"], row["n"])
    check("expert_bytes", row["phase"], row["bytes"])

steps = rows("""
    with layers as (
        select pass, place, layer, lag(layer) over (partition by pass order by place) as before
        from read where layer is not null
    )
    select count(*) filter (layer <> before) as steps, count(*) filter (layer = before + 1) as next,
           count(*) filter (layer < before) as back, count(distinct pass) as passes
    from layers
""")[0]
check("layer_steps", None, steps["steps"])
check("layer_steps_to_next", None, steps["next"])
check("layer_steps_back", None, steps["back"])
check("passes_with_layers", None, steps["passes"])

db.execute("""
    create table seeks as
    select size_bytes, file_offset::bigint - lag(file_offset + size_bytes) over (order by place)::bigint as distance from read
""")
seeks = rows("""
    select count(distance) as n, sum(size_bytes) filter (distance is not null) as bytes,
           count(*) filter (distance >= 0 and distance < 32) as sequential,
           sum(size_bytes) filter (distance >= 0 and distance < 32) as sequential_bytes,
           sum(abs(distance)) filter (distance < 0 or distance >= 32) as far
    from seeks
""")[0]
check("seek_accesses", None, seeks["n"])
check("seek_bytes", None, seeks["bytes"])
check("sequential_accesses", None, seeks["sequential"])
check("sequential_bytes", None, seeks["sequential_bytes"])
check("seek_distance", None, seeks["far"])
for bucket in table("seeks"):
    below = bucket["below"] if bucket["below"] is not None else 1 << 62
    sign = ">=" if bucket["direction"] == "forward" else "<"
    n, size = db.execute(f"""
        select count(*), sum(size_bytes) from seeks
        where distance {sign} 0 and abs(distance) >= {bucket["from"]} and abs(distance) < {below}
    """).fetchone()
    assert (bucket["accesses"], bucket["bytes"]) == (n, size), bucket

lookups = rows(f"""
    select count(*) as n, sum(n_tokens) as rows, sum(n_tokens * row_size) as bytes
    from passes join accesses using (op_index) join (
        select tensor, size_bytes // ne1 as row_size from map
    ) using (tensor)
    where op = 'GET_ROWS' and memory_source = 'DISK'
""")[0]
check("lookups", None, lookups["n"])
check("lookup_rows", None, lookups["rows"])
check("lookup_bytes", None, lookups["bytes"])

# Working sets, computed from the ranges.
generated = sorted(row["pass"] for row in rows("select distinct pass from read where phase = 'GENERATE'"))
ranges = defaultdict(dict)
experts = defaultdict(set)
for row in rows("select pass, file_offset, size_bytes, layer, expert_id from read where phase = 'GENERATE'"):
    ranges[row["pass"]][row["file_offset"]] = row["size_bytes"]
    if row["expert_id"] is not None:
        experts[row["pass"]].add((row["layer"], row["expert_id"]))
for working_set in table("working-sets"):
    n = working_set["tokens"]
    sizes, touched = [], []
    for at in range(0, len(generated) - n + 1, n):
        window = {}
        chosen = set()
        for one in generated[at : at + n]:
            window |= ranges[one]
            chosen |= experts[one]
        sizes.append(sum(window.values()))
        touched.append(len(chosen))
    assert working_set["windows"] == len(sizes), working_set
    if sizes:
        assert near(working_set["mean_bytes"], sum(sizes) / len(sizes)), working_set
        assert (working_set["min_bytes"], working_set["max_bytes"]) == (min(sizes), max(sizes)), working_set
        assert near(working_set["mean_experts"], sum(touched) / len(touched)), working_set

# Reuse, computed from a list in the order of use.
size_of = defaultdict(int)
for row in rows("select distinct layer, expert_id, file_offset, tensor, size_bytes from read"):
    key = (row["layer"], row["expert_id"]) if row["expert_id"] is not None else row["tensor"]
    size_of[key] += row["size_bytes"]
n_tokens = dict(db.execute("select pass, max(n_tokens) from passes group by pass").fetchall())
clock, clock_of, stack, last = 0, {}, [], {}
found = defaultdict(list)
uses = defaultdict(int)
current = None
for row in rows("select pass, layer, expert_id, tensor from read order by place"):
    if row["pass"] != current:
        clock += n_tokens.get(current, 0)
        current, used = row["pass"], set()
    expert = row["expert_id"] is not None
    key = (row["layer"], row["expert_id"]) if expert else row["tensor"]
    if key in used:
        continue
    used.add(key)
    uses[key] += expert
    if key in last:
        at = stack.index(key)
        if expert:
            found[key].append((clock - last[key], sum(size_of[other] for other in stack[at + 1 :])))
        stack.pop(at)
    stack.append(key)
    last[key] = clock
told = {(row["layer_id"], row["expert_id"]): row for row in table("experts")}
assert told.keys() == {key for key in uses if uses[key]}
for key, row in told.items():
    assert row["uses"] == uses[key] and row["size_bytes"] == size_of[key], (row, uses[key], size_of[key])
    for i, unit in enumerate(("tokens", "bytes")):
        distances = [pair[i] for pair in found[key]]
        expected = [min(distances), max(distances)] if distances else [None, None]
        assert [row[f"min_{unit}"], row[f"max_{unit}"]] == expected, (row, distances)
        if distances:
            assert near(row[f"mean_{unit}"], sum(distances) / len(distances)), (row, distances)
check("expert_uses", None, sum(uses.values()))
check("expert_reuses", None, sum(map(len, found.values())))
for i, unit in enumerate(("tokens", "bytes")):
    buckets = [row for row in table("reuse") if row["distance"] == unit]
    values = [pair[i] for pairs in found.values() for pair in pairs]
    assert sum(row["reuses"] for row in buckets) == len(values)
    for row in buckets:
        assert row["reuses"] == sum(row["from"] <= value < row["below"] for value in values), row
check("experts_touched", None, len(told))
check("experts", None, db.execute("select count(distinct (layer_id, expert_id)) from map where expert_id is not null").fetchone()[0])
check("model_bytes", None, db.execute("select sum(size_bytes) from map").fetchone()[0])

layers = {(row["layer_id"], row["phase"]): row for row in table("layers")}
for row in rows("""
    with spans as (
        select layer, phase, pass, max(end_ns) - min(timestamp_ns) as span from read where layer is not null group by all
    ), bytes as (
        select layer, phase, sum(size_bytes) as bytes, count(distinct expert_id) as experts from read group by all
    )
    select b.layer, b.phase, b.bytes, b.experts, avg(span) as mean, min(span) as low, max(span) as high
    from bytes b left join spans s on s.layer = b.layer and s.phase = b.phase group by all
"""):
    told = layers.pop((row["layer"], row["phase"]))
    assert told["bytes"] == row["bytes"], (told, row)
    if row["layer"] is not None:
        assert told["experts_touched"] == row["experts"], (told, row)
        assert near(told["span_mean_ns"], row["mean"]), (told, row)
        assert (told["span_min_ns"], told["span_max_ns"]) == (row["low"], row["high"]), (told, row)
assert not layers
print(f"{n_compared} figures and {len(uses)} units agree")
