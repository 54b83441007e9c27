/** A canvas that follows the size of its element and the pixel ratio, and draws once per frame. */
import { h, perFrame } from "./dom";

const surfaces = new Set<Surface>();

/** Draws all canvases at once, without waiting for the next frame, before a page is printed. */
export function drawAll(): void {
  for (const surface of surfaces) surface.drawNow();
}

export class Surface {
  readonly element: HTMLDivElement;
  readonly canvas: HTMLCanvasElement;
  readonly context: CanvasRenderingContext2D;
  width = 0;
  height = 0;
  readonly redraw: () => void;
  readonly drawNow: () => void;
  private observer: ResizeObserver;

  /** `attributes` are those of the canvas; a canvas with keyboard operation has a role and a tabindex. */
  constructor(className: string, attributes: Record<string, unknown>, draw: (surface: Surface) => void) {
    this.canvas = h("canvas", attributes);
    this.element = h("div", { class: `surface ${className}` }, this.canvas);
    this.context = this.canvas.getContext("2d")!;
    this.drawNow = () => {
      if (!this.element.isConnected || !this.measure()) return;
      this.context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
      this.context.clearRect(0, 0, this.width, this.height);
      draw(this);
    };
    this.redraw = perFrame(this.drawNow);
    surfaces.add(this);
    this.observer = new ResizeObserver(() => this.redraw());
    this.observer.observe(this.element);
  }

  /** Position of a mouse event in CSS pixels of the canvas. */
  position(event: MouseEvent): [number, number] {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  destroy(): void {
    this.observer.disconnect();
    surfaces.delete(this);
  }

  private measure(): boolean {
    this.width = this.element.clientWidth;
    this.height = this.element.clientHeight;
    const w = Math.round(this.width * devicePixelRatio);
    const h = Math.round(this.height * devicePixelRatio);
    if (w === 0 || h === 0) return false;
    if (this.canvas.width !== w || this.canvas.height !== h) {
      this.canvas.width = w;
      this.canvas.height = h;
    }
    return true;
  }
}

/** Calls `move` while the pointer is dragged, and `click` if it was not. */
export function onDrag(element: HTMLElement, handlers: {
  start?: (event: PointerEvent) => void;
  move: (dx: number, dy: number, event: PointerEvent) => void;
  click?: (event: PointerEvent) => void;
  end?: (event: PointerEvent) => void;
}): void {
  let last: [number, number] | null = null;
  let moved = 0;
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    last = [event.clientX, event.clientY];
    moved = 0;
    element.setPointerCapture(event.pointerId);
    handlers.start?.(event);
  });
  element.addEventListener("pointermove", (event) => {
    if (!last) return;
    const dx = event.clientX - last[0];
    const dy = event.clientY - last[1];
    moved += Math.abs(dx) + Math.abs(dy);
    last = [event.clientX, event.clientY];
    if (moved > 3) handlers.move(dx, dy, event);
  });
  element.addEventListener("pointerup", (event) => {
    if (!last) return;
    last = null;
    if (moved <= 3) handlers.click?.(event);
    handlers.end?.(event);
  });
  element.addEventListener("pointercancel", () => (last = null));
}

let tip: HTMLElement | undefined;

/** Shows a text next to the pointer; an empty text hides it. */
export function tooltip(text: string, event?: MouseEvent): void {
  if (!tip) {
    tip = h("div", { class: "tooltip", "aria-hidden": "true" });
    document.body.append(tip);
  }
  tip.hidden = text === "" || !event;
  if (tip.hidden || !event) return;
  tip.textContent = text;
  const w = tip.offsetWidth;
  const x = event.clientX + 14 + w > innerWidth ? event.clientX - 14 - w : event.clientX + 14;
  const y = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4);
  tip.style.transform = `translate(${Math.max(0, x)}px, ${y}px)`;
}
