/** All views, in the order of their tabs. */
import type { ViewKind } from "../context";
import { createCurves } from "./curves";
import { createExperts } from "./experts";
import { createFile } from "./file";
import { createGraph } from "./graph";
import { createOverview } from "./overview";
import { createTokens } from "./tokens";
import { createTrace } from "./trace";

export const VIEWS: ViewKind[] = [
  { id: "overview", title: "Overview", create: createOverview },
  { id: "graph", title: "Graph", create: createGraph },
  { id: "trace", title: "Trace", create: createTrace },
  { id: "file", title: "File", create: createFile },
  { id: "experts", title: "Experts", create: createExperts },
  { id: "tokens", title: "Tokens", create: createTokens },
  { id: "curves", title: "Curves", create: createCurves, shared: true },
];
