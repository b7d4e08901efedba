// Building elements and writing numbers. Text only ever becomes text: nothing here, or anywhere, parses HTML.

export const $ = (id) => document.getElementById(id);

/** An element with properties (`data-*` and `aria-*` as attributes) and children (strings become text). */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An element with these style properties; the policy of the page allows no style attributes. */
export function styled(node, properties) {
  for (const [name, value] of Object.entries(properties)) node.style.setProperty(name, value);
  return node;
}

/** Set text, touching the page only where it changes. */
export function write(node, text) {
  const value = String(text ?? "");
  if (node.textContent !== value) node.textContent = value;
}

export function attribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** A number with so many digits after the point; with significant ones where those would say little. */
export const number = (value, digits = 1) =>
  value === null || value === undefined || !isFinite(value) ? "–" : Math.abs(value) >= 10000 ? compact.format(value) : value && Math.abs(value) < 10 ** (1 - digits) ? String(Number(value.toPrecision(Math.max(2, digits)))) : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: Number.isInteger(value) ? 0 : digits });
export const compactNumber = (value) => compact.format(value);
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

export const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (!seconds) return "0 s";
  if (seconds < 0.001) return `${Math.round(1e6 * seconds)} µs`;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${two(Math.floor((whole % 3600) / 60))}m`;
  return `${Math.floor(whole / 86400)}d${two(Math.floor((whole % 86400) / 3600))}h`;
}

export function ago(ms, nowMs) {
  const seconds = Math.max(0, (nowMs - ms) / 1000);
  return seconds < 2 ? "now" : `${duration(Math.floor(seconds)).replace(".0 s", " s")} ago`;
}

export function bytes(size) {
  if (!size) return "–";
  let value = size;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return `${unit === "B" ? value : value.toFixed(value < 100 ? 1 : 0)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

const colours = new Map();
/** A colour of the style sheet. */
export function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}
export const forgetColours = () => colours.clear();

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
