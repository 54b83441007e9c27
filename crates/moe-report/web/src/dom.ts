/** Helpers for DOM elements. Texts are always set as text, never parsed as HTML. */

type Child = Node | string | null | undefined | false;
type Attributes = Record<string, unknown>;

/** Creates an element. `on…` attributes are listeners, booleans set or omit an attribute, `class` sets the class. */
export function h<K extends keyof HTMLElementTagNameMap>(tag: K, attributes: Attributes = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value as EventListener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child) element.append(child);
  return element;
}

/** A button with a text. */
export function button(text: string, onclick: (event: MouseEvent) => void, attributes: Attributes = {}): HTMLButtonElement {
  return h("button", { type: "button", onclick, ...attributes }, text);
}

/** A select element with options `[value, text]`. */
export function select(label: string, options: [string, string][], value: string, onchange: (value: string) => void): HTMLSelectElement {
  const element = h("select", { "aria-label": label, onchange: () => onchange(element.value) });
  for (const [v, text] of options) element.append(h("option", { value: v }, text));
  element.value = value;
  return element;
}

/** A label with its control. */
export function field(text: string, control: HTMLElement): HTMLLabelElement {
  return h("label", { class: "field" }, h("span", {}, text), control);
}

/** A check box with its text. */
export function checkbox(text: string, checked: boolean, onchange: (checked: boolean) => void): HTMLLabelElement & { input: HTMLInputElement } {
  const input = h("input", { type: "checkbox", onchange: () => onchange(input.checked) });
  input.checked = checked;
  return Object.assign(h("label", { class: "check" }, input, text), { input });
}

let live: HTMLElement | undefined;

/** Announces a text to screen readers. */
export function announce(text: string): void {
  if (!live) {
    live = h("div", { class: "visually-hidden", "aria-live": "polite", role: "status" });
    document.body.append(live);
  }
  live.textContent = text;
}

/** Whether keys of this event belong to a control with text input. */
export function isTyping(event: Event): boolean {
  const target = event.target as HTMLElement | null;
  return !!target?.closest("input:not([type=checkbox]), select, textarea, dialog");
}

/** Returns a function that runs `action` once in the next frame, however often it is called. */
export function perFrame(action: () => void): () => void {
  let pending = false;
  return () => {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => {
      pending = false;
      action();
    });
  };
}
