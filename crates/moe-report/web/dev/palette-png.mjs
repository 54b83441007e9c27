// Encodes pixels as a PNG with a palette, which is much smaller than a screenshot with full colors.
import { deflateSync } from "node:zlib";

const CRC = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n >>> 0;
});

function chunk(type, data) {
  const body = Buffer.concat([Buffer.from(type, "latin1"), data]);
  let crc = 0xffffffff;
  for (const byte of body) crc = CRC[(crc ^ byte) & 255] ^ (crc >>> 8);
  const out = Buffer.alloc(body.length + 8);
  out.writeUInt32BE(data.length);
  body.copy(out, 4);
  out.writeUInt32BE(~crc >>> 0, body.length + 4);
  return out;
}

/** Returns a PNG of RGBA pixels with at most `colors` colors: the most frequent ones, to the nearest of which the others are changed. */
export function palettePng(rgba, width, height, colors) {
  const counts = new Map();
  const key = (i) => (rgba[i] << 16) | (rgba[i + 1] << 8) | rgba[i + 2];
  for (let i = 0; i < rgba.length; i += 4) counts.set(key(i), (counts.get(key(i)) ?? 0) + 1);
  const sorted = [...counts].sort((a, b) => b[1] - a[1]).map(([color]) => color);
  const distance = (a, b) => ((a >> 16) - (b >> 16)) ** 2 + (((a >> 8) & 255) - ((b >> 8) & 255)) ** 2 + ((a & 255) - (b & 255)) ** 2;
  // Frequent colors that differ visibly come first.
  const palette = [];
  for (const least of [400, 100, 25, 0]) {
    for (const color of sorted) {
      if (palette.length === colors) break;
      if (!palette.some((other) => distance(color, other) <= least)) palette.push(color);
    }
  }
  const nearest = new Map(sorted.map((color) => [color, palette.reduce((best, p, i) => (distance(color, p) < distance(color, palette[best]) ? i : best), 0)]));
  const bits = palette.length <= 16 ? 4 : 8;
  const stride = 1 + Math.ceil((width * bits) / 8);
  const rows = Buffer.alloc(stride * height);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const index = nearest.get(key(4 * (y * width + x)));
      if (bits === 8) rows[y * stride + 1 + x] = index;
      else rows[y * stride + 1 + (x >> 1)] |= x & 1 ? index : index << 4;
    }
  }
  const header = Buffer.alloc(13);
  header.writeUInt32BE(width);
  header.writeUInt32BE(height, 4);
  header.set([bits, 3], 8);
  const parts = [chunk("IHDR", header), chunk("PLTE", Buffer.from(palette.flatMap((c) => [c >> 16, (c >> 8) & 255, c & 255]))), chunk("IDAT", deflateSync(rows, { level: 9 })), chunk("IEND", Buffer.alloc(0))];
  return Buffer.concat([Buffer.from([137, 80, 78, 71, 13, 10, 26, 10]), ...parts]);
}
