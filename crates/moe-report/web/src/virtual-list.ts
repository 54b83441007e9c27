/**
 * A list of rows of equal height, of which only the visible ones exist.
 *
 * Browsers limit the height of an element to about 17 million pixels, fewer than 1,000,000 rows need. Above MAX_HEIGHT,
 * the scroll bar is proportional to the position, while wheel and keys move by exact distances.
 */
import { h, perFrame } from "./dom";

const MAX_HEIGHT = 8_000_000;

export class VirtualList {
  readonly element: HTMLElement;
  private spacer = h("div", { class: "spacer" });
  private window = h("div", { class: "window", role: "rowgroup" });
  private rows = 0;
  private top = 0;
  private expected = -1;
  private pool: HTMLElement[] = [];
  readonly redraw: () => void;

  /** `fill` shows a row in an element of `make`. `attributes` are those of the element that scrolls. */
  constructor(attributes: Record<string, unknown>, private header: HTMLElement, private rowHeight: number, private make: () => HTMLElement, private fill: (element: HTMLElement, row: number) => void) {
    this.element = h("div", { class: "virtual", ...attributes }, header, this.spacer, this.window);
    this.redraw = perFrame(() => this.draw());
    this.element.addEventListener("scroll", () => this.onScroll(), { passive: true });
    this.element.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    new ResizeObserver(() => this.redraw()).observe(this.element);
  }

  setRows(rows: number): void {
    this.rows = rows;
    this.spacer.style.height = `${Math.min(this.fullHeight, MAX_HEIGHT)}px`;
    this.moveTo(Math.min(this.top, this.maxTop));
  }

  /** Number of rows that fit. */
  get page(): number {
    return Math.max(1, Math.floor(this.view / this.rowHeight) - 1);
  }

  /** Height of the rows that are visible. */
  private get view(): number {
    return Math.max(0, this.element.clientHeight - this.header.offsetHeight);
  }

  /** Scrolls until a row is visible. */
  reveal(row: number, center = false): void {
    const y = row * this.rowHeight;
    const { view } = this;
    if (center && (y < this.top || y + this.rowHeight > this.top + view)) this.moveTo(y - view / 2);
    else if (y < this.top) this.moveTo(y);
    else if (y + this.rowHeight > this.top + view) this.moveTo(y + this.rowHeight - view);
  }

  private get fullHeight(): number {
    return this.rows * this.rowHeight;
  }

  private get maxTop(): number {
    return Math.max(0, this.fullHeight - this.view);
  }

  private get compressed(): boolean {
    return this.fullHeight > MAX_HEIGHT;
  }

  private moveTo(top: number): void {
    this.top = Math.max(0, Math.min(this.maxTop, top));
    const range = this.element.scrollHeight - this.element.clientHeight;
    const scroll = this.compressed && this.maxTop > 0 ? (this.top / this.maxTop) * range : this.top;
    this.element.scrollTop = scroll;
    this.expected = this.element.scrollTop;
    this.redraw();
  }

  private onScroll(): void {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    if (Math.abs(scrollTop - this.expected) > 1) {
      const range = Math.max(1, scrollHeight - clientHeight);
      this.top = this.compressed ? (scrollTop / range) * this.maxTop : scrollTop;
      this.expected = -1;
    }
    this.redraw();
  }

  private onWheel(event: WheelEvent): void {
    if (!this.compressed || event.ctrlKey || event.deltaY === 0) return;
    event.preventDefault();
    const unit = event.deltaMode === 1 ? this.rowHeight : event.deltaMode === 2 ? this.element.clientHeight : 1;
    this.moveTo(this.top + event.deltaY * unit);
  }

  private draw(): void {
    const first = Math.max(0, Math.floor(this.top / this.rowHeight));
    const visible = Math.min(this.rows - first, Math.ceil(this.view / this.rowHeight) + 1);
    while (this.pool.length < visible) {
      const element = this.make();
      this.pool.push(element);
      this.window.append(element);
    }
    this.window.style.transform = `translateY(${this.header.offsetHeight + this.element.scrollTop - (this.top - first * this.rowHeight)}px)`;
    this.pool.forEach((element, i) => {
      element.hidden = i >= visible;
      if (i < visible) this.fill(element, first + i);
    });
  }
}
