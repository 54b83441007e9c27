/** Filtering and sorting of records: arrays of row numbers. */
import { rowsInTime } from "./analysis";
import type { Records } from "./data";
import type { Dataset } from "./dataset";
import type { Selection } from "./selection";

export type SortKey = "index" | "start" | "duration" | "token" | "layer" | "op" | "name" | "tensor" | "experts" | "bytes";

export interface RowFilter {
  op: string | null;
  text: string;
  /** Also omit the rows outside the selection. */
  selection: Selection | null;
}

/** Returns a function that reports whether a record belongs to the selection (time range excluded). */
export function matcher(data: Dataset, s: Selection): ((row: number) => boolean) | null {
  const { records, routing } = data;
  if (!records) return null;
  const { layer, token, tensor, name, route } = records;
  const tests: ((row: number) => boolean)[] = [];
  if (s.layer !== null) tests.push((i) => layer[i] === s.layer);
  if (s.token !== null) tests.push((i) => token[i] === s.token);
  if (s.tensor !== null) {
    const t = data.tensorIndex.get(s.tensor) ?? -2;
    tests.push((i) => tensor[i] === t);
  }
  if (s.name !== null) {
    const n = data.input.names.indexOf(s.name);
    tests.push((i) => name[i] === n);
  }
  if (s.expert !== null) {
    const experts = routing?.experts ?? [];
    tests.push((i) => route[i] >= 0 && experts.some((column) => column[route[i]] === s.expert));
  }
  if (tests.length === 0 && !s.time) return null;
  return (row) => tests.every((test) => test(row));
}

export function filterRows(data: Dataset, filter: RowFilter): Uint32Array {
  const records = data.records!;
  const { selection } = filter;
  const [from, to] = selection ? rowsInTime(records.start, selection.time) : [0, records.rows];
  const match = selection ? matcher(data, selection) : null;
  const op = filter.op === null ? -1 : data.input.ops.indexOf(filter.op);
  const words = filter.text.toLowerCase();
  const names = words ? data.input.names.map((n) => n.toLowerCase().includes(words)) : null;
  const tensors = words ? data.input.tensors.map((t) => t.name.toLowerCase().includes(words)) : null;
  const rows = new Uint32Array(to - from);
  let n = 0;
  for (let i = from; i < to; i++) {
    if (filter.op !== null && records.op[i] !== op) continue;
    if (names && !names[records.name[i]] && !tensors![records.tensor[i]]) continue;
    if (match && !match(i)) continue;
    rows[n++] = i;
  }
  return rows.slice(0, n);
}

/** Sorts row numbers by a column; equal values keep their order. */
export function sortRows(data: Dataset, rows: Uint32Array, key: SortKey, descending: boolean): Uint32Array {
  const records = data.records!;
  if (key === "index" || key === "start") return descending ? rows.slice().reverse() : rows;
  const value = sortValues(data, records, key);
  const keys = new Float64Array(rows.length);
  for (let i = 0; i < rows.length; i++) keys[i] = value(rows[i]);
  if (descending) {
    let max = 0;
    for (const k of keys) if (k > max) max = k;
    for (let i = 0; i < keys.length; i++) keys[i] = max - keys[i];
  } else for (let i = 0; i < keys.length; i++) keys[i] += 1;
  return radixSort(rows, keys);
}

function sortValues(data: Dataset, records: Records, key: SortKey): (row: number) => number {
  const ranked = (column: Int32Array, texts: string[]) => {
    const rank = rankTexts(texts);
    return (i: number) => (column[i] < 0 ? -1 : rank[column[i]]);
  };
  if (key === "op") return ranked(records.op, data.input.ops);
  if (key === "name") return ranked(records.name, data.input.names);
  if (key === "tensor") return ranked(records.tensor, data.input.tensors.map((t) => t.name));
  if (key === "experts") {
    const best = data.routing?.experts[0];
    return (i) => (records.route[i] < 0 || !best ? -1 : best[records.route[i]]);
  }
  const column = records[key as "duration" | "token" | "layer" | "bytes"];
  return (i) => column[i];
}

/** Position of each text in the order in which numbers are compared as numbers: blk.2 is before blk.10. */
function rankTexts(texts: string[]): Float64Array {
  const { compare } = new Intl.Collator("en", { numeric: true });
  const rank = new Float64Array(texts.length);
  texts.map((_, i) => i).sort((a, b) => compare(texts[a], texts[b])).forEach((text, i) => (rank[text] = i));
  return rank;
}

/** Stable radix sort by non-negative numbers, whose bits have the same order as the numbers. */
export function radixSort(rows: Uint32Array, keys: Float64Array): Uint32Array {
  const digits = new Uint16Array(keys.buffer);
  let order = new Uint32Array(rows.length).map((_, i) => i);
  let next = new Uint32Array(rows.length);
  const counts = new Uint32Array(65537);
  for (let digit = 0; digit < 4; digit++) {
    counts.fill(0);
    for (let i = 0; i < rows.length; i++) counts[digits[4 * i + digit] + 1]++;
    if (counts.includes(rows.length)) continue;
    for (let i = 0; i < 65536; i++) counts[i + 1] += counts[i];
    for (let i = 0; i < rows.length; i++) next[counts[digits[4 * order[i] + digit]]++] = order[i];
    [order, next] = [next, order];
  }
  return order.map((i) => rows[i]);
}
