/** Tabs that select the main view. */
import type { ViewKind } from "./context";
import { h } from "./dom";

export class Tabs {
  readonly element: HTMLElement;
  private tabs: HTMLButtonElement[];

  constructor(private kinds: ViewKind[], private onSelect: (id: string) => void) {
    this.tabs = kinds.map((kind, i) => h("button", {
      type: "button", role: "tab", id: `tab-${kind.id}`, "aria-controls": "main-panes", title: `${kind.title} (${i + 1})`, onclick: () => onSelect(kind.id),
    }, kind.title));
    this.element = h("div", { class: "tabs", role: "tablist", "aria-label": "Views", onkeydown: (event: KeyboardEvent) => this.onKey(event) }, ...this.tabs);
  }

  update(id: string): void {
    this.tabs.forEach((tab, i) => {
      const selected = this.kinds[i].id === id;
      tab.setAttribute("aria-selected", String(selected));
      tab.tabIndex = selected ? 0 : -1;
    });
  }

  private onKey(event: KeyboardEvent): void {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = this.tabs.indexOf(document.activeElement as HTMLButtonElement);
    const next = (at + step + this.tabs.length) % this.tabs.length;
    this.tabs[next].focus();
    this.onSelect(this.kinds[next].id);
  }
}
