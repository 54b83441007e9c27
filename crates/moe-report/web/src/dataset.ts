/** The data of an input: its metadata, and its tables as soon as they are decoded. */
import type { Columns, Input, Records, Report, Routing, Spans, TableName, Tensor } from "./data";
import DecodeWorker from "./decode.worker?worker&inline";
import type { Reply, Request } from "./decode.worker";

export class Dataset {
  readonly index: number;
  readonly input: Input;
  readonly layerRow = new Map<number, number>();
  readonly maxExperts: number;
  readonly tensorIndex = new Map<string, number>();
  /** Time at which the pass of each token ends: the start of the next pass. */
  readonly tokenEnd: Float64Array;
  records: Records | null = null;
  routing: Routing | null = null;
  spans: Spans | null = null;
  /** Selections of each expert, `layerRow * maxExperts + expert`, of an input that has no table of routing. */
  selections: Uint32Array | null = null;
  /** Number of changes of the tables. */
  version = 0;
  /** Whether all tables of the report are decoded; the others do not exist. */
  loaded = false;
  /** Rows of `routing` by token: those of token t are `order[begin[t]]` to `order[begin[t + 1] - 1]`. */
  byToken: { begin: Uint32Array; order: Uint32Array } | null = null;

  constructor(index: number, input: Input) {
    this.index = index;
    this.input = input;
    input.layers.forEach((l, row) => this.layerRow.set(l.index, row));
    this.maxExperts = Math.max(0, ...input.layers.map((l) => l.n_expert));
    if (input.layers.some((l) => l.selections)) {
      const selections = new Uint32Array(input.layers.length * this.maxExperts);
      input.layers.forEach((l, row) => selections.set(l.selections ?? [], row * this.maxExperts));
      this.selections = selections;
    }
    input.tensors.forEach((t, i) => this.tensorIndex.set(t.name, i));
    const { start } = input.tokens;
    this.tokenEnd = new Float64Array(start.length).fill(input.duration);
    for (let i = start.length - 2; i >= 0; i--) this.tokenEnd[i] = start[i + 1] > start[i] ? start[i + 1] : this.tokenEnd[i + 1];
  }

  tensor(name: string | null): Tensor | null {
    const i = name === null ? undefined : this.tensorIndex.get(name);
    return i === undefined ? null : this.input.tensors[i];
  }

  accept(name: TableName, rows: number, c: Columns): void {
    this.version++;
    if (name === "records") this.records = { rows, ...c } as unknown as Records;
    if (name === "spans") this.spans = { rows, ...c } as unknown as Spans;
    if (name !== "routing") return;
    const numbered = (prefix: string) => Array.from({ length: this.input.top_k }, (_, k) => c[prefix + k]).filter(Boolean) as Int32Array[];
    this.routing = {
      rows, token: c.token as Int32Array, layer: c.layer as Int32Array, start: c.start as Float64Array,
      experts: numbered("e"), lanes: numbered("l"), weights: numbered("w"),
    };
    this.byToken = groupBy(this.routing.token, this.input.tokens.text.length);
  }
}

/** Groups row numbers by key with a counting sort. */
export function groupBy(keys: Int32Array, groups: number): { begin: Uint32Array; order: Uint32Array } {
  const begin = new Uint32Array(groups + 1);
  for (const key of keys) if (key >= 0 && key < groups) begin[key + 1]++;
  for (let i = 0; i < groups; i++) begin[i + 1] += begin[i];
  const next = begin.slice();
  const order = new Uint32Array(begin[groups]);
  for (let i = 0; i < keys.length; i++) if (keys[i] >= 0 && keys[i] < groups) order[next[keys[i]]++] = i;
  return { begin, order };
}

/** Tables in the order in which the views need them. */
const ORDER: TableName[] = ["routing", "spans", "records"];

/** Decodes the data blocks of the page in workers, one for each input. */
export function loadTables(datasets: Dataset[], onTable: (data: Dataset, name: TableName) => void, onError: (message: string) => void): Promise<void> {
  const loads = datasets.map((data) => new Promise<void>((done) => {
    const resolve = () => {
      data.loaded = true;
      data.version++;
      done();
    };
    const blocks = ORDER.map((name) => ({ name, element: document.getElementById(`table-${data.index}-${name}`) })).filter((b) => b.element);
    if (blocks.length === 0) return resolve();
    const worker = new DecodeWorker();
    let left = blocks.length;
    worker.onmessage = (event: MessageEvent<Reply>) => {
      const { name } = blocks[event.data.id];
      if ("error" in event.data) onError(`Table ${name} of ${data.input.name} cannot be read: ${event.data.error}`);
      else {
        data.accept(name, event.data.rows, event.data.columns);
        onTable(data, name);
      }
      if (--left > 0) return;
      worker.terminate();
      resolve();
    };
    worker.onerror = (event) => {
      onError(`The tables of ${data.input.name} cannot be read: ${event.message}`);
      resolve();
    };
    blocks.forEach(({ element }, id) => {
      worker.postMessage({ id, base64: element!.textContent ?? "" } satisfies Request);
      element!.remove();
    });
  }));
  return Promise.all(loads).then(() => undefined);
}

export function readReport(): Report {
  return JSON.parse(document.getElementById("report")!.textContent ?? "") as Report;
}
