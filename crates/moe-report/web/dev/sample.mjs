// Writes a synthetic report: node dev/sample.mjs --records 100000 --inputs 2 --out dev/out/sample.html
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { parquetWriteBuffer } from "hyparquet-writer";
import { makeCharts } from "./charts.mjs";
import { makeModel } from "./model.mjs";
import { makeTables } from "./tables.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const DELTA = new Set(["start", "duration", "route"]);

/** Encodes columns as Snappy Parquet in base64, with the types of schemas/report.md. */
export function encode(columns) {
  const columnData = Object.entries(columns).map(([name, values]) => {
    const type = name === "start" ? "INT64" : name === "bytes" ? "DOUBLE" : "INT32";
    const data = type === "INT64" ? BigInt64Array.from(values, BigInt) : type === "DOUBLE" ? Float64Array.from(values) : Int32Array.from(values);
    return { name, type, data, nullable: false, encoding: DELTA.has(name) ? "DELTA_BINARY_PACKED" : undefined, statistics: false };
  });
  return Buffer.from(parquetWriteBuffer({ columnData, codec: "SNAPPY", rowGroupSize: 131072 })).toString("base64");
}

/** Returns the HTML of a synthetic report. */
export function makeReport({ records = 20000, inputs = 1, layers = 24, experts = 64, topK = 4, prompt = 12, hostile = false, bare = false } = {}) {
  const report = { schema: "moe-analyze.report.v1", title: `Synthetic MoE, ${records} records`, program: "moe-analyze sample", inputs: [], charts: [], notes: [] };
  const blocks = [];
  for (let i = 0; i < inputs; i++) {
    const model = makeModel({ layers, experts, topK });
    const data = makeTables(model, { rows: records, topK, experts, prompt, seed: 7 + i, postFetch: i === 1 });
    if (hostile) data.tokens.text[1] = "</script><b onclick=alert(1)>&amp;\u2028";
    report.inputs.push({
      name: i === 0 ? "runs/hot" : "runs/post-fetch", kind: "run", model: model.files[0].name,
      properties: [["kind", "run directory"], ["engine", "moe-analyze"], ["architecture", "qwen3moe"], ["layers", String(layers)], ["experts per layer", String(experts)], ["experts per token", String(topK)], ["policy", i === 0 ? "hot-cache" : "post-fetch"], ["records", String(data.records.token.length)]],
      notes: i === 0 ? [] : ["The run is incomplete: the recorder was killed."],
      time_unit: "ns", duration: data.duration, layers: model.layers, top_k: topK, files: model.files, tensors: model.tensors,
      ops: data.ops, names: data.names, lanes: data.lanes, tracks: data.tracks, tokens: data.tokens, graphs: model.graphs,
      buffers: [
        { name: "model", backend: "mmap", usage: "WEIGHTS", layer: -1, size: model.files[0].size, alloc: 0, dealloc: null },
        { name: "KV cache", backend: "CPU", usage: "ANY", layer: -1, size: 33_000_000, alloc: 0, dealloc: null },
        { name: "results", backend: "CPU", usage: "COMPUTE", layer: -1, size: 9_000_000, alloc: 10_000, dealloc: data.duration },
      ],
    });
    if (bare) {
      const input = report.inputs[i];
      Object.assign(input, { files: [], tensors: [], graphs: [], buffers: [], lanes: [], tracks: [], layers: [], duration: 0, top_k: 0, tokens: { text: [], phase: [], sequence: [], position: [], start: [] } });
      continue;
    }
    report.charts.push(...makeCharts(data, i, { layers, experts, topK }));
    for (const name of ["records", "routing", "spans"]) {
      blocks.push(`<script type="application/vnd.apache.parquet" id="table-${i}-${name}">${encode(data[name])}</script>`);
    }
  }
  const template = readFileSync(resolve(here, "../dist/report.html"), "utf8");
  const json = JSON.stringify(report).replaceAll("<", "\\u003c");
  return template
    .replace("<!--report:title-->", () => report.title)
    .replace("<!--report:json-->", () => json)
    .replace("<!--report:tables-->", () => blocks.join("\n"));
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const option = (name, fallback) => {
    const at = process.argv.indexOf(`--${name}`);
    return at < 0 ? fallback : process.argv[at + 1];
  };
  const out = resolve(here, "..", option("out", "dev/out/sample.html"));
  mkdirSync(dirname(out), { recursive: true });
  const html = makeReport({ records: Number(option("records", 20000)), inputs: Number(option("inputs", 1)), layers: Number(option("layers", 24)), experts: Number(option("experts", 64)), topK: Number(option("top-k", 4)), prompt: Number(option("prompt", 12)) });
  writeFileSync(out, html);
  console.log(`${out}: ${(html.length / 1e6).toFixed(1)} MB`);
}
