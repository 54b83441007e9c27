// A synthetic model for sample reports: layers, tensors and computation graphs.

/** Returns a pseudo-random generator of numbers in [0, 1) (mulberry32). */
export function random(seed) {
  let a = seed >>> 0;
  return () => {
    a = (a + 0x6d2b79f5) | 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

const ALIGN = 32;
const GAP = 96 * 1024;

/** Operations of a layer: name of the result, operation, sources (results, or weights by suffix), category. */
const LAYER_OPS = [
  ["attn_norm", "RMS_NORM", ["l_in", "attn_norm.weight"], "norm"],
  ["Qcur", "MUL_MAT", ["attn_norm", "attn_q.weight"], "attention"],
  ["Kcur", "MUL_MAT", ["attn_norm", "attn_k.weight"], "attention"],
  ["Vcur", "MUL_MAT", ["attn_norm", "attn_v.weight"], "attention"],
  ["Qcur_rope", "ROPE", ["Qcur"], "attention"],
  ["Kcur_rope", "ROPE", ["Kcur"], "attention"],
  ["kq", "MUL_MAT", ["Qcur_rope", "Kcur_rope"], "attention"],
  ["kq_soft_max", "SOFT_MAX", ["kq"], "attention"],
  ["kqv", "MUL_MAT", ["kq_soft_max", "Vcur"], "attention"],
  ["attn_out", "MUL_MAT", ["kqv", "attn_output.weight"], "attention"],
  ["ffn_inp", "ADD", ["attn_out", "l_in"], "other"],
  ["ffn_norm", "RMS_NORM", ["ffn_inp", "ffn_norm.weight"], "norm"],
  ["ffn_moe_logits", "MUL_MAT", ["ffn_norm", "ffn_gate_inp.weight"], "ffn"],
  ["ffn_moe_probs", "SOFT_MAX", ["ffn_moe_logits"], "ffn"],
  ["ffn_moe_topk", "ARGSORT", ["ffn_moe_probs"], "ffn"],
  ["ffn_moe_gate", "MUL_MAT_ID", ["ffn_norm", "ffn_moe_topk", "ffn_gate_exps.weight"], "ffn"],
  ["ffn_moe_up", "MUL_MAT_ID", ["ffn_norm", "ffn_moe_topk", "ffn_up_exps.weight"], "ffn"],
  ["ffn_moe_swiglu", "GLU", ["ffn_moe_gate", "ffn_moe_up"], "ffn"],
  ["ffn_moe_down", "MUL_MAT_ID", ["ffn_moe_swiglu", "ffn_moe_topk", "ffn_down_exps.weight"], "ffn"],
  ["ffn_moe_out", "ADD", ["ffn_moe_down", "ffn_moe_probs"], "ffn"],
  ["l_out", "ADD", ["ffn_moe_out", "ffn_inp"], "other"],
];

/** Returns files, tensors, operations of a pass and graphs of a model with `layers` layers of `experts` experts. */
export function makeModel({ layers, experts, topK }) {
  const tensors = [];
  const index = new Map();
  let offset = 64 * 1024;
  const add = (name, size, layer, category, type, extra = {}) => {
    index.set(name, tensors.length);
    tensors.push({ name, file: 0, offset, size, layer, category, projection: null, type, n_expert: 0, ...extra });
    offset += Math.ceil(size / ALIGN) * ALIGN;
  };
  add("token_embd.weight", 18_000_000, -1, "embedding", "Q4_K");
  for (let l = 0; l < layers; l++) {
    const p = `blk.${l}.`;
    add(`${p}attn_norm.weight`, 8192, l, "norm", "F32");
    for (const s of ["q", "k", "v", "output"]) add(`${p}attn_${s}.weight`, s === "k" || s === "v" ? 300_000 : 2_400_000, l, "attention", "Q4_K");
    add(`${p}ffn_norm.weight`, 8192, l, "norm", "F32");
    add(`${p}ffn_gate_inp.weight`, 4096 * experts, l, "router", "F32");
    for (const s of ["gate", "up", "down"]) {
      add(`${p}ffn_${s}_exps.weight`, experts * (s === "down" ? 368_640 : 290_304), l, "expert", s === "down" ? "Q6_K" : "Q4_K", { projection: s, n_expert: experts });
    }
    if (l % 4 === 3) offset += GAP;
  }
  add("output_norm.weight", 8192, -1, "norm", "F32");
  add("output.weight", 22_000_000, -1, "output", "Q6_K");

  // Operations of a pass in order: {name, op, layer, tensor, sources, category}.
  const pass = [{ name: "inp_embd", op: "GET_ROWS", layer: -1, tensor: index.get("token_embd.weight"), sources: ["token_embd.weight"], category: "input" }];
  let before = "inp_embd";
  for (let l = 0; l < layers; l++) {
    for (const [name, op, sources, category] of LAYER_OPS) {
      const resolved = sources.map((s) => (s === "l_in" ? before : s.includes(".") ? `blk.${l}.${s}` : `${s}-${l}`));
      const weight = resolved.find((s) => index.has(s));
      pass.push({ name: `${name}-${l}`, op, layer: l, tensor: weight === undefined ? -1 : index.get(weight), sources: resolved, category });
    }
    before = `l_out-${l}`;
  }
  pass.push({ name: "result_norm", op: "RMS_NORM", layer: -1, tensor: index.get("output_norm.weight"), sources: [before, "output_norm.weight"], category: "norm" });
  pass.push({ name: "result_output", op: "MUL_MAT", layer: -1, tensor: index.get("output.weight"), sources: ["result_norm", "output.weight"], category: "output" });

  return {
    files: [{ name: "synthetic-moe-Q4_K_M.gguf", size: offset + 4096 }],
    tensors,
    pass,
    layers: Array.from({ length: layers }, (_, i) => ({ index: i, n_expert: experts, top_k: topK })),
    graphs: ["prompt", "generate"].map((phase) => makeGraph(phase, pass, tensors, index)),
  };
}

/** Lays a pass out: rows by the longest path, weights next to their readers. */
function makeGraph(phase, pass, tensors, index) {
  const nodes = [];
  const edges = [];
  const ids = new Map();
  const rows = new Map();
  const place = (row, node) => {
    const n = rows.get(row) ?? 0;
    rows.set(row, n + 1);
    ids.set(node.label, nodes.length);
    nodes.push({ x: n, y: row, w: 150, h: 34, shape: [2048, phase === "prompt" ? 9 : 1], dtype: "f32", ...node });
  };
  for (const o of pass) {
    const parents = o.sources.filter((s) => ids.has(s) && !index.has(s));
    const row = Math.max(0, ...parents.map((s) => nodes[ids.get(s)].y + 1));
    place(row, { label: o.name, op: o.op, layer: o.layer, category: o.category, tensor: o.tensor });
    for (const s of o.sources) {
      if (index.has(s)) {
        const t = tensors[index.get(s)];
        place(row - 0.5, { label: s, op: "CONST", layer: t.layer, category: o.category, tensor: index.get(s), shape: [2048, 768], dtype: t.type.toLowerCase() });
      }
      if (ids.has(s)) edges.push([ids.get(s), ids.get(o.name)]);
    }
  }
  const columns = Math.max(...rows.values());
  for (const n of nodes) {
    const inRow = rows.get(n.y);
    n.x = 110 + (n.x - (inRow - 1) / 2 + (columns - 1) / 2) * 190;
    n.y = 60 + n.y * 110;
  }
  return { phase, width: columns * 190 + 40, height: Math.max(...nodes.map((n) => n.y)) + 60, nodes, edges };
}
