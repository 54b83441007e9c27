/** Counts over the tables. Each function takes columns and returns typed arrays. */
import type { Dataset } from "./dataset";
import type { Selection } from "./selection";

/** First index whose value is at least `value` in an ascending array. */
export function lowerBound(values: ArrayLike<number>, value: number): number {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const mid = (low + high) >>> 1;
    if (values[mid] < value) low = mid + 1;
    else high = mid;
  }
  return low;
}

/** Rows of an ascending column `start` in a time range, its end excluded. */
export function rowsInTime(start: Float64Array, time: [number, number] | null): [number, number] {
  return time ? [lowerBound(start, time[0]), lowerBound(start, time[1])] : [0, start.length];
}

/** Selections of each expert, `layerRow * maxExperts + expert`, of a token or a time range. */
export function countExperts(data: Dataset, token: number | null, time: [number, number] | null, out?: Uint32Array): Uint32Array {
  const { routing, byToken, maxExperts, layerRow } = data;
  const counts = out ?? new Uint32Array(layerRow.size * maxExperts);
  counts.fill(0);
  if (data.selections) counts.set(data.selections);
  if (!routing || !byToken) return counts;
  const base = new Int32Array(Math.max(0, ...layerRow.keys()) + 1).fill(-1);
  for (const [layer, row] of layerRow) base[layer] = row * maxExperts;
  const { layer, experts, start } = routing;
  const add = (i: number) => {
    const b = base[layer[i]] ?? -1;
    if (b < 0) return;
    for (let k = 0; k < experts.length; k++) {
      const e = experts[k][i];
      if (e >= 0 && e < maxExperts) counts[b + e]++;
    }
  };
  if (token !== null) {
    for (let j = byToken.begin[token] ?? 0; j < (byToken.begin[token + 1] ?? 0); j++) {
      const i = byToken.order[j];
      if (!time || (start[i] >= time[0] && start[i] < time[1])) add(i);
    }
  } else {
    const [from, to] = rowsInTime(start, time);
    for (let i = from; i < to; i++) add(i);
  }
  return counts;
}

/** Accesses of each tensor and of each expert of a tensor. */
export interface Accesses {
  /** First element of tensor t in `counts`; a tensor without experts has one element. */
  begin: Uint32Array;
  counts: Uint32Array;
}

export function accessLayout(data: Dataset): Accesses {
  const { tensors } = data.input;
  const begin = new Uint32Array(tensors.length + 1);
  tensors.forEach((t, i) => (begin[i + 1] = begin[i] + Math.max(1, t.n_expert)));
  return { begin, counts: new Uint32Array(begin[tensors.length]) };
}

/** Counts the records that read a tensor or an expert. An expert is counted for each token that selected it. */
export function countAccesses(data: Dataset, scope: Pick<Selection, "layer" | "token" | "time">, out: Accesses): void {
  const { records, routing } = data;
  const { begin, counts } = out;
  counts.fill(0);
  if (!records) return;
  const { layer, token, start, tensor, route } = records;
  const [from, to] = rowsInTime(start, scope.time);
  const experts = routing?.experts ?? [];
  for (let i = from; i < to; i++) {
    const t = tensor[i];
    if (t < 0) continue;
    if (scope.layer !== null && layer[i] !== scope.layer) continue;
    if (scope.token !== null && token[i] !== scope.token) continue;
    const size = begin[t + 1] - begin[t];
    const r = route[i];
    if (size === 1 || r < 0) {
      if (size === 1) counts[begin[t]]++;
      continue;
    }
    for (let k = 0; k < experts.length; k++) {
      const e = experts[k][r];
      if (e >= 0 && e < size) counts[begin[t] + e]++;
    }
  }
}

/** Row of `routing` of a token in a layer, or -1. */
export function routeOf(data: Dataset, token: number, layer: number): number {
  const { routing, byToken } = data;
  if (!routing || !byToken) return -1;
  for (let j = byToken.begin[token] ?? 0; j < (byToken.begin[token + 1] ?? 0); j++) {
    if (routing.layer[byToken.order[j]] === layer) return byToken.order[j];
  }
  return -1;
}

/** Tokens that select an expert, one byte for each token. */
export function tokensOfExpert(data: Dataset, layer: number, expert: number): Uint8Array {
  const result = new Uint8Array(data.input.tokens.text.length);
  const { routing } = data;
  if (!routing) return result;
  for (let i = 0; i < routing.rows; i++) {
    if (routing.layer[i] !== layer) continue;
    for (const column of routing.experts) if (column[i] === expert) result[routing.token[i]] = 1;
  }
  return result;
}
