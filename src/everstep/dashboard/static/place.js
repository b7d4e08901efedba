// The place that a link names: zoom, axis, moment and run, in the part of the address that no server sees.

const read = () => new URLSearchParams(location.hash.slice(1));

/** What the address says of a name; null if nothing. */
export const told = (name) => read().get(name);

/** Two numbers that the address says of a name, rising; null if it has none. */
export function span(name) {
  const found = (told(name) ?? "").match(/^(-?\d{1,16}(?:\.\d{1,6})?)~(-?\d{1,16}(?:\.\d{1,6})?)$/);
  const [low, high] = found ? [Number(found[1]), Number(found[2])] : [0, 0];
  return low < high ? [low, high] : null;
}

/** Let the address say this of a name; null: nothing. */
export function keep(name, value) {
  const all = read();
  if (value === null) all.delete(name);
  else all.set(name, Array.isArray(value) ? value.map((v) => Number(v.toFixed(3))).join("~") : String(value));
  history.replaceState(null, "", `${location.pathname}${location.search}${all.size ? `#${all}` : ""}`);
}
