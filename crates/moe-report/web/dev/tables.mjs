// The tables of a synthetic input: records, routing and spans, as columns.
import { random } from "./model.mjs";

const LANES = ["cpu", "gpu_resident", "hot_cache", "post_fetched", "post_fetch_miss", "cache_hit", "cache_miss"];
const WORDS = ["The", " kernel", " driver", " is", " responsible", " for", " a", " page", " of", " memory", ",", " which", " the", " scheduler", " maps", " in", "to", " user", " space", ".", "\n", " It", " reads", " each", " block", " from", " disk", " and", " copies", " it", " GPU"];

/** Draws `k` distinct experts: popular ones more often, some of the previous token again. */
function select(rng, popularity, k, previous) {
  const chosen = [];
  for (const e of previous) if (rng() < 0.35 && chosen.length < k) chosen.push(e);
  while (chosen.length < k) {
    const e = popularity[Math.min(popularity.length - 1, Math.floor(popularity.length * rng() ** 2.4))];
    if (!chosen.includes(e)) chosen.push(e);
  }
  return chosen;
}

/** Generates passes until there are `rows` records. */
export function makeTables(model, { rows, topK, experts, prompt, seed, postFetch }) {
  const rng = random(seed);
  const ops = [...new Set(model.pass.map((o) => o.op))];
  const names = [...new Set(model.pass.map((o) => o.name))];
  const nameId = new Map(names.map((n, i) => [n, i]));
  const opId = new Map(ops.map((n, i) => [n, i]));
  const records = { token: [], layer: [], op: [], name: [], tensor: [], start: [], duration: [], bytes: [], route: [], thread: [] };
  const routing = { token: [], layer: [], start: [] };
  for (const p of ["e", "l", "w"]) for (let k = 0; k < topK; k++) routing[p + k] = [];
  const spans = { track: [], token: [], layer: [], start: [], duration: [], bytes: [] };
  const tokens = { text: [], phase: [], sequence: [], position: [], start: [] };
  const popularity = model.layers.map(() => {
    const order = Array.from({ length: experts }, (_, i) => i);
    for (let i = experts - 1; i > 0; i--) {
      const j = Math.floor(rng() * (i + 1));
      [order[i], order[j]] = [order[j], order[i]];
    }
    return order;
  });
  const hot = popularity.map((p) => new Set(p.slice(0, Math.ceil(experts / 4))));
  const previous = model.layers.map(() => []);
  let time = 0;
  let done = false;
  for (let first = 0; !done; ) {
    const batch = first === 0 ? prompt : 1;
    for (let i = 0; i < batch; i++) {
      tokens.text.push(WORDS[Math.floor(rng() * WORDS.length)]);
      tokens.phase.push(first === 0 ? 0 : 1);
      tokens.sequence.push(0);
      tokens.position.push(first + i);
      tokens.start.push(time);
    }
    const routeOf = [];
    for (const o of model.pass) {
      if (records.token.length >= rows) { done = true; break; }
      const expert = o.op === "MUL_MAT_ID";
      const tensor = o.tensor < 0 ? null : model.tensors[o.tensor];
      const perExpert = expert ? tensor.size / tensor.n_expert : 0;
      const duration = Math.round((expert ? 9000 : tensor ? 3500 : 900) * (0.8 + 0.4 * rng()) * (1 + 0.1 * batch));
      if (expert && o.name.startsWith("ffn_moe_gate")) {
        for (let i = 0; i < batch; i++) {
          const chosen = select(rng, popularity[o.layer], topK, previous[o.layer]);
          previous[o.layer] = chosen;
          routeOf[i] = routing.token.length;
          routing.token.push(first + i);
          routing.layer.push(o.layer);
          routing.start.push(time);
          chosen.forEach((e, k) => {
            routing["e" + k].push(e);
            const lane = postFetch ? (rng() < 0.8 ? 3 : 4) : hot[o.layer].has(e) ? 2 : 0;
            routing["l" + k].push(lane);
            routing["w" + k].push(Math.round((255 * (topK - k) * (0.6 + 0.8 * rng())) / ((topK * (topK + 1)) / 2) / 1.4));
          });
        }
        const copied = Math.round(perExpert * topK * Math.min(batch, 6) * 0.7);
        const add = (track, start, length, bytes) => {
          spans.track.push(track); spans.token.push(first); spans.layer.push(o.layer);
          spans.start.push(start); spans.duration.push(Math.round(length)); spans.bytes.push(bytes);
        };
        if (postFetch) {
          add(0, time, duration * 2, -1);
          add(1, time + 900, duration * (1.5 + rng()), copied);
          add(2, time + duration * 2 + 600, duration * 0.5, -1);
        } else {
          add(0, time, duration * 2.4, -1);
          add(1, time + 400, duration * (0.6 + rng() * 0.4), -1);
        }
      }
      for (let i = 0; i < (expert ? batch : 1) && records.token.length < rows; i++) {
        records.token.push(first + i);
        records.layer.push(o.layer);
        records.op.push(opId.get(o.op));
        records.name.push(nameId.get(o.name));
        records.tensor.push(o.tensor);
        records.start.push(time);
        records.duration.push(duration);
        records.bytes.push(expert ? perExpert * topK : tensor ? tensor.size : 0);
        records.route.push(expert ? routeOf[i] : -1);
        records.thread.push(0);
      }
      time += duration + Math.round(300 * rng());
    }
    time += 40_000;
    first += batch;
  }
  const tracks = postFetch
    ? [{ name: "CPU: gate and up", kind: "compute" }, { name: "H2D copies", kind: "transfer" }, { name: "GPU: down", kind: "compute" }]
    : [{ name: "cold lane (CPU)", kind: "compute" }, { name: "hot lane 0 (CUDA0)", kind: "compute" }];
  sortSpans(spans);
  return { ops, names, lanes: LANES, tracks, tokens, duration: time, records, routing, spans };
}

function sortSpans(spans) {
  const order = spans.start.map((_, i) => i).sort((a, b) => spans.start[a] - spans.start[b]);
  for (const key of Object.keys(spans)) spans[key] = order.map((i) => spans[key][i]);
}
