/** A row of panes that shows a view for each input. */
import type { Context, View, ViewKind } from "./context";
import { h } from "./dom";
import type { Selection } from "./selection";

export class Panes {
  readonly element: HTMLElement;
  private views: { view: View; input: number | null; pane: HTMLElement }[] = [];
  private shown = "";

  constructor(private context: Context, private kinds: ViewKind[], id: string, private label: string) {
    this.element = h("div", { class: "panes", id });
  }

  /** Shows a view, and creates it if another one was visible. */
  show(id: string | null, selection: Selection): void {
    const kind = this.kinds.find((k) => k.id === id);
    this.element.hidden = !kind;
    if (this.shown !== (kind?.id ?? "")) {
      for (const { view } of this.views) view.destroy?.();
      this.views = [];
      this.shown = kind?.id ?? "";
      this.element.replaceChildren();
      if (kind) this.create(kind);
    }
    for (const { view, input, pane } of this.views) {
      pane.hidden = selection.input !== null && input !== null && input !== selection.input;
      if (!pane.hidden) view.update(selection);
    }
  }

  private create(kind: ViewKind): void {
    const { datasets } = this.context;
    for (const data of kind.shared ? datasets.slice(0, 1) : datasets) {
      const view = kind.create(this.context, data);
      const title = kind.shared || datasets.length === 1 ? h("h2", { class: "visually-hidden" }, kind.title) : h("h2", { class: "pane-title" }, data.input.name);
      const name = `${kind.title}${kind.shared ? "" : ` of ${data.input.name}`}${this.label}`;
      const pane = h("section", { class: "pane", "aria-label": name, "data-view": kind.id, "data-input": kind.shared ? null : data.index }, title, view.element);
      this.views.push({ view, input: kind.shared ? null : data.index, pane });
      this.element.append(pane);
    }
  }
}
