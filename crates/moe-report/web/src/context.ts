/** What every view can use: the report, the selection, the theme. */
import type { Report } from "./data";
import type { Dataset } from "./dataset";
import type { Theme } from "./palette";
import type { Patch, Selection, Store } from "./selection";

export interface Context {
  report: Report;
  datasets: Dataset[];
  store: Store;
  theme: () => Theme;
  /** Changes the selection and keeps it consistent. */
  select: (patch: Patch) => void;
  /** Latest end of an input. */
  duration: number;
}

export interface View {
  element: HTMLElement;
  /** Draws again after a change of the selection, the data, the theme or the size. */
  update(selection: Selection): void;
  destroy?(): void;
}

export interface ViewKind {
  id: string;
  title: string;
  /** Creates the view of an input, or of all inputs (`datasets`) if `shared`. */
  create(context: Context, data: Dataset): View;
  shared?: boolean;
}

/** Removes what does not belong to a changed layer, and adds the layer of a tensor. */
export function consistent(patch: Patch, current: Selection, datasets: Dataset[]): Patch {
  const result: Patch = { ...patch };
  const find = (name: string) => datasets.map((d) => d.tensor(name)).find((t) => t);
  if (patch.tensor && patch.layer === undefined) {
    const tensor = find(patch.tensor);
    if (tensor) result.layer = tensor.layer >= 0 ? tensor.layer : null;
  }
  if (result.layer !== undefined && result.layer !== current.layer) {
    const tensor = current.tensor ? find(current.tensor) : null;
    if (patch.tensor === undefined && tensor && tensor.layer !== result.layer) result.tensor = null;
    if (patch.name === undefined) result.name = null;
    if (result.layer === null && patch.expert === undefined) result.expert = null;
  }
  return result;
}
