/** Worker that decodes a table: base64 of Parquet to columns as typed arrays. */
import { parquetMetadata, parquetRead } from "hyparquet";
import type { Columns } from "./data";

export interface Request {
  id: number;
  base64: string;
}

export type Reply = { id: number; rows: number; columns: Columns } | { id: number; error: string };

/** Columns whose values can exceed 32 bits. */
const WIDE = new Set(["start", "bytes"]);

function fromBase64(text: string): ArrayBuffer {
  const native = Uint8Array as unknown as { fromBase64?: (text: string) => Uint8Array };
  if (native.fromBase64) return native.fromBase64(text).buffer as ArrayBuffer;
  const binary = atob(text);
  const result = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) result[i] = binary.charCodeAt(i);
  return result.buffer;
}

async function decode(base64: string): Promise<{ rows: number; columns: Columns }> {
  const file = fromBase64(base64);
  const metadata = parquetMetadata(file);
  const rows = Number(metadata.num_rows);
  const columns: Columns = {};
  for (const { name } of metadata.schema.slice(1)) {
    columns[name] = WIDE.has(name) ? new Float64Array(rows) : new Int32Array(rows);
  }
  for (const name of Object.keys(columns)) {
    const column = columns[name];
    await parquetRead({
      file,
      metadata,
      columns: [name],
      onChunk: ({ columnData, rowStart }) => {
        if (columnData instanceof BigInt64Array) for (let i = 0; i < columnData.length; i++) column[rowStart + i] = Number(columnData[i]);
        else if (columnData.length && typeof columnData[0] === "bigint") for (let i = 0; i < columnData.length; i++) column[rowStart + i] = Number(columnData[i]);
        else column.set(columnData as ArrayLike<number>, rowStart);
      },
    });
  }
  return { rows, columns };
}

self.onmessage = async (event: MessageEvent<Request>) => {
  const { id, base64 } = event.data;
  let reply: Reply;
  try {
    reply = { id, ...(await decode(base64)) };
  } catch (error) {
    reply = { id, error: String(error) };
  }
  const buffers = "columns" in reply ? Object.values(reply.columns).map((c) => c.buffer) : [];
  (self as unknown as { postMessage(message: unknown, transfer: Transferable[]): void }).postMessage(reply, buffers);
};
