/** Keys that work in the entire page, and the dialog that lists all keys. */
import type { Context } from "./context";
import { button, checkbox, h, isTyping } from "./dom";
import { CLEAR } from "./selection";
import { VIEWS } from "./views";

export interface KeyActions {
  play: () => void;
  theme: () => void;
  search: () => void;
}

const KEYS: [string, string][] = [
  [`1 to ${VIEWS.length}`, "show a view"],
  ["Shift + 1 …", "show a second view below"],
  ["[ and ]", "previous and next token"],
  ["{ and }", "previous and next layer"],
  ["Space", "start or stop the playback"],
  ["/", "search in the view"],
  ["t", "dark or light theme"],
  ["Esc", "clear the selection"],
  ["?", "this list"],
  ["Arrow keys", "move in the view or in the time bar"],
  ["+ − 0", "zoom in, zoom out, fit (graph, file)"],
  [", and .", "previous and next range (file)"],
];

export function installKeys({ store, select, datasets }: Context, actions: KeyActions): HTMLDialogElement {
  let enabled = true;
  const body = h("tbody", {}, ...KEYS.map(([key, text]) => h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, key)), h("td", {}, text))));
  const dialog = h("dialog", { "aria-labelledby": "keys-title" },
    h("h2", { id: "keys-title" }, "Keys"), h("table", {}, body),
    checkbox("Enable these keys", true, (on) => (enabled = on)),
    h("p", {}, button("Close", () => dialog.close())));
  document.body.append(dialog);

  const tokens = Math.max(...datasets.map((d) => d.input.tokens.text.length));
  const layers = [...new Set(datasets.flatMap((d) => d.input.layers.map((l) => l.index)))].sort((a, b) => a - b);
  const stepLayer = (d: number) => {
    const { layer } = store.value;
    const at = layer === null ? (d > 0 ? -1 : layers.length) : layers.indexOf(layer);
    const next = layers[at + d];
    if (next !== undefined) select({ layer: next });
  };
  const stepToken = (d: number) => {
    const { token } = store.value;
    const next = token === null ? 0 : token + d;
    if (next >= 0 && next < tokens) select({ token: next });
  };
  const simple: Record<string, () => void> = {
    "[": () => stepToken(-1), "]": () => stepToken(1), "{": () => stepLayer(-1), "}": () => stepLayer(1),
    "/": actions.search, t: actions.theme, "?": () => dialog.showModal(), Escape: () => select(CLEAR),
  };
  addEventListener("keydown", (event) => {
    if (!enabled || event.ctrlKey || event.metaKey || event.altKey || isTyping(event) || dialog.open) return;
    const digit = /^Digit([1-9])$/.exec(event.code);
    const view = digit ? VIEWS[Number(digit[1]) - 1] : undefined;
    const target = event.target as HTMLElement;
    if (view) select(event.shiftKey ? { below: store.value.below === view.id ? null : view.id } : { view: view.id });
    else if (event.key === " " && !target.closest("button, a, summary, input")) actions.play();
    else if (event.key in simple) simple[event.key]();
    else return;
    event.preventDefault();
  });
  return dialog;
}
