/** The selection that all views share, and its text in the URL fragment. */

export interface Selection {
  /** Id of the main view, and of a second view below it. */
  view: string;
  below: string | null;
  /** Index of the only visible input; null for all. */
  input: number | null;
  layer: number | null;
  expert: number | null;
  /** Name of a tensor of the model. */
  tensor: string | null;
  /** Name of a result: of a graph node, or of a record. */
  name: string | null;
  /** Index in the tokens of the input. */
  token: number | null;
  /** Time range, relative to the start of the input. */
  time: [number, number] | null;
  /** Name of an operation: a filter of the trace table. */
  op: string | null;
  /** Input and index of a record. */
  record: [number, number] | null;
  /** Whether the trace table omits the records outside the selection. */
  filter: boolean;
}

export type Patch = Partial<Selection>;

/** What the page shows without a fragment. */
export const FIRST: Patch = { view: "overview", below: "experts" };

export const EMPTY: Selection = {
  view: "overview", below: null, input: null, layer: null, expert: null, tensor: null, name: null, token: null, time: null, op: null, record: null, filter: false,
};

/** The patch that removes everything that is selected; the views stay. */
export const CLEAR: Patch = { layer: null, expert: null, tensor: null, name: null, token: null, time: null, record: null, op: null };

const INTEGERS = ["input", "layer", "expert", "token"] as const;
const TEXTS = ["below", "tensor", "name", "op"] as const;

export function toFragment(s: Selection): string {
  const query = new URLSearchParams({ view: s.view });
  for (const key of [...TEXTS, ...INTEGERS]) if (s[key] !== null) query.set(key, String(s[key]));
  if (s.time) query.set("time", s.time.map(Math.round).join("-"));
  if (s.record) query.set("record", s.record.join("."));
  if (s.filter) query.set("filter", "1");
  return query.toString();
}

/** Reads a fragment. Unknown keys and invalid values are ignored. */
export function fromFragment(text: string): Selection {
  const query = new URLSearchParams(text.replace(/^#/, ""));
  const s: Selection = { ...EMPTY };
  if (query.size === 0) return { ...s, ...FIRST };
  const integer = (value: string | null | undefined) => (value && /^\d{1,15}$/.test(value) ? Number(value) : null);
  s.view = query.get("view") ?? EMPTY.view;
  for (const key of TEXTS) s[key] = query.get(key);
  for (const key of INTEGERS) s[key] = integer(query.get(key));
  const pair = (value: string | null, separator: string): [number, number] | null => {
    const [a, b] = (value ?? "").split(separator).map(integer);
    return a === null || a === undefined || b === null || b === undefined ? null : [a, b];
  };
  s.time = pair(query.get("time"), "-");
  if (s.time && s.time[0] > s.time[1]) s.time = null;
  s.record = pair(query.get("record"), ".");
  s.filter = query.get("filter") === "1";
  return s;
}

type Listener = (selection: Selection, changed: Set<keyof Selection>) => void;

/** Holds the selection. Listeners run once per frame, however often it changes. */
export class Store {
  private current: Selection;
  private listeners: Listener[] = [];
  private changed = new Set<keyof Selection>();
  private saving = 0;

  constructor() {
    this.current = fromFragment(location.hash);
    addEventListener("hashchange", () => {
      const next = fromFragment(location.hash);
      if (toFragment(next) !== toFragment(this.current)) this.set(next);
    });
  }

  get value(): Selection {
    return this.current;
  }

  set(patch: Patch): void {
    const next = { ...this.current, ...patch };
    const idle = this.changed.size === 0;
    for (const key of Object.keys(patch) as (keyof Selection)[]) {
      if (JSON.stringify(next[key]) !== JSON.stringify(this.current[key])) this.changed.add(key);
    }
    this.current = next;
    if (idle && this.changed.size > 0) requestAnimationFrame(() => this.notify());
  }

  subscribe(listener: Listener): void {
    this.listeners.push(listener);
  }

  private notify(): void {
    const changed = this.changed;
    this.changed = new Set();
    for (const listener of this.listeners) listener(this.current, changed);
    // Browsers limit how often the URL may change.
    clearTimeout(this.saving);
    this.saving = window.setTimeout(() => history.replaceState(null, "", `#${toFragment(this.current)}`), 150);
  }
}
