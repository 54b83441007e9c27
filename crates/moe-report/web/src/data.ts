/** Types of the JSON block of a report. schemas/report.schema.json describes each key. */

export const SCHEMA = "moe-analyze.report.v1";

/** Schema of the page of a server. It has no data block, but polls `ui/state`. */
export const LIVE_SCHEMA = "moe-analyze.live.v1";

export interface Report {
  schema: string;
  title: string;
  program: string;
  inputs: Input[];
  charts: Chart[];
  notes: string[];
}

export interface Input {
  name: string;
  kind: string;
  model?: string | null;
  properties: [string, string][];
  notes: string[];
  time_unit: "ns" | "step";
  duration: number;
  layers: Layer[];
  top_k: number;
  files: { name: string; size: number }[];
  tensors: Tensor[];
  ops: string[];
  names: string[];
  lanes: string[];
  tracks: { name: string; kind: "compute" | "transfer" }[];
  tokens: Tokens;
  graphs: Graph[];
  buffers: Buffer[];
}

export interface Layer {
  index: number;
  n_expert: number;
  top_k: number;
  selections?: number[];
}

export interface Tensor {
  name: string;
  file: number;
  offset: number;
  size: number;
  layer: number;
  category: string;
  projection?: string | null;
  type: string;
  n_expert: number;
}

export interface Tokens {
  text: (string | null)[];
  phase: (0 | 1)[];
  sequence: number[];
  position: number[];
  start: number[];
}

export interface Graph {
  phase: "prompt" | "generate";
  width: number;
  height: number;
  nodes: GraphNode[];
  edges: [number, number][];
}

export interface GraphNode {
  x: number;
  y: number;
  w: number;
  h: number;
  label: string;
  op: string;
  layer: number;
  category: string;
  tensor: number;
  shape: number[];
  dtype: string;
}

export interface Buffer {
  name: string;
  backend: string;
  usage: string;
  layer: number;
  size: number;
  alloc: number;
  dealloc: number | null;
}

export interface Chart {
  id: string;
  group: string;
  input?: number | null;
  title: string;
  note?: string | null;
  x: Axis;
  y: Axis;
  series: Series[];
}

export interface Axis {
  label: string;
  scale: "linear" | "log" | "bytes" | "time";
  min?: number | null;
  max?: number | null;
}

export interface Series {
  name: string;
  x: number[];
  y: (number | null)[];
  style: "line" | "step" | "points" | "bars";
  dash?: boolean | null;
  input?: number | null;
}

/** Names of the tables of an input. The id of a data block is `table-INPUT-NAME`. */
export const TABLES = ["records", "routing", "spans"] as const;
export type TableName = (typeof TABLES)[number];

/** Columns of a table by name. All columns have the same length. */
export type Columns = Record<string, Int32Array | Float64Array>;

/** Columns of the table `records`. Optional columns are missing if unknown. */
export interface Records {
  rows: number;
  token: Int32Array;
  layer: Int32Array;
  op: Int32Array;
  name: Int32Array;
  tensor: Int32Array;
  start: Float64Array;
  duration: Int32Array;
  bytes: Float64Array;
  route: Int32Array;
  thread?: Int32Array;
  fallback?: Int32Array;
}

/** Columns of the table `routing`. `experts[k]` is the column `eK`. */
export interface Routing {
  rows: number;
  token: Int32Array;
  layer: Int32Array;
  start: Float64Array;
  experts: Int32Array[];
  lanes: Int32Array[];
  weights: Int32Array[];
}

/** Columns of the table `spans`. */
export interface Spans {
  rows: number;
  track: Int32Array;
  token: Int32Array;
  layer: Int32Array;
  start: Float64Array;
  duration: Int32Array;
  bytes: Float64Array;
}
