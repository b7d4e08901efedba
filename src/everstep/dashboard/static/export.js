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

/** The picture of a plot with its title and the names of its series, as a Blob. */
export function png(title, plot, series) {
  const scale = devicePixelRatio, from = plot.ctx.canvas;
  const canvas = el("canvas", { width: from.width, height: from.height + TITLE_PX * scale }), ctx = canvas.getContext("2d");
  ctx.fillStyle = colour("panel");
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.font = `${13 * scale}px system-ui, sans-serif`;
  ctx.textBaseline = "middle";
  let left = 10 * scale;
  const say = (text, tint) => {
    ctx.fillStyle = colour(tint);
    ctx.fillText(text, left, (TITLE_PX / 2) * scale);
    left += ctx.measureText(text).width + 14 * scale;
  };
  say(title, "ink");
  for (const s of series.length > 1 ? series : []) say(s.name, s.colour);
  ctx.drawImage(from, 0, TITLE_PX * scale);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

/** Hand a file to the browser's downloads. */
export function save(name, blob) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name.replace(/[^\w.-]+/g, "-") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
