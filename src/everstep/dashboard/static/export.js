// A chart's data as CSV and its picture as PNG, made in the browser from what is shown.

import { colour, el } from "./dom.js";

const TITLE_PX = 30;

/** A cell of a CSV: quoted where it must be; text that a spreadsheet would compute stays text. */
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t]/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** Lines of x and the series, all points whatever the zoom; the first line names them. */
export function csv(label, x, series) {
  const rows = x.map((at, i) => [at, ...series.map((s) => s.y[i])]);
  return [[label, ...series.map((s) => s.name)], ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

/** The picture of a plot with its title and the names of its series, in as many lines as they take, as a Blob. */
export function png(title, plot, series) {
  const scale = devicePixelRatio, from = plot.ctx.canvas, edge = 10 * scale, font = `${13 * scale}px system-ui, sans-serif`;
  const canvas = el("canvas", { width: from.width }), ctx = canvas.getContext("2d");
  ctx.font = font;
  let left = edge, line = 0;
  const words = [[title, "ink"], ...(series.length > 1 ? series.map((s) => [s.name, s.colour]) : [])].map(([text, tint]) => {
    const wide = ctx.measureText(text).width;
    if (left > edge && left + wide > from.width - edge) [left, line] = [edge, line + 1];
    const place = { text, tint, left, y: (line + 0.5) * TITLE_PX * scale };
    left += wide + 14 * scale;
    return place;
  });
  const top = (line + 1) * TITLE_PX * scale;
  canvas.height = from.height + top; // which forgets the font
  ctx.fillStyle = colour("panel");
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.font = font;
  ctx.textBaseline = "middle";
  for (const { text, tint, left, y } of words) {
    ctx.fillStyle = colour(tint);
    ctx.fillText(text, left, y);
  }
  ctx.drawImage(from, 0, top);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

/** Hand a file to the browser's downloads. */
export function save(name, blob) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name.replace(/[^\w.-]+/g, "-") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
